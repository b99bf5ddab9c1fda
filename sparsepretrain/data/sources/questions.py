"""Questions whose answer is a span of a context: SQuAD v1.1, or files in the same format."""

from __future__ import annotations

from typing import Any, ClassVar

from sparsepretrain.data.source import SourceOptions
from sparsepretrain.data.sources._records import RecordOptions, RecordSource, whole_text
from sparsepretrain.data.sources._rows import Row
from sparsepretrain.registry import register


@register("source", "questions")
class Questions(RecordSource):
    """Records ``{"question": …, "context": …, "answers": [[text, start], …]}``.

    Columns as on the hub: question, context, and answers with the lists text and answer_start
    (characters). Every question has an answer (v1.1).
    """

    Options: ClassVar[type[SourceOptions]] = RecordOptions
    kind = "questions"

    def record(self, row: Row, part: int) -> Row:
        context = whole_text(row, "context")
        answers: Any = row["answers"]
        try:
            spans = list(zip(answers["text"], answers["answer_start"], strict=True))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                "column 'answers' must hold the lists text and answer_start, of equal length"
            ) from error
        if not spans:
            raise ValueError("column 'answers' holds no answer")
        for answer, start in spans:
            if not isinstance(answer, str) or not isinstance(start, int):
                raise ValueError("column 'answers' must hold texts and character positions")
            if not answer or start < 0 or context[start : start + len(answer)] != answer:
                raise ValueError(f"answer {answer[:40]!r} is not in the context at {start}")
        return {"question": whole_text(row, "question"), "context": context, "answers": spans}
