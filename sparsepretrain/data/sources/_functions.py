"""Functions of Python files, found with ``ast``: what the offline stand-ins are made of."""

from __future__ import annotations

import ast
import textwrap
import warnings
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, ClassVar

from sparsepretrain.data.source import Document, Shard
from sparsepretrain.data.sources._records import Row, encode
from sparsepretrain.data.sources.python_source import PythonSource, RootOptions


@dataclass(slots=True, kw_only=True)
class FunctionOptions(RootOptions):
    """Keys of the sources that are made of functions."""

    per_file: Annotated[int, "≥ 1"]
    """Most records of one file, so that a large file does not dominate."""
    validation: Annotated[float, "(0, 1)"]
    """Fraction of the text that is held out, by whole files, in (0, 1)."""
    seed: int
    """Decides which files are held out."""


@dataclass(frozen=True, slots=True)
class Function:
    """A function of a file, its text dedented."""

    name: str
    head: str
    """``def name(arguments)``, in one line."""
    docstring: str
    """First line; empty if there is none."""
    body: str
    """Without the docstring."""
    source: str
    """All of it, decorators left out."""
    returned: tuple[str, int] | None
    """Expression of the only return statement and its place in ``source``."""


class FunctionSource(PythonSource):
    """Records made of the functions of each file; the split is by file."""

    kind = "records"
    holds: ClassVar[str]

    @abstractmethod
    def records(self, functions: Iterator[Function]) -> Iterator[Row]:
        """The records of one file, ``per_file`` at most; a function of its argument.

        Functions are looked at when they are asked for, which costs more than parsing.
        """

    def documents(self, shard: Shard) -> Iterator[Document]:
        for text, _ in super().documents(shard):
            assert isinstance(text, bytes)
            for record in self.records(functions(text.decode(errors="replace"))):
                yield encode(record), True


def functions(source: str) -> Iterator[Function]:
    """The functions of a file, outer ones first; none if it is no Python of this version."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes in other people's strings
            tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return
    lines = source.replace("\r\n", "\n").split("\n")  # as ast counts them
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and (function := _function(node, lines)) is not None:
            yield function


def _function(node: ast.FunctionDef, lines: list[str]) -> Function | None:
    documentation = ast.get_docstring(node)
    docstring = (documentation or "").partition("\n")[0].strip()
    statements = node.body if documentation is None else node.body[1:]
    if not statements or statements[0].lineno == node.lineno:  # all in one line
        return None
    text = "\n".join(lines[node.lineno - 1 : node.end_lineno])
    source = textwrap.dedent(text).rstrip() + "\n"
    body = textwrap.dedent("\n".join(lines[statements[0].lineno - 1 : node.end_lineno]))
    head = f"def {node.name}({ast.unparse(node.args)})"
    returns = [child.value for child in ast.walk(node) if isinstance(child, ast.Return)]
    values = [value for value in returns if value is not None]
    returned = _returned(values[0], lines, source) if len(values) == 1 else None
    return Function(node.name, head, docstring, body, source, returned)


def _returned(value: ast.expr, lines: list[str], source: str) -> tuple[str, int] | None:
    """The returned expression and its place in ``source``; None if it takes several lines."""
    if value.lineno != value.end_lineno:
        return None
    line = lines[value.lineno - 1].encode()  # columns count bytes
    expression = line[value.col_offset : value.end_col_offset].decode()
    place = source.rfind(f"return {expression}")
    return (expression, place + len("return ")) if place >= 0 else None
