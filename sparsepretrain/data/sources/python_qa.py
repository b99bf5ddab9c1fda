"""Span extraction made of Python functions: where is X defined, what does X return?"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import ClassVar

from sparsepretrain.data.source import SourceOptions
from sparsepretrain.data.sources._functions import Function, FunctionOptions, FunctionSource
from sparsepretrain.data.sources._records import Row
from sparsepretrain.data.sources.questions import QUESTIONS
from sparsepretrain.registry import register

CONTEXT = 200
"""Most characters of a context; with the question and bytes as tokens it fits into 256."""
NAME = 24
"""Most characters of the name that is asked about."""


@register("source", "python_qa")
class PythonQA(FunctionSource):
    """The context is two short functions, and one of them is asked about.

    So half of the answers that have the right form are wrong: the name has to be found.
    """

    Options: ClassVar[type[SourceOptions]] = FunctionOptions
    holds = QUESTIONS

    def records(self, functions: Iterator[Function]) -> Iterator[Row]:
        """One question about every two neighbours that are short enough, of both kinds in turn."""
        short = (
            f
            for f in functions
            if f.returned is not None and len(f.name) <= NAME and len(f.source) < CONTEXT * 3 // 4
        )
        made = 0
        for first, second in pairwise(short):
            context = f"{first.source}\n{second.source}"
            if made == self.options.per_file:
                return
            if len(context) > CONTEXT or not context.isascii() or first.name == second.name:
                continue
            asked = (first, second)[made // 2 % 2]
            offset = 0 if asked is first else len(first.source) + 1
            assert asked.returned is not None
            if made % 2:
                question = f"what does {asked.name} return?"
                answer, start = asked.returned
            else:
                question = f"where is {asked.name} defined?"
                answer, start = asked.source.partition("\n")[0], 0
            answers = [(answer, offset + start)]
            yield {"question": question, "context": context, "answers": answers}
            made += 1
