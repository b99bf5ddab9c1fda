"""Ranges of options and their messages."""

from dataclasses import dataclass
from typing import Any, ClassVar

import pytest

from sparsepretrain.limits import Limited


@dataclass(slots=True)
class Options(Limited):
    limits: ClassVar[dict[str, str]] = {"x": "> 0"}
    x: Any


@pytest.mark.parametrize(
    ("limit", "good", "bad"),
    [
        ("> 0", [1, 0.5, None], [0, -1]),
        ("≥ 8", [8, 9, None], [7, 0]),
        ("[0, 1)", [0, 0.5], [1, -0.1]),
        ("(0, 1]", [1, 0.5, [0.1, 1.0]], [0, 1.1, [0.5, 0.0]]),
    ],
)
def test_limits(monkeypatch, limit, good, bad):
    monkeypatch.setattr(Options, "limits", {"x": limit})
    assert not [x for x in good if list(Options(x).problems())]
    verb = "lie in" if "," in limit else "be"
    for x in bad:
        assert list(Options(x).problems()) == [("x", f"must {verb} {limit}, got {x}")]


def test_tuples_are_shown_as_lists():
    assert list(Options((1.0, 0.0)).problems()) == [("x", "must be > 0, got [1.0, 0.0]")]
