"""Unbiased 2:4 sampling: golden vectors, extremes, axes; its distribution: test_mvue_proofs.py."""

import itertools

import pytest
import torch

from sparsepretrain.kernels import mvue, noise_key, uniform_noise
from support.golden_vectors import load

ESTIMATORS = ["approximate", "exact"]


def test_approximate_estimates_equal_golden():
    g = load("mvue_approx")
    r = torch.stack([g["r0"], g["r1"]], 1)[:, None]
    y = mvue(g["x"], uniforms=r)
    assert torch.equal(y != 0, g["mask"].bool())
    torch.testing.assert_close(y, g["y"], rtol=3e-5, atol=0)
    kept = y != 0
    torch.testing.assert_close((g["x"] / y)[kept], g["p_incl"][kept], rtol=3e-5, atol=0)


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_finite_for_every_finite_group(estimator, dtype):
    info = torch.finfo(dtype)
    values = [0.0, -0.0, info.smallest_normal / 4, -info.tiny, 1e-3, 1.0, -8.0, info.max]
    x = torch.tensor(list(itertools.product(values, repeat=4)), dtype=dtype)  # 4096 groups
    zeros, few = x == 0, (x != 0).sum(1) <= 2
    corners = [0.0, 2.0**-24, 0.5, 1 - 2.0**-24]
    for pair in itertools.product(corners, repeat=2):
        r = torch.tensor(pair if estimator == "approximate" else pair[:1]).expand(len(x), 1, -1)
        y = mvue(x, estimator=estimator, uniforms=r)
        assert y.dtype == dtype and y.isfinite().all()
        assert not y[zeros].any(), "a zero is never drawn"
        assert torch.equal(y[few], x[few])
        assert ((y != 0).sum(1) <= 2).all()
        assert ((y == 0) | (y.signbit() == x.signbit())).all()
        assert (y.double().abs() >= x.double().abs() * (1 - 1e-2)).logical_or(y == 0).all()


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("length", [1, 2, 3, 5, 6, 10])
def test_odd_lengths_equal_zero_padding(estimator, length):
    x = torch.randn(length, 6, generator=torch.Generator().manual_seed(length))
    padded = torch.cat([x, torch.zeros(-length % 4, 6)])
    y = mvue(x, dim=0, estimator=estimator, key=2)
    assert torch.equal(y, mvue(padded, dim=0, estimator=estimator, key=2)[:length])
    tail = length - length % 4
    if length % 4 <= 2:
        assert torch.equal(y[tail:], x[tail:]), "two or fewer real tokens are kept"


def test_axes_layouts_and_counters():
    base = torch.randn(3, 8, 5, generator=torch.Generator().manual_seed(0))
    for dim in range(-3, 3):
        moved = base.movedim(dim, 0)
        flat = mvue(moved.reshape(len(moved), -1), dim=0, key=4)
        assert torch.equal(mvue(base, dim=dim, key=4), flat.view(moved.shape).movedim(0, dim))
        for backend in ("reference", "cpu"):
            turned = mvue(base, dim=dim, key=4, order="tokens_last", backend=backend)
            assert torch.equal(turned, mvue(base, dim=dim, key=4))
            assert turned.movedim(dim, -1).is_contiguous()
    transposed = base.permute(2, 1, 0).contiguous().permute(2, 1, 0)
    assert torch.equal(mvue(transposed, dim=1, key=4), mvue(base, dim=1, key=4))
    expanded = torch.ones(1, 1).expand(8, 6)
    assert ((mvue(expanded, dim=0, key=1) != 0).view(2, 4, 6).sum(1) == 2).all()
    for shape, dim in (((0, 8), 0), ((0, 8), 1), ((8, 0), 0), ((8, 0), 1)):
        assert mvue(torch.zeros(shape), dim=dim, key=0).shape == shape


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("inference", [False, True])
def test_draws_are_the_grid_of_the_key_in_every_thread_and_mode(estimator, threads, inference):
    """So the law that test_mvue_proofs.py enumerates is that of keyed draws."""
    x = torch.randn(6000, 33, generator=torch.Generator().manual_seed(0))
    key = noise_key(1, 2, 3, 2)
    r = torch.stack(uniform_noise(key, 1500, 33, 2 if estimator == "approximate" else 1), -1)
    expected = mvue(x, dim=0, estimator=estimator, uniforms=r.permute(1, 0, 2))
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with torch.inference_mode(inference):
            assert torch.equal(mvue(x, dim=0, estimator=estimator, key=key), expected)
    finally:
        torch.set_num_threads(before)


def test_uses_no_global_generator():
    state = torch.get_rng_state()
    mvue(torch.ones(8, 8), key=0)
    assert torch.equal(torch.get_rng_state(), state)
    assert not mvue(torch.ones(8, 8, requires_grad=True), key=0).requires_grad
