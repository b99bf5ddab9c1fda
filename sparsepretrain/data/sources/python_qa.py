"""Question answering on Python functions: location of the definition, returned expression."""

from __future__ import annotations

import ast
import textwrap
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
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


@dataclass(frozen=True, slots=True)
class Function:
    """Function of a file, dedented."""

    name: str
    source: str
    """Source text without decorators."""
    returned: tuple[str, int]
    """Expression of the only return statement and its offset in ``source``."""


@register("source", "python_qa")
class PythonQA(PythonSource):
    """Questions about one of the two short functions in a context.

    Both functions give a well-formed answer, so the model must match the name.
    """

    Options: ClassVar[type[SourceOptions]] = Options
    kind = "questions"

    def documents(self, shard: Shard) -> Iterator[Document]:
        for text, _ in super().documents(shard):
            assert isinstance(text, bytes)
            for record in self._records(functions(text.decode(errors="replace"))):
                yield encode(record), True

    def _records(self, functions: Iterator[Function]) -> Iterator[Row]:
        """Yield one question per pair of short neighbors, alternating between both kinds.

        ``functions`` is lazy: examining a function costs more than parsing.
        """
        short = (f for f in functions if len(f.name) <= NAME and len(f.source) < CONTEXT * 3 // 4)
        made = 0
        for first, second in pairwise(short):
            context = f"{first.source}\n{second.source}"
            if made == self.options.per_file:
                return
            if len(context) > CONTEXT or not context.isascii() or first.name == second.name:
                continue
            asked = (first, second)[made // 2 % 2]
            offset = 0 if asked is first else len(first.source) + 1
            if made % 2:
                question = f"what does {asked.name} return?"
                answer, start = asked.returned
            else:
                question = f"where is {asked.name} defined?"
                answer, start = asked.source.partition("\n")[0], 0
            answers = [(answer, offset + start)]
            yield {"question": question, "context": context, "answers": answers}
            made += 1


def functions(source: str) -> Iterator[Function]:
    """Yield functions with one returned expression, outer ones first; none if it does not parse."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in the files read
            tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return
    lines = source.replace("\r\n", "\n").split("\n")  # as ast counts them
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and (function := _function(node, lines)) is not None:
            yield function


def _function(node: ast.FunctionDef, lines: list[str]) -> Function | None:
    statements = node.body if ast.get_docstring(node) is None else node.body[1:]
    if not statements or statements[0].lineno == node.lineno:  # all in one line
        return None
    text = "\n".join(lines[node.lineno - 1 : node.end_lineno])
    source = textwrap.dedent(text).rstrip() + "\n"
    returns = [child.value for child in ast.walk(node) if isinstance(child, ast.Return)]
    values = [value for value in returns if value is not None]
    returned = _returned(values[0], lines, source) if len(values) == 1 else None
    return None if returned is None else Function(node.name, source, returned)


def _returned(value: ast.expr, lines: list[str], source: str) -> tuple[str, int] | None:
    """Return the expression and its offset in ``source``; None if it spans several lines."""
    if value.lineno != value.end_lineno:
        return None
    line = lines[value.lineno - 1].encode()  # columns count bytes
    expression = line[value.col_offset : value.end_col_offset].decode()
    # search: dedenting has moved the columns that ast counted
    start = source.rfind(f"return {expression}")
    return (expression, start + len("return ")) if start >= 0 else None
