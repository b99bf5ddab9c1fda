"""``gather=packed`` sends fewer bytes and changes no bit, in anybody's loop and in the trainer."""

import json
from pathlib import Path

import pytest
import test_sharded_loops
from ranks import VARIANTS, Case, train_with, variant
from tiny_runs import assert_equal_bits, final_state, metrics

pytestmark = [pytest.mark.dist, pytest.mark.timeout(1800)]

A, BOTH = "gathered packed 2:4: A of 4 layers", "gathered packed 2:4: A of 4 layers, B of 4 layers"
PACKED = {
    **dict.fromkeys(("ste", "srste", "srste weight", "sste", "sste step"), A),
    **dict.fromkeys(("sste weight", "slope"), BOTH),
    "bimask": f"{A}; as they are: B of 4 layers (Mb∘W (rows permuted) is not 2:4)",
}
"""Variants of which something is packed -> what the coverage says."""

LOOPS = [
    *({"name": name} for name in VARIANTS),
    *({"name": name, "kind": "conv1d"} for name in ("sste", "slope", "bimask", "sste weight")),
    *({"name": name, "kind": "conv2d"} for name in ("sste", "bimask", "sste weight")),
    {"name": "slope", "evaluates": True, "reshard": None},
    {"name": "sste", "evaluates": True, "reshard": False},
]


def test_loops(monkeypatch):
    monkeypatch.setattr(test_sharded_loops, "SHARDS", Path(__file__).with_name("packed.py"))
    for case, found in zip(LOOPS, test_sharded_loops.compared(2, LOOPS), strict=True):
        assert found["equal"], case
        told = PACKED.get(case["name"], "gathered packed 2:4: nothing; as they are: A of 4 layers (")
        assert found["told"].startswith(told), (case, found)


def test_runs(tiny):
    cases = [
        Case(
            f"{name}, {precision}, {gather}",
            (*variant(name), f"precision={precision}", "steps=6"),
            parallel=("parallel=fsdp", f"parallel.gather={gather}"),
        )
        for name in ("srste", "sste", "slope", "bimask", "step")
        for precision in ("fp32", "bf16")
        for gather in ("operand", "packed")
    ]
    found = train_with(tiny, 2, cases)
    for one, many in zip(cases[::2], cases[1::2], strict=True):
        left, right = found[one.name], found[many.name]
        assert left.name == right.name, "how operands are gathered is no part of a run's identity"
        assert metrics(left) == metrics(right), many.name
        assert_equal_bits(final_state(left), final_state(right))
        told = json.loads((right / "environment.json").read_text())["coverage"][-1]
        assert ("nothing" in told) == ("step" in many.name) and "packed 2:4" in told
