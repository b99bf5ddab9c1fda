"""MVUE in Triton: the bits of the reference, whatever the values, axis, strides and dtype."""

import itertools
import types

import numpy
import pytest
import torch

from sparsepretrain.kernels import NoiseKey, mvue
from sparsepretrain.kernels.triton.mvue24 import refine_quotient
from support.parity import nasty
from support.same_bits import DEVICE, assert_same

ESTIMATORS = {"approximate": 2, "exact": 1}
LAST = 1 - 2.0**-24
nan, inf = float("nan"), float("inf")


def check(x, **options):
    expected = mvue(x.cpu(), backend="reference", **options)
    on_device = {k: v.to(DEVICE) if k == "uniforms" else v for k, v in options.items()}
    got = mvue(x, backend="triton", **on_device)
    assert_same(got.cpu(), expected)
    return got


def every_combination(dtype):
    """All groups of four of eleven special values: 14,641."""
    info = torch.finfo(dtype)
    values = [0.0, -0.0, info.smallest_normal * 0.3, -info.tiny, 3e-5, 1.0, -1.0, 8.0]
    values += [-info.max, inf, nan]
    return torch.tensor(list(itertools.product(values, repeat=4)), dtype=dtype, device=DEVICE)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_extreme_uniforms_equal_the_reference(estimator):
    x = every_combination(torch.float32)[::3]
    for corner in itertools.product((0.0, 2.0**-24, 0.5, LAST), repeat=ESTIMATORS[estimator]):
        check(x, estimator=estimator, uniforms=torch.tensor(corner).expand(len(x), 1, -1))


@pytest.mark.parametrize("dim", range(-4, 4))
def test_every_axis_equals_the_reference(dim):
    x = nasty((3, 8, 5, 7), 3)
    # no three strides describe two of these
    for order in ((0, 1, 2, 3), (0, 2, 3, 1), (3, 1, 0, 2)):
        view = x.permute(order).contiguous().permute([order.index(i) for i in range(4)])
        check(view, dim=dim, key=5)
        check(view.to(torch.bfloat16), dim=dim, estimator="exact", key=5)


@pytest.mark.parametrize("length", [1, 2, 3, 5, 6, 7, 13])
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_odd_lengths_equal_the_reference(estimator, length):
    for shape, dim in (((length, 70), 0), ((70, length), 1), ((3, length, 5), 1), ((length,), 0)):
        x = nasty(shape, length)
        check(x, dim=dim, estimator=estimator, key=NoiseKey(1, 2, 3))
        rest = [s for i, s in enumerate(shape) if i != dim]
        u = torch.rand(*rest, -(-length // 4), ESTIMATORS[estimator])
        check(x, dim=dim, estimator=estimator, uniforms=u)
        turned = check(x, dim=dim, estimator=estimator, key=3, order="tokens_last")
        assert turned.movedim(dim, -1).is_contiguous()


def test_offsets_beyond_32_bits():
    """Rows, or the ends of a group, 2³¹ elements apart; untouched memory costs nothing."""
    storage = torch.empty(2**31 + 4096, dtype=torch.bfloat16, device=DEVICE)
    for shape, strides in (((3, 8), (2**30 + 8, 1)), ((8, 4), (1, 2**31 // 3 + 1))):
        x = storage.as_strided(shape, strides)
        x.copy_(nasty(shape, 6, special=False))
        for dim in (0, 1):
            got = mvue(x, dim=dim, key=3, backend="triton")
            assert_same(got.cpu(), mvue(x.contiguous().cpu(), dim=dim, key=3))


def fma(a, b, c):
    """a·b + c of fp32, rounded once: the product is exact in fp64, the sum rounded there to odd."""
    product, c = a.astype(numpy.float64) * b, numpy.float64(c)
    total = product + c
    part = total - product
    error = (product - (total - part)) + (c - part)
    towards = numpy.nextafter(total, numpy.copysign(numpy.inf, error))
    even = total.view(numpy.int64) % 2 == 0
    return numpy.where((error != 0) & even, towards, total).astype(numpy.float32)


def test_division_by_multiplication_and_addition():
    """What GPUs run in place of a division, with an ``fma`` that interpreters do not have."""
    random, count = numpy.random.default_rng(0), 300_000
    bits = random.integers(0, 2**23, (2, count), dtype=numpy.int32)
    bits[:, :2000] = (random.integers(0, 8, (2, 2000)) - 4) & 2**23 - 1  # about powers of two
    exponents = random.integers([[127 - 96], [127]], [[127 + 11], [127 + 12]], (2, count))
    a, b = (bits | exponents.astype(numpy.int32) << 23).view(numpy.float32)
    code, namespace = refine_quotient.fn.__code__, {"tl": types.SimpleNamespace(fma=fma)}
    for wrong in (0, -numpy.inf, numpy.inf):
        reciprocal = (1 / b).astype(numpy.float32)
        start = numpy.nextafter(reciprocal, numpy.float32(wrong)) if wrong else reciprocal
        got = types.FunctionType(code, namespace)(a, b, start)
        # the one significand for which the reciprocal itself has to be right
        ones = bits[1] == 2**23 - 1
        assert ((got == a / b) | (ones & (wrong != 0))).all()
