"""Question answering on Python functions: the line that begins a definition."""

from __future__ import annotations

import ast
import itertools
import textwrap
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, ClassVar

from sparsepretrain.data.source import Document, Shard, SourceOptions
from sparsepretrain.data.sources._records import Row, encode
from sparsepretrain.data.sources.python_source import PythonSource, RootOptions
from sparsepretrain.registry import register

CONTEXT = 200
"""Maximum characters of a context; with the question it fits into 256 bytes."""
NAME = 24
"""Maximum characters of a function's name."""


@dataclass(slots=True, kw_only=True)
class Options(RootOptions):
    """Options of ``source: python_qa``."""

    per_file: Annotated[int, "≥ 1"]
    validation: Annotated[float, "(0, 1)"]
    seed: Annotated[int, "[0, 2^32)"]


@register("source", "python_qa")
class PythonQA(PythonSource):
    """Questions about one of the two short functions in a context.

    Both begin with a well-formed answer, so the model must match the name.
    """

    Options: ClassVar[type[SourceOptions]] = Options
    kind = "questions"

    def documents(self, shard: Shard) -> Iterator[Document]:
        for text, _ in super().documents(shard):
            assert isinstance(text, bytes)
            definitions = functions(text.decode(errors="replace"))
            short = (f for f in definitions if len(f[0]) <= NAME and len(f[1]) < CONTEXT * 3 // 4)
            records = filter(None, itertools.starmap(_record, itertools.pairwise(short)))
            for number, both in enumerate(itertools.islice(records, self.options.per_file)):
                yield encode(both[number % 2]), True


def functions(source: str) -> Iterator[tuple[str, str]]:
    """Yield names and dedented texts of functions, outer ones first; none if it does not parse."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in the files read
            tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return
    lines = source.replace("\r\n", "\n").split("\n")  # as ast counts them
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            text = "\n".join(lines[node.lineno - 1 : node.end_lineno])
            yield node.name, textwrap.dedent(text).rstrip() + "\n"


def _record(first: tuple[str, str], second: tuple[str, str]) -> tuple[Row, Row] | None:
    """Return the questions about both functions; None if they do not fit into one context."""
    context = f"{first[1]}\n{second[1]}"
    if len(context) > CONTEXT or not context.isascii() or first[0] == second[0]:
        return None
    one, other = (
        {
            "question": f"where is {name} defined?",
            "context": context,
            "answers": [(text.partition("\n")[0], start)],
        }
        for (name, text), start in ((first, 0), (second, len(first[1]) + 1))
    )
    return one, other
