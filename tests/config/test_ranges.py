"""Ranges of options and their messages."""

from dataclasses import make_dataclass
from typing import Annotated, Any

import pytest

from sparsepretrain.config.strict import out_of_range


def problems(limit, value):
    """What the strict pass says of a field ``x`` with this range."""
    return list(out_of_range(make_dataclass("Options", [("x", Annotated[Any, limit])])(value)))


@pytest.mark.parametrize(
    ("limit", "good", "bad"),
    [
        ("> 0", [1, 0.5, None], [0, -1]),
        ("≥ 8", [8, 9, None], [7, 0]),
        ("[0, 1)", [0, 0.5], [1, -0.1]),
        ("(0, 1]", [1, 0.5, [0.1, 1.0]], [0, 1.1, [0.5, 0.0]]),
        ("[0, 2^63)", [0, 2**63 - 1], [-1, 2**63]),
    ],
)
def test_values_out_of_limits_are_refused(limit, good, bad):
    assert not [x for x in good if problems(limit, x)]
    verb = "lie in" if "," in limit else "be"
    for x in bad:
        assert problems(limit, x) == [("x", f"must {verb} {limit}, got {x}")]


def test_tuples_are_shown_as_lists():
    assert problems("> 0", (1.0, 0.0)) == [("x", "must be > 0, got [1.0, 0.0]")]
