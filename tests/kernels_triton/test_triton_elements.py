"""Masked decay, flip counts, packing and fp8: the bits of the reference."""

import pytest
import torch
from parity import DTYPES, layouts, nasty
from same_bits import DEVICE, assert_same

from sparsepretrain.kernels import (
    dequantize_fp8,
    flip_count,
    masked_decay_,
    pack_24,
    packed_flip_count,
    quantize_fp8,
    unpack_24,
)

SHAPES = [(64, 33), (1, 5), (0, 4), (257, 512)]


def random_mask(shape, seed):
    g = torch.Generator().manual_seed(seed)
    return (torch.rand(shape, generator=g) < 0.5).to(DEVICE)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("decay", [6e-5, torch.tensor(0.3, device=DEVICE)])
def test_masked_decay_equals_the_reference(shape, dtype, decay):
    weight, mask = nasty(shape, 1), random_mask(shape, 2)
    for slot in range(3):  # contiguous, transposed, sliced: only the view may be written
        base = torch.stack([nasty(shape, 3).to(dtype)] * 2, -1)
        base = base.transpose(0, 1).contiguous().transpose(0, 1) if slot == 1 else base
        twins = [base.clone(), base.clone()]
        for twin, backend in zip(twins, ("reference", "triton"), strict=True):
            grad = twin[..., 0] if slot == 2 else twin.select(-1, 0).clone()
            assert masked_decay_(grad, weight, mask, decay, backend=backend) is grad
            twin[..., 0] = grad
        assert_same(twins[1], twins[0])


@pytest.mark.parametrize("shape", SHAPES)
def test_flip_counts_and_packing_equal_the_reference(shape):
    first, second = random_mask(shape, 1), random_mask(shape, 2)
    expected = int((first ^ second).sum())
    views = zip(layouts(first), layouts(second), strict=True) if shape[0] else [(first, second)]
    for a, b in views:
        count = flip_count(a, b, backend="triton")
        assert count.dtype == torch.int64 and count.shape == ()
        assert int(count) == int((a ^ b).sum())
        code = pack_24(a, backend="triton")
        assert_same(code, pack_24(a, backend="reference"))
        assert_same(unpack_24(code, a.shape, backend="triton"), a.contiguous())
    codes = pack_24(first), pack_24(second)
    assert int(packed_flip_count(*codes, backend="triton")) == expected


@pytest.mark.parametrize("format", ["e4m3", "e5m2"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1e-30, 1.0, 1e7])
def test_fp8_equals_the_reference(format, dtype, size):
    for shape in SHAPES:
        x = nasty(shape, 7, special=False) * torch.logspace(-6, 0, shape[1], device=DEVICE)
        x = (x.clamp(-5, 5) * size).to(dtype).nan_to_num()
        for view in layouts(x) if shape[0] else [x]:
            expected, expected_scale = quantize_fp8(view, format, backend="reference")
            q, scale = quantize_fp8(view, format, backend="triton")
            assert_same(scale, expected_scale)
            assert_same(q, expected)
            back = dequantize_fp8(expected, scale, backend="reference")
            assert_same(dequantize_fp8(q, scale, backend="triton"), back)


def test_fp8_of_zeros_has_scale_one():
    for format in ("e4m3", "e5m2"):
        q, scale = quantize_fp8(torch.zeros(3, 4, device=DEVICE), format, backend="triton")
        assert float(scale) == 1 and not q.float().any()
