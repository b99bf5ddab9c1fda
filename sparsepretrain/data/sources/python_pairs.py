"""Sentence-pair classification made of Python functions: what is this text to that function?"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import ClassVar

from sparsepretrain.data.source import SourceOptions
from sparsepretrain.data.sources._functions import Function, FunctionOptions, FunctionSource
from sparsepretrain.data.sources._records import Row
from sparsepretrain.data.sources.labelled_texts import LABELLED
from sparsepretrain.registry import register

LABELS = ("its body", "another body", "its docstring", "another docstring")
HEAD = 88
"""Most characters of a function's head."""
LONGEST = 96
"""Characters of the second text; with the head and bytes as tokens a pair fits into 192."""


@dataclass(slots=True, kw_only=True)
class Options(FunctionOptions):
    """Options of ``source: python_pairs``."""

    @property
    def labels(self) -> list[str]:
        """Names of the classes."""
        return list(LABELS)


@register("source", "python_pairs")
class PythonPairs(FunctionSource):
    """The head of a function, and its or another function's body or docstring.

    All four are asked of a function, so the classes are balanced. The other function is of the same
    file: words and style do not tell them apart, names have to be compared.
    """

    Options: ClassVar[type[SourceOptions]] = Options
    holds = LABELLED

    def records(self, functions: Iterator[Function]) -> Iterator[Row]:
        found = (f for f in functions if f.docstring and len(f.head) <= HEAD and f.name[:2] != "__")
        usable = list(islice(found, self.options.per_file // len(LABELS)))
        for i, own in enumerate(usable if len(usable) > 1 else []):
            other = usable[(i + len(usable) // 2) % len(usable)]
            seconds = (own.body, other.body, own.docstring, other.docstring)
            for label, second in enumerate(seconds):
                yield {"texts": [own.head, second[:LONGEST]], "label": label, "part": 0}
