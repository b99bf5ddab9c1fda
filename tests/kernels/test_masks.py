"""Masks, pruned values and masked decay: golden vectors; more: test_block_properties.py."""

import pytest
import torch

from sparsepretrain import kernels
from sparsepretrain.kernels import (
    apply_mask,
    masked_decay_,
    nm_mask,
    nm_prune,
    pack_24,
    pack_rows,
    unpack_24,
)
from support.golden_vectors import load


@pytest.mark.parametrize("pattern", ["2_4", "1_4", "2_8", "1_16", "4_8"])
def test_masks_equal_golden(pattern):
    g = load("hard_masks")
    n, m = map(int, pattern.split("_"))
    for prefix in ("", "ties_"):
        mask = nm_mask(g[f"{prefix}w_{pattern}"], n, m)
        assert torch.equal(mask, g[f"{prefix}mask_{pattern}"].bool())


def test_golden_ties_and_convolutions():
    g = load("hard_masks")
    assert torch.equal(nm_mask(g["ties24_all_w"]), g["ties24_all_mask"].bool())
    column_major = g["colmajor_w"].t().contiguous().t()
    assert torch.equal(nm_mask(column_major), g["colmajor_mask"].bool())
    assert torch.equal(nm_mask(g["conv_w"], dim=1), g["conv_mask"].bool())


def test_masks_have_no_gradient():
    mask = nm_mask(torch.tensor([3.0, -4.0, 1.0, 2.0], requires_grad=True))
    assert mask.tolist() == [True, True, False, False] and not mask.requires_grad


@pytest.mark.parametrize("n", [1, 2, 4])
@pytest.mark.parametrize(
    ("shape", "dim"), [((3, 8), 1), ((3, 12), 1), ((8, 5), 0), ((4, 8, 2, 1), 1), ((0, 8), -1)]
)
def test_packed_masks_equal_packed_rows(shape, dim, n):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).round(decimals=1)
    for backend in (None, "reference"):
        code = nm_mask(x, n, dim=dim, packed=True, backend=backend)
        assert code.dtype == torch.uint8
        assert torch.equal(code, pack_rows(nm_mask(x, n, dim=dim, backend=backend)))


@pytest.mark.parametrize("ties", ["high", "low"])
def test_nm_prune_returns_the_weight_and_its_mask(ties):
    x = torch.tensor([[-0.0, 1.0, -1.0, 1.0], [float("nan"), 3.0, -2.0, -0.0]])
    pruned, mask = nm_prune(x, ties=ties)
    assert torch.equal(mask, nm_mask(x, ties=ties))
    assert torch.equal(pruned[mask].nan_to_num(9.0), x[mask].nan_to_num(9.0))
    assert not pruned[~mask].any() and not pruned[~mask].signbit().any()


@pytest.mark.parametrize("k", ["0", "1", "2"])
def test_decay_golden(k):
    g = load("masked_decay")
    decay = round(float(g["alpha"]), 9)
    out = masked_decay_(g[f"g{k}"], g[f"w{k}"], g[f"m{k}"], decay)
    torch.testing.assert_close(out, g[f"out{k}"], rtol=1e-6, atol=1e-10)


@pytest.mark.parametrize("backend", [None, "reference"])
@pytest.mark.parametrize("shape", [(8, 16), (5, 12), (4, 8, 3, 3), (16, 1)])
@pytest.mark.parametrize("turned", [False, True])
def test_decay_under_packed_masks_has_the_bits_of_bool_ones(shape, turned, backend):
    draws = torch.randn(3, *shape, generator=torch.Generator().manual_seed(0))
    if turned:
        draws = draws.transpose(1, 2).contiguous().transpose(1, 2)
    grad, weight, mask = draws[0], draws[1], draws[2] > 0
    results = [
        masked_decay_(grad.clone(), weight, chosen, 0.3, backend=backend)
        for chosen in (mask, pack_rows(mask))
    ]
    assert torch.equal(*results)


def test_decay_on_the_weight_itself():
    w = torch.tensor([1.0, 2.0, 3.0, 4.0], requires_grad=True)
    masked_decay_(w, w, nm_mask(w), -0.5)
    assert w.tolist() == [0.5, 1.0, 3.0, 4.0] and w.is_leaf


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_apply_mask(dtype):
    x = torch.tensor([1.0, -2.0, float("nan"), float("inf"), -0.0, 0.0], dtype=dtype)
    kept = apply_mask(x.requires_grad_(), torch.ones(6, dtype=torch.bool))
    assert torch.equal(kept.isnan(), x.isnan()) and torch.equal(kept.signbit(), x.signbit())
    assert torch.equal(kept.nan_to_num(), x.nan_to_num()) and not kept.requires_grad
    dropped = apply_mask(x, torch.zeros(6, dtype=torch.bool))
    assert not dropped.any() and not dropped.signbit().any(), "+0.0, also of NaN and infinity"
    wide = torch.randn(6, 8, generator=torch.Generator().manual_seed(0)).to(dtype)
    mask = wide > 0
    for view in (wide, wide.t(), wide[:, ::2], wide[:0], wide.expand(2, 6, 8)):
        expected = torch.where(view > 0, view, 0)
        assert torch.equal(apply_mask(view, view > 0), expected)
    assert torch.equal(apply_mask(wide.t(), mask.t().contiguous()), wide.t().clamp(min=0))


def test_packing_follows_strides():
    wide = torch.rand(16, 24, generator=torch.Generator().manual_seed(0)) < 0.5
    for mask in (wide.t(), wide[1:, :12]):
        assert torch.equal(unpack_24(pack_24(mask), mask.shape), mask)


@pytest.mark.parametrize("dim", [0, 1, 2, -1])
def test_nonzeros_are_counted_by_groups_of_any_axis(dim):
    x = torch.zeros(8, 8, 8)
    x[0, 1, 2], x[3, 3, 3], x[3, 2, 3], x[7, 7, 7] = 1.0, -2.0, float("nan"), -0.0
    counts = kernels.nonzeros_per_group(x, 4, dim=dim)
    groups = (x != 0).movedim(dim, -1).unflatten(-1, (-1, 4)).sum(-1)
    assert torch.equal(counts.movedim(dim, -1), groups) and counts.sum() == 3
    with pytest.raises(ValueError, match=r"nonzeros_per_group: axis .* not a multiple of M = 3"):
        kernels.nonzeros_per_group(x, 3, dim=dim)
