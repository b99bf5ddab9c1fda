"""Labeled sentences and sentence pairs: GLUE from the hub, or files in the same format."""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import dataclass
from decimal import Decimal
from functools import cached_property
from typing import Any, ClassVar

from sparsepretrain.data.source import SourceOptions
from sparsepretrain.data.sources._records import RecordOptions, RecordSource, whole_text
from sparsepretrain.data.sources._rows import Row
from sparsepretrain.errors import Problems
from sparsepretrain.registry import register

BOOLEANS = {"true": 1, "false": 0}
"""Lowercase names of the two JSON values -> their numbers."""
TRUTHS = BOOLEANS | {"yes": 1, "no": 0}
"""Lowercase names of classes that a truth value of a file may mean."""
NUMBER = re.compile(r"[+-]?\d+(\.\d+)?([eE][+-]?\d{1,3})?")
"""Names of classes that are numbers."""
LARGEST = 3.4028234663852886e38
"""Largest finite number in fp32, the precision of labels in the loss."""


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
        if twice := [name for name, count in Counter(self.labels).items() if count > 1]:
            yield "labels", f"must name each class once, got {', '.join(map(repr, twice))} twice"


@register("source", "labelled_texts")
class LabelledTexts(RecordSource):
    """Records ``{"texts": […], "label": number, "part": …}``.

    A label is the name of a class, also where names are numbers or truth values, or its index.
    """

    Options: ClassVar[type[SourceOptions]] = Options
    kind = "labeled texts"

    def state(self) -> list[Any]:
        # data prepared when such names were taken for indices are not used again
        return super().state() + ([] if self._takes_indices else ["labels by name"])

    def record(self, row: Row, part: int) -> Row:
        texts = [whole_text(row, column) for column in self.options.texts]
        return {"texts": texts, "label": self._label(row), "part": part}

    @cached_property
    def _numbers(self) -> dict[int, Decimal]:
        """Index -> number that is the name of the class."""
        names = enumerate(self.options.labels)
        return {i: Decimal(name) for i, name in names if NUMBER.fullmatch(name)}

    @cached_property
    def _booleans(self) -> dict[int, int]:
        """Index -> truth value that is the name of the class."""
        names = enumerate(self.options.labels)
        return {i: BOOLEANS[name.lower()] for i, name in names if name.lower() in BOOLEANS}

    @cached_property
    def _truths(self) -> dict[int, int]:
        """Index -> truth value that the class means."""
        names = enumerate(self.options.labels)
        return {i: TRUTHS[name.lower()] for i, name in names if name.lower() in TRUTHS}

    @cached_property
    def _takes_indices(self) -> bool:
        """True if a number in the file cannot be mistaken for the name of another class."""
        return all(index == number for index, number in (self._numbers | self._booleans).items())

    def _label(self, row: Row) -> int | float:
        column = self.options.label
        names = self.options.labels
        value: Any = row[column]
        if value is None:
            raise ValueError(f"column {column!r} holds no label (None): is it a test file?")
        if isinstance(value, float) and math.isnan(value):
            raise ValueError(f"column {column!r} holds no label (NaN)")
        if not names:
            return _real(value)
        if isinstance(value, bool) and not self._truths:
            if not self._numbers:
                raise ValueError(
                    f"label {_show(value)} is a truth value, and none of {', '.join(names)} is: "
                    "write true and false, or yes and no, in data.labels"
                )
            value = int(value)
        index = self._named(value)
        if index is not None:
            return index
        if isinstance(value, float) and value.is_integer():  # pandas writes 1.0 beside missing ones
            value = int(value)
        if value == -1:
            raise ValueError(f"column {column!r} holds no label (-1): is it a test file?")
        known = ", ".join(names)
        is_index = isinstance(value, int) and not isinstance(value, bool)
        if is_index and not self._takes_indices:
            raise ValueError(
                f"label {_show(value)} is no name in data.labels, and no index, since names there "
                f"are numbers or truth values: write the name in the file: {known}"
            )
        if not is_index or not 0 <= value < len(names):
            text = f"label {_show(value)} is neither in [0, {len(names)}) nor one of {known}"
            raise ValueError(text)
        return int(value)

    def _named(self, value: Any) -> int | None:
        """Return the class whose name is the text or the number ``value``, or None."""
        names = self.options.labels
        if isinstance(value, str):
            return int(names.index(value)) if value in names else None
        if isinstance(value, bool):
            same = [i for i, truth in self._truths.items() if truth == value]
            written = str(value).lower()  # as JSON spells it
        elif isinstance(value, int | float):
            # 0.1 is its shortest decimal text, not the nearest binary fraction
            number = Decimal(repr(value)) if isinstance(value, float) else Decimal(value)
            same = [i for i, other in self._numbers.items() if other == number]
            written = str(value) if len(same) > 1 else ""
        else:
            return None
        if len(same) > 1:
            exact = [i for i in same if names[i] == written]
            if not exact:
                both = " and ".join(repr(names[i]) for i in same)
                raise ValueError(f"label {_show(value)} may be {both} of data.labels: rename one")
            same = exact
        return same[0] if same else None


def _real(value: Any) -> float:
    """Return the number to predict."""
    # compared as it is: an integer of JSON may be too large for a float
    if not isinstance(value, int | float):
        raise ValueError(f"label {_show(value)} is not a number")
    if not -LARGEST <= value <= LARGEST:
        raise ValueError(f"label {_show(value)} is not a number within fp32 (at most 3.4e38)")
    return float(value)


def _show(value: Any) -> str:
    """Return a value as text for a message, in 40 characters."""
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}…"
