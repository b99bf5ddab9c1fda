"""Masked decay, flip counts, packed masks."""

import pytest
import torch
from golden_vectors import load

from sparsepretrain.kernels import (
    apply_mask,
    flip_count,
    masked_decay_,
    nm_mask,
    pack_24,
    soft_threshold,
    unpack_24,
)


@pytest.mark.parametrize("k", ["0", "1", "2"])
@pytest.mark.parametrize("layout", ["plain", "transposed", "sliced"])
@pytest.mark.parametrize("mask_dtype", [torch.bool, torch.uint8, torch.float32])
def test_decay_golden(k, layout, mask_dtype):
    g = load("masked_decay")
    grad, weight, mask = g[f"g{k}"], g[f"w{k}"], g[f"m{k}"].to(mask_dtype)
    if layout == "transposed":
        grad = grad.t().contiguous().t()
    if layout == "sliced":
        big = torch.full((grad.shape[0] + 2, grad.shape[1] + 4), 7.0)
        big[1:-1, :-4] = grad
        grad = big[1:-1, :-4]
    out = masked_decay_(grad, weight, mask, round(float(g["alpha"]), 9))
    assert out is grad
    torch.testing.assert_close(out, g[f"out{k}"], rtol=1e-6, atol=1e-10)
    if layout == "sliced":
        assert (big[:, -4:] == 7).all() and (big[0] == 7).all() and (big[-1] == 7).all()


def test_decay_on_the_weight_itself():
    w = torch.tensor([1.0, 2.0, 3.0, 4.0], requires_grad=True)
    masked_decay_(w, w, nm_mask(w), -0.5)
    assert w.tolist() == [0.5, 1.0, 3.0, 4.0] and w.is_leaf


def test_decay_changes_pruned_weights_only():
    w = torch.tensor([1.0, float("nan"), float("inf"), 2.0])
    grad = torch.zeros(4)
    masked_decay_(grad, w, torch.tensor([False, True, True, False]), 1.0)
    assert grad.tolist() == [1.0, 0.0, 0.0, 2.0]
    assert masked_decay_(torch.zeros(0, 4), torch.zeros(0, 4), torch.zeros(0, 4), 1.0).numel() == 0
    for shapes in (((4,), (8,), (8,)), ((8,), (4,), (8,)), ((8,), (8,), (1, 8))):
        with pytest.raises(ValueError, match="shapes of grad, weight and mask differ"):
            masked_decay_(*map(torch.zeros, shapes), 1.0)
    with pytest.raises(ValueError, match="needs a CUDA tensor"):
        masked_decay_(grad, w, w, 1.0, backend="triton")


@pytest.mark.parametrize("kind", ["hard", "soft"])
def test_flip_rate_golden(kind):
    g = load("flip_rate")
    masks = [nm_mask(w) if kind == "hard" else soft_threshold(w) != 0 for w in g["w"]]
    for mask, expected in zip(masks, g[f"{kind}_mask"], strict=True):
        assert torch.equal(mask, expected.bool())
    for a, b, rate in zip(masks[:-1], masks[1:], g[f"{kind}_flip"], strict=True):
        flips = flip_count(a, b)
        assert flips.dtype == torch.int64 and flips.dim() == 0
        assert int(flips) / a.numel() == pytest.approx(float(rate), abs=1e-7)
    with pytest.raises(ValueError, match="shapes differ"):
        flip_count(a, a[:2])


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


def test_pack_nibbles_strides_and_errors():
    mask = torch.tensor([[1, 1, 0, 0], [0, 1, 0, 1]]).bool()
    assert pack_24(mask).tolist() == [0b1010_0011]
    wide = torch.rand(16, 24) < 0.5
    assert torch.equal(unpack_24(pack_24(wide.t()), (24, 16)), wide.t())
    assert torch.equal(unpack_24(pack_24(wide[1:, :12]), (15, 12)), wide[1:, :12])
    with pytest.raises(ValueError, match="1 bytes cannot hold"):
        unpack_24(torch.zeros(1, dtype=torch.uint8), (9,))
