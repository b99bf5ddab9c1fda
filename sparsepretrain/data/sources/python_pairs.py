"""Sentence-pair classification made of Python functions: what is this text to that function?"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal

from sparsepretrain.data.sources._functions import Function, FunctionOptions, FunctionSource
from sparsepretrain.data.sources._records import Row
from sparsepretrain.data.sources._source import SourceOptions
from sparsepretrain.data.sources.labelled_texts import LABELLED
from sparsepretrain.registry import register

LABELS = ("its body", "another body", "its docstring", "another docstring")
LONGEST = 96
"""Characters of the second text; with the first and bytes as tokens a pair fits into 192."""


@dataclass(slots=True, kw_only=True)
class Options(FunctionOptions):
    """Options of ``source: python_pairs``."""

    source: Literal["python_pairs"]

    @property
    def labels(self) -> list[str]:
        """Names of the classes."""
        return list(LABELS)


@register("source", "python_pairs")
class PythonPairs(FunctionSource):
    """The head of a function, and its or another function's body or docstring.

    The classes take turns, so they are balanced. Other bodies and docstrings come from the same
    file: its words and style do not tell them apart, names have to be compared.
    """

    Options: ClassVar[type[SourceOptions]] = Options
    holds = LABELLED

    def records(self, functions: list[Function]) -> Iterator[Row]:
        """Every class is asked of the same number of functions of a file."""
        usable = [
            f for f in functions if f.docstring and len(f.head) <= LONGEST - 8 and f.name[:2] != "__"
        ]
        classes = len(LABELS)
        count = min(self.options.per_file, len(usable)) // classes * classes
        if len(usable) < 2:
            return
        for i in range(count):
            label = i % classes
            other = usable[(i + len(usable) // 2) % len(usable)]
            chosen = usable[i] if label in (0, 2) else other
            second = chosen.body if label < 2 else chosen.docstring
            yield {"texts": [usable[i].head, second[:LONGEST]], "label": label, "part": 0}
