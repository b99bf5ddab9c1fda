"""Sparse and fp8 matmuls of one layer against emulated ones, up to the rounding of their sums."""

import dataclasses

import torch
from sparse_cases import draw

from sparsepretrain.sparsity.backend import LayerProducts
from sparsepretrain.sparsity.products import FP8, Dense, Products, fp8_products


class Absolute:
    """Mixin of matmuls of absolute values: the rounding of a sum is in proportion to them."""

    def encode(self, x, operand, dtype):
        return super().encode(x.abs(), operand, dtype)

    def __call__(self, matmul, left, right, bias=None):
        return super().__call__(matmul, left, right, None if bias is None else bias.abs())


class Magnitude(Absolute, Dense):
    pass


class FP8Magnitude(Absolute, FP8):
    pass


def magnitudes(layer, dtype, shape, monkeypatch, recipe=None):
    """Return :func:`outputs` of absolute values."""
    chosen = Products(*[Magnitude()] * 3)
    if recipe is not None:
        found = fp8_products(recipe, True)
        chosen = Products(*(FP8Magnitude(**dataclasses.asdict(product)) for product in found))
    with monkeypatch.context() as patch:
        patch.setattr(LayerProducts, "now", lambda *_: chosen)
        return outputs(layer, dtype, shape)


def outputs(layer, dtype, shape=(2, 32)):
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
