"""Labeled sentences and sentence pairs: GLUE from the hub, or files in the same format."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from sparsepretrain.data.source import SourceOptions
from sparsepretrain.data.sources._records import RecordOptions, RecordSource
from sparsepretrain.data.sources._rows import Row, text
from sparsepretrain.errors import Problems
from sparsepretrain.registry import register


@dataclass(slots=True, kw_only=True)
class Options(RecordOptions):
    """Options of ``source: labelled_texts``."""

    texts: list[str]
    label: str
    labels: list[str]

    def problems(self) -> Problems:
        yield from RecordOptions.problems(self)
        if len(self.texts) not in (1, 2):
            yield "texts", f"must name one or two columns, got {len(self.texts)}"
        if len(self.labels) == 1:
            yield "labels", "must name two or more classes, or none for a real number"


@register("source", "labelled_texts")
class LabelledTexts(RecordSource):
    """Records ``{"texts": […], "label": number, "part": …}``."""

    Options: ClassVar[type[SourceOptions]] = Options
    kind = "labeled texts"

    def record(self, row: Row, part: int) -> Row:
        texts = [text(row, column) for column in self.options.texts]
        return {"texts": texts, "label": self._label(row), "part": part}

    def _label(self, row: Row) -> int | float:
        column = self.options.label
        names = self.options.labels
        value: Any = row[column]
        if value is None or (value == -1 and names):
            raise ValueError(f"column {column!r} holds no label ({value}): is it a test file?")
        if isinstance(value, bool):
            value = int(value)
        if isinstance(value, float) and math.isnan(value):
            raise ValueError(f"column {column!r} holds no label (NaN)")
        if not names:
            if not isinstance(value, int | float) or not math.isfinite(value):
                raise ValueError(f"label {value!r} is not a number")
            return float(value)
        if value in names:
            return int(names.index(value))
        if isinstance(value, float) and value.is_integer():  # pandas writes 1.0 beside missing ones
            value = int(value)
        if not isinstance(value, int) or not 0 <= value < len(names):
            known = ", ".join(names)
            raise ValueError(f"label {value!r} is neither in [0, {len(names)}) nor one of {known}")
        return value
