"""Sparse and fp8 matmuls of one layer against emulated ones, up to the rounding of their sums."""

import torch
from sparse_cases import draw


def magnitude(x):
    return None if x is None else x.abs()


def products(layer, dtype, shape=(2, 32)):
    """Y, dX and dW of one forward and backward."""
    layer.zero_grad()
    x = draw(*shape, 128, seed=2, dtype=torch.float32).requires_grad_()
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        y = layer(x)
    y.backward(draw(*shape, 256, seed=3).to(dtype))
    return [y.detach(), x.grad, layer.fc.weight.grad]


def assert_close(got, expected, magnitudes, dtype):
    """Equal up to one rounding and the order of a sum.

    Both sum the same numbers in fp32 and round once. They are apart by at most one unit in the last
    place and by what the order of up to 256 summands changes in fp32, which is in proportion to the
    sum of their ``magnitudes``; fp8 adds a factor and two rounded operands.
    """
    for a, b, s in zip(got, expected, magnitudes, strict=True):
        slack = torch.finfo(dtype).eps * b.abs() + 264 * 2.0**-24 * s.abs()
        assert a.shape == b.shape and a.dtype == b.dtype
        assert bool(((a - b).abs() <= slack).all())
