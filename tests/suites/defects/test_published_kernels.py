"""Defects of published element and group kernels (docs/published_defects.md).

Where it takes a line or two, the published formulation stands beside ours and is shown to fail.
"""

import itertools

import pytest
import torch
from torch import nn

import sparsepretrain as sp
from sparsepretrain import kernels

nan, inf = float("nan"), float("inf")


@pytest.mark.parametrize("shape", [(2, 6), (5, 3), (2, 10)])
def test_groups_never_straddle_rows(shape):
    """2by4-pretrain triton_ops.py:26,67 and NM-sparsity line 20 flatten first."""
    x = torch.arange(1.0, shape[0] * shape[1] + 1).view(shape)
    if x.numel() % 4 == 0:
        flattened = kernels.nm_mask(x.flatten()).view(shape)
        assert not (flattened.sum(1) == shape[1] / 2).all(), "published: rows of unequal density"
    for refused in (kernels.nm_mask, kernels.soft_threshold, kernels.prune_gradient):
        with pytest.raises(ValueError, match="not a multiple of M = 4"):
            refused(x)
    with pytest.raises(ValueError, match="multiples of 4"):
        kernels.transposable_mask(x)
    model = nn.Sequential(nn.Linear(shape[1], 8))
    with pytest.raises(ValueError, match=f"in_features = {shape[1]} is not a multiple of 4"):
        sp.sparsify(model, "ste", targets="0")


def test_sampling_pads_the_tail_of_its_own_row():
    """triton_ops.py:67: the column layout zeroes the last k % 4 columns."""
    x = torch.tensor([[1.0, 2.0, 3.0, 4.0, 5.0, 6.0], [7.0, 8.0, 9.0, 10.0, 11.0, 12.0]])
    for key in range(20):
        y = kernels.mvue(x, key=key)
        assert torch.equal(y[:, 4:], x[:, 4:]), "two real values of a padded group are kept"
        assert ((y[:, :4] != 0).sum(1) == 2).all()


def published_mask(x):
    """2by4-pretrain: two of four by a chain of comparisons, which NaN makes intransitive."""
    later, one, other = torch.ones(4, 4).tril(-1).bool(), x[..., :, None], x[..., None, :]
    return torch.where(later, one >= other, one > other).sum(-1) >= 2


def test_groups_with_nan_keep_exactly_n():
    """1 or 3 of four were kept; then the metadata of compressed tensors is garbage."""
    assert published_mask(torch.tensor([1.0, nan, 3.0, 0.5])).sum() == 1
    x = torch.tensor(list(itertools.product([0.0, 0.5, 1.0, -2.9, inf, nan], repeat=4)))
    mask = kernels.nm_mask(x)
    assert (mask.sum(1) == 2).all()
    few = x.isnan().sum(1) <= 2
    assert mask[few][x[few].isnan()].all(), "a NaN stays visible"


def test_masks_of_soft_thresholding_are_its_non_zeros():
    """2by4-pretrain returns the top-2 mask beside S(x): it has ones where S is zero."""
    x = torch.tensor([[1.0, 1.0, 1.0, 1.0], [3.0, 2.0, 2.0, 1.0]])
    published, soft = kernels.nm_mask(x), kernels.soft_threshold(x)
    assert (published & (soft == 0)).any()
    model = nn.Sequential(nn.Linear(4, 2, bias=False))
    model[0].weight.data.copy_(x)
    sparsifier = sp.sparsify(model, "sste", targets="0")
    assert torch.equal(sparsifier.masks()["0"], soft != 0)
    assert sparsifier.metrics()["density"] == 1 / 8


def tf32(x):
    """Rounded to ten bits of mantissa, as tensor cores do by default."""
    return (((x.view(torch.int32) + 0x1000) >> 13) << 13).view(torch.float32)


def test_transposable_scores_are_summed_in_fp32():
    """transposable_semi_structured.py:37: a tensor-core dot chooses near-equal patterns wrongly."""
    fine = 1 + torch.randint(2**12, (128, 4, 128, 4), generator=torch.Generator().manual_seed(0))
    w = (fine / 2**12).view(512, 512)  # sums of eight are exact in fp32
    mask = kernels.transposable_mask(w)

    def kept(chosen):
        return (w.double() * chosen).view(128, 4, 128, 4).sum((1, 3))

    best, rounded = kept(mask), kept(kernels.transposable_mask(tf32(w)))
    assert (rounded < best).any() and (rounded <= best).all()
    by_half = kept(kernels.transposable_mask(w.bfloat16()))
    assert (by_half < best).float().mean() > (rounded < best).float().mean()


@pytest.mark.parametrize("bad", [nan, inf, -inf])
def test_nan_or_infinity_is_kept_in_a_transposable_block(bad):
    """0·inf is NaN: the published search falls back to its first pattern."""
    w = torch.rand(4, 4, generator=torch.Generator().manual_seed(1))
    w[0, 0] = 0
    w[0, 3] = bad
    mask = kernels.transposable_mask(w)
    assert mask[0, 3] and (mask.sum(0) == 2).all() and (mask.sum(1) == 2).all()
    first = torch.tensor([[1, 1, 0, 0], [1, 1, 0, 0], [0, 0, 1, 1], [0, 0, 1, 1]]).bool()
    assert not torch.equal(mask, first)


def test_masked_decay_stays_inside_a_slice():
    """decay.py:34 checks only that strides are equal, then walks raw memory."""

    weight, mask = torch.ones(4, 8), torch.zeros(4, 8, dtype=torch.bool)
    published = torch.zeros(4, 8)
    published.flatten()[: 4 * 4] += 1
    assert published[:2].all(), "rows 0 and 1 whole, 2 and 3 untouched"
    for view in (lambda x: x[:, :4], lambda x: x.t()[2:4]):
        grad, expected = torch.zeros(4, 8), torch.zeros(4, 8)
        kernels.masked_decay_(view(grad), view(weight), view(mask), 1.0)
        view(expected).fill_(1)
        assert torch.equal(grad, expected)


def test_masked_decay_is_formed_in_fp32():
    """6e-5·0.02 added to a bfloat16 gradient of 1e-3 changes nothing."""
    published = torch.tensor(1e-3, dtype=torch.bfloat16)
    assert published + torch.tensor(6e-5 * 0.02, dtype=torch.bfloat16) == published
    model = nn.Sequential(nn.Linear(8, 8, bias=False))
    sparsifier = sp.sparsify(model, "srste", targets="0", decay=6e-5)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    sparsifier.attach(optimizer)
    before, mask = model[0].weight.detach().clone(), sparsifier.masks()["0"]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model(torch.zeros(4, 8)).sum().backward()
    assert model[0].weight.grad.dtype == torch.float32
    model[0].weight.grad.fill_(1e-3)
    optimizer.step()
    gradient, decay = before - model[0].weight.detach(), 6e-5 * before.masked_fill(mask, 0)
    torch.testing.assert_close(gradient, 1e-3 + decay, rtol=0, atol=1e-7)
    assert (gradient[~mask] != gradient[mask][0]).any()


@pytest.mark.parametrize("kept", [torch.bool, torch.uint8, torch.int32, torch.int64, torch.float32])
def test_any_mask_dtype_pulls_towards_zero(kept):
    """Adaptive-Sparse-Trainer inverts an integer mask bit by bit: ~1 is -2, so weights grow."""
    w = torch.tensor([1.0, -2.0, 3.0, -4.0])
    mask = torch.tensor([0, 0, 1, 1])
    published = w - 0.25 * w * ~mask
    assert (published.abs() > w.abs()).all(), "(1.25, 2.25, …) instead of a decay"
    grad = kernels.masked_decay_(torch.zeros(4), w, mask.to(kept), 0.25)
    assert grad.tolist() == [0.25, -0.5, 0.0, 0.0], "pruned weights are pulled, kept ones are not"


def test_gradients_above_the_fp16_range_stay_finite():
    """semi_structured.py:580 casts everything to fp16: above 65504 gradients become infinite."""
    x = torch.full((8, 4), 1e6)
    assert x.half().isinf().all()
    for dtype in (torch.float32, torch.bfloat16):
        y = kernels.mvue(x.to(dtype), dim=0, key=0)
        assert y.dtype == dtype and y.isfinite().all()
        assert kernels.prune_gradient(x.to(dtype)).isfinite().all()
    q, scale = kernels.quantize_fp8(x, "e5m2")
    torch.testing.assert_close(kernels.dequantize_fp8(q, scale), x)


@pytest.mark.parametrize("format", ["e4m3", "e5m2"])
@pytest.mark.parametrize("x", [torch.zeros(4, 4), torch.full((4,), -0.0), torch.zeros(0)])
def test_fp8_of_a_zero_tensor_is_zero(format, x):
    """2by4-pretrain-acc-examples v2 sparse_ops.py:15: FMAX/0·0 is NaN."""
    if x.numel():
        assert (x * (448.0 / x.abs().amax())).isnan().all(), "published"
    q, scale = kernels.quantize_fp8(x, format)
    assert scale == 1 and torch.equal(kernels.dequantize_fp8(q, scale), x)


def test_e4m3_is_twice_as_fine_as_e5m2():
    """v2 sparse_ops.py:55-59 quantizes weights and activations of backward products to e5m2."""
    x = torch.randn(20_000, generator=torch.Generator().manual_seed(0))
    fine, coarse = (
        (kernels.dequantize_fp8(*kernels.quantize_fp8(x, format)) - x).norm()
        for format in ("e4m3", "e5m2")
    )
    assert 1.8 < coarse / fine < 2.2


def test_scale_of_a_zero_weight_is_one():
    """S-STE's scale: ⟨W,S⟩/⟨S,S⟩ is 0/0 for zeros, and wherever every group is tied."""
    for w in (torch.zeros(4, 8), torch.ones(4, 8)):
        s = kernels.soft_threshold(w)
        assert torch.isnan((w * s).sum() / (s * s).sum()), "published"
        assert kernels.optimal_scale(w, s) == 1 and kernels.l1_scale(w, s) == 1


@pytest.mark.parametrize("groups", [1, 255, 256, 257, 511])
def test_odd_group_counts_stay_in_bounds(groups):
    """sdgp prune_kernel.cu:114: ``>`` for ``>=`` reads and writes one group past the end."""
    memory = torch.full((groups * 4 + 8,), 7.0)
    x = memory[4:-4]
    x.copy_(torch.arange(1.0, groups * 4 + 1))
    y = kernels.prune_gradient(x)
    assert ((y.view(-1, 4) != 0) == torch.tensor([False, False, True, True])).all()
    mask = kernels.nm_mask(x)
    kernels.masked_decay_(x, x.clone(), mask, -1.0)
    assert torch.equal(x, y) and (memory[:4] == 7).all() and (memory[-4:] == 7).all()


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_gradients_are_pruned_along_channels(layout):
    """prune_kernel.cu:54,138 follow memory: along the width of a contiguous NCHW gradient."""
    g = torch.randn(2, 8, 4, 4, generator=torch.Generator().manual_seed(0))
    along_memory = kernels.prune_gradient(g.flatten()).view(g.shape)
    y = kernels.prune_gradient(g.to(memory_format=layout), dim=1)
    assert not torch.equal(y, along_memory)
    assert ((y.view(2, 2, 4, 4, 4) != 0).sum(2) == 2).all()
    assert torch.equal(y, kernels.prune_gradient(g.movedim(1, -1).contiguous()).movedim(-1, 1))


def test_channels_that_do_not_divide_are_refused():
    """prune_kernel.cu:138: groups straddle pixels and the tail is zero."""
    with pytest.raises(ValueError, match="axis 1 of shape"):
        kernels.prune_gradient(torch.ones(2, 6, 4, 4), dim=1)
    model = nn.Sequential(nn.Linear(8, 6))
    with pytest.raises(ValueError, match="out_features = 6 is not a multiple of 4"):
        sp.sparsify(model, "sdgp", targets="0")


def test_small_gradients_keep_their_norm():
    """sdgp.py:14,58: Σ|g|/(Σ|kept| + 1e-4) in fp16 erases gradients of 1e-6."""
    g = torch.randn(8, 16, generator=torch.Generator().manual_seed(0)) * 1e-6
    published = kernels.prune_gradient(g, variant="rescaled")
    assert published.abs().sum() < 0.2 * g.abs().sum()
    half = kernels.prune_gradient((g * 1e3).half(), variant="rescaled", epsilon=0.0)
    exact = kernels.prune_gradient(g, variant="rescaled", epsilon=0.0)
    torch.testing.assert_close(exact.abs().sum(0), g.abs().sum(0), rtol=1e-5, atol=0)
    torch.testing.assert_close(half.float() * 1e-3, exact, rtol=2e-2, atol=1e-9)
    large = kernels.prune_gradient(g * 2.0**16, variant="rescaled", epsilon=0.0)
    assert torch.equal(large, exact * 2.0**16), "independent of the loss scale"


def test_ties_keep_the_last_entries():
    """apex sparse_masklib.py:43 builds patterns from a set, whose order decides."""
    assert kernels.nm_mask(torch.ones(4)).tolist() == [False, False, True, True]
    assert kernels.nm_mask(torch.ones(4), ties="low").tolist() == [True, True, False, False]
    model = nn.Sequential(nn.Linear(4, 1))
    model[0].weight.data.fill_(1)
    sparsifier = sp.sparsify(model, "ste", targets="0")
    assert sparsifier.masks()["0"].tolist() == [[False, False, True, True]]


@pytest.mark.parametrize("name", ["geglu", "swiglu"])
@pytest.mark.parametrize("shape", [(8,), (3, 8), (2, 3, 8), (2, 2, 3, 8)])
def test_gated_activations_take_any_rank(name, shape):
    """2by4-pretrain GELUglu.py:160,164 asserts three axes."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    y = getattr(kernels, name)(x)
    assert y.shape == (*shape[:-1], 4)
    flat = getattr(kernels, name)(x.view(-1, 8)).view(y.shape)
    torch.testing.assert_close(y, flat)
