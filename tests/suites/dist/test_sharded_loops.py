"""Sharded models give the answer of whole ones in anybody's loop: see docs/many_machines.md."""

import pytest

from support.ranks import VARIANTS
from support.sharded_loops import compared

pytestmark = [pytest.mark.dist, pytest.mark.timeout(1800)]

FP64 = 1e-12

METHODS = [{"name": name} for name in VARIANTS]
KINDS = {
    "conv1d": "sste tsrste bimask slope step ast cast ternary maskpro maskllm proxsparse",
    "conv2d": "sste srste tsrste bimask asp ast maskpro maskllm proxsparse",
    "bank": "ste srste sste tsrste step asp ast cast ternary maskpro maskllm proxsparse",
    "bank_in_out": "srste sste tsrste step asp maskpro maskllm proxsparse",
}
STORAGES = [
    {"name": "proxsparse frozen", "kind": "bank"},
    *({"name": n, "kind": kind} for kind, names in KINDS.items() for n in names.split()),
    *({"name": "slope without adapters", "kind": kind} for kind in ("bank", "bank_in_out")),
]
WAYS = [
    # 18 rows on each: blocks of four rows lie on two processes
    *({"name": name, "inner": 36} for name in ("sste", "tsrste", "slope", "bimask", "cast")),
    {"name": "tsrste 4:8", "inner": 40},  # likewise of eight rows
    {"name": "asp", "kind": "conv1d", "inner": 36},
    # the operand of evaluation is another one while STEP trains dense
    *({"name": "step", "evaluates": True, "reshard": again} for again in (True, False, None)),
    *(
        {"name": n, "evaluates": True, "reshard": False}
        for n in ("bimask", "cast", "maskpro", "maskllm", "proxsparse")
    ),
    {"name": "sste", "counted": True, "fused": False},
]
UNEVEN = [
    *({"name": n} for n in ("sste", "tsrste", "bimask", "slope", "step", "sste weight", "cast")),
    *({"name": n} for n in ("maskllm", "proxsparse")),
    {"name": "asp", "kind": "conv1d"},
    {"name": "tsrste", "kind": "conv2d"},
    {"name": "srste", "inner": 4},  # 2, 2 and no rows
]
RESUMED = [
    {"name": name, "resume": f"load_{order}"}
    for name in VARIANTS
    for order in ("together", "model_first", "optimizer_first")
]
META = [{"name": name, "meta": filled} for name in VARIANTS for filled in ("loaded", "initialized")]
LINEAR = {"0.up": "dense", "*.up": "1:4", "1.down": "2:8"}
BANKS = {"*.up_proj": "1:4", "1.experts.down_proj": "dense"}
OWN_PATTERNS = ("sste weight", "proxsparse", "proxsparse frozen", "act24")
"""Variants that refuse some of these patterns."""
MIXED = [
    {"name": "proxsparse", "patterns": {"0.up": "dense", "*.up": "2:4"}},
    *({"name": n, "patterns": LINEAR} for n in VARIANTS if n not in OWN_PATTERNS),
    {"name": "act24", "patterns": {"0.up": "dense", "*.up": "1:4", "1.down": "3:4"}},
    *(
        {"name": n, "kind": kind, "patterns": LINEAR}
        for kind in ("conv1d", "conv2d")
        for n in ("sste", "tsrste")
    ),
    {"name": "srste", "kind": "bank", "patterns": BANKS},
    {"name": "tsrste", "kind": "bank_in_out", "patterns": BANKS},
    {"name": "sste", "patterns": LINEAR, "resume": "load_together"},
    {"name": "tsrste", "patterns": LINEAR, "meta": "initialized"},
    {"name": "step", "patterns": LINEAR, "evaluates": True, "reshard": False},
]
REPLICAS = [{"name": name, "replicas": 2} for name in ("sste", "bimask", "tsrste")]


@pytest.mark.parametrize(
    ("size", "cases"),
    [
        *((2, METHODS), (2, STORAGES), (2, WAYS)),
        (3, [case | {"micro_batches": 6} for case in UNEVEN]),
        (4, REPLICAS),
        (2, RESUMED),
        (2, META),
        (2, MIXED),
    ],
    ids=["methods", "storages", "ways", "uneven", "replicas", "resumed", "meta", "mixed"],
)
def test_shards_give_the_answer_of_a_whole_model(size, cases):
    for case, found in zip(cases, compared(size, cases), strict=True):
        assert found["learned"], case
        assert found["equal"] and found["flips"] and not found["misaligned"], (case, found)
        assert found["loss"] <= FP64 and found["metrics"] <= FP64, (case, found)
        assert found["share"] < 0.6, (case, found)
