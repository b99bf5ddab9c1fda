"""Packed gathering without processes: which operands, and the same bits again.

Several processes: tests/dist/test_packed_gathering.py.
"""

import pytest
import torch

from sparsepretrain import kernels, registry
from sparsepretrain.sparsity.packing import Packing, gathering, not_packed


def method_of(name, **options):
    cls = registry.get("method", name)
    return cls(cls.Options(name=name, **options), 100)


@pytest.mark.parametrize(
    ("name", "options", "reasons"),
    [
        ("sste", {}, {"A": ""}),
        ("sste", {"mvue": "weight"}, {"A": "", "B": ""}),
        ("srste", {}, {"A": ""}),
        ("srste", {"n": 1}, {"A": "M∘W 1:4 is not 2:4"}),
        ("slope", {}, {"A": "", "B": ""}),
        ("bimask", {}, {"A": "", "B": "Mb∘W (rows permuted) is not 2:4"}),
        ("tsrste", {"dense_tail": 0.25}, {"A": "dense since step 75 (dense_tail)"}),
        ("tsrste", {"dense_tail": 0.0}, {"A": ""}),
        ("asp", {"at": 0.1}, {"A": "dense until step 10 (at)"}),
        ("step", {}, {"A": "dense until AutoSwitch"}),
        ("sdgf", {}, {"A": "M∘W 3:4 is not 2:4"}),
        ("dense", {}, {"A": "W is not 2:4"}),
    ],
)
def test_operands_that_are_two_of_four_all_the_time(name, options, reasons):
    method = method_of(name, **options)
    before = dict(vars(method))
    assert not_packed(method) == reasons
    assert vars(method) == before


@pytest.mark.parametrize("shape", [(16, 24), (8, 16, 3, 3)])
@pytest.mark.parametrize("dim", [0, 1])
def test_rows_of_two_processes_become_the_operands(shape, dim):
    w = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    a = w.masked_fill(~kernels.nm_mask(w, dim=dim), 0)
    b = w.masked_fill(~kernels.nm_mask(w, dim=1 - dim), 0)
    packing = Packing({"A": "", "B": ""}, shape, dim, 2)
    assert packing.packed == ["A", "B"] and packing.bytes_per_entry(4) == 4.25
    halves = [
        [*packing.pack("A", first), *packing.pack("B", second)]
        for first, second in zip(a.chunk(2), b.chunk(2), strict=True)
    ]
    assert sum(part.nbytes for part in halves[0]) == 4.25 * w.numel() / 2
    gathered = [torch.cat(parts) for parts in zip(*halves, strict=True)]
    found = packing.unpack(gathered, {"A": None, "B": None})
    assert torch.equal(found["A"], a) and torch.equal(found["B"], b)
    earlier = {place: operand.fill_(7) for place, operand in found.items()}
    versions = [operand._version for operand in earlier.values()]
    again = packing.unpack(gathered, earlier)
    assert again["A"] is earlier["A"] and torch.equal(again["A"], a) and torch.equal(again["B"], b)
    assert [operand._version for operand in again.values()] == versions, "autograd has seen them"


def test_shards_that_cannot_be_packed():
    packings = [
        Packing({"A": "", "B": "W is not 2:4"}, shape, dim, shards)
        for shape, dim, shards in [
            ((16, 8), 1, 4), ((22, 8), 1, 4), ((16, 8), 0, 8), ((4, 4), 1, 4), ((16, 8), 1, 1)
        ]
    ]  # fmt: skip
    assert gathering(packings) == (
        "packed 2:4: A of 1 layers; as they are: B of 5 layers (W is not 2:4), A of 1 layers (22 "
        "rows are not shared out evenly over 4 processes), A of 1 layers (2 rows of a process are "
        "no whole groups of 4), A of 1 layers (4 entries of a process, no multiple of 8), A of 1 "
        "layers (one process has all rows)"
    )
    rows = torch.ones(4, 8)
    assert packings[0].pack("B", rows)[0] is rows
