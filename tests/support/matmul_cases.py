"""Sparse and fp8 matmuls of one layer against emulated ones, up to the rounding of their sums."""

import dataclasses

import torch

from sparsepretrain.sparsity.matmuls import policy
from sparsepretrain.sparsity.matmuls.fp8 import FP8, fp8_matmuls
from sparsepretrain.sparsity.matmuls.layer import LayerMatmuls
from sparsepretrain.sparsity.matmuls.three import Matmul, Matmuls
from support.small_models import draw


class Absolute:
    """Mixin of matmuls of absolute values: the rounding of a sum is in proportion to them."""

    def encode(self, x, operand, dtype):
        return super().encode(x.abs(), operand, dtype)

    def __call__(self, call, left, right, bias=None):
        return super().__call__(call, left, right, None if bias is None else bias.abs())


class Magnitude(Absolute, Matmul):
    pass


class FP8Magnitude(Absolute, FP8):
    pass


def magnitudes(layer, dtype, shape, monkeypatch, recipe=None):
    """Return :func:`outputs` of absolute values."""
    chosen = Matmuls(*[Magnitude()] * 3)
    if recipe is not None:
        found = fp8_matmuls(recipe, True)
        chosen = Matmuls(*(FP8Magnitude(**dataclasses.asdict(product)) for product in found))
    with monkeypatch.context() as patch:
        patch.setattr(LayerMatmuls, "now", lambda *_: chosen)
        return outputs(layer, dtype, shape)


def train_in_bf16(model, optimizer, first, last, shape=(2, 8, 128), micro_batches=1):
    """Optimizer steps ``first`` to ``last`` under autocast."""
    for step in range(first, last):
        for micro in range(micro_batches):
            with torch.autocast("cpu", torch.bfloat16):
                y = model(draw(*shape, seed=9 * step + micro, dtype=torch.float32))
            y.float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def cut_groups(shape):
    """Why dW of these samples is not sparse."""
    samples = shape[-1]
    if len(shape) == 1 or samples % 4 == 0:
        return ""
    return f"samples of {samples} tokens, no multiple of 4"


class Stopwatch:
    """Durations by matmul: those of sparse ones in units of emulated ones.

    ``packing``: of weights, in the same unit.
    """

    def __init__(self, monkeypatch, packing=0.0, **factors):
        self.factors, self.packing, self.calls, self.products = factors, packing, 0, []
        monkeypatch.setattr(policy, "medians", self.medians)

    def medians(self, works, device):
        self.calls += 1
        return {name: self.seconds(run) for name, run in works.items()}

    def seconds(self, run):
        run()
        product, *prepared = run.args
        self.products.append(product)
        if not product.packs:
            return 1e-3
        return 1e-3 * (self.factors[product.packs] + (0 if prepared else self.packing))


def outputs(layer, dtype, shape=(2, 32)):
    """Y, dX and dW of one forward and backward."""
    layer.zero_grad()
    x = draw(*shape, layer.inputs, seed=2, dtype=torch.float32).requires_grad_()
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        y = layer(x)
    y.backward(draw(*shape, layer.outputs, seed=3).to(dtype))
    return [y.detach(), x.grad, layer.fc.weight.grad]


def assert_close(got, expected, magnitudes, dtype, summands=256):
    """Equal up to one rounding and the order of a sum.

    Both sum the same numbers in fp32 and round once. They are apart by at most one unit in the last
    place and by what the order of ``summands`` changes in fp32, which is in proportion to the
    sum of their ``magnitudes``; fp8 adds a factor and two rounded operands.
    """
    for a, b, s in zip(got, expected, magnitudes, strict=True):
        slack = torch.finfo(dtype).eps * b.abs() + (summands + 8) * 2.0**-24 * s.abs()
        assert a.shape == b.shape and a.dtype == b.dtype and a.is_contiguous()
        assert bool(((a - b).abs() <= slack).all())
