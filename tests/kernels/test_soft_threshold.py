"""The continuous pruning function and its scales."""

import pytest
import torch
from golden_vectors import load

from sparsepretrain.kernels import (
    boundary_magnitudes,
    l1_scale,
    nm_mask,
    optimal_scale,
    soft_threshold,
)

CASES = ["rand0", "rand1", "rand2", "rand3", "ties", "zeros", "negative", "allequal"]
CASES += ["subnormal", "signedzero", "large", "inf"]
PATTERNS = [(1, 4), (2, 4), (3, 4), (2, 8), (4, 8), (1, 16), (16, 32)]
nan = float("nan")


def normal(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


@pytest.mark.parametrize("case", CASES)
def test_soft_threshold_equals_golden(case):
    g = load("soft_threshold")
    y = soft_threshold(g[f"{case}_x"])
    torch.testing.assert_close(y, g[f"{case}_y"], rtol=1.2e-7, atol=0)
    assert not (y.signbit() & (y == 0)).any()
    assert torch.equal(nm_mask(g[f"{case}_x"]), g[f"{case}_mask"].bool())


def test_gamma_equals_golden():
    g = load("soft_threshold")
    for gamma, expected in zip(g["gamma_values"], g["gamma_y"], strict=True):
        y = soft_threshold(g["gamma_x"], gamma=round(float(gamma), 6))
        torch.testing.assert_close(y, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize(("n", "m"), PATTERNS)
def test_boundary_magnitudes_are_those_of_sorted_groups(n, m):
    x = normal(1000, m, dtype=torch.float64)
    x[::3] = x[::3].mul(2).round()
    order = x.abs().sort(1).values
    dropped, kept = boundary_magnitudes(x, n, m)
    assert torch.equal(dropped[:, 0], order[:, m - n - 1])
    assert torch.equal(kept[:, 0], order[:, m - n])
    assert ((soft_threshold(x, n, m, gamma=1.0) != 0).sum(1) < n + (n == 1)).all()


@pytest.mark.parametrize("gamma", [0.0, 0.2, 1.0])
@pytest.mark.parametrize(("n", "m"), [(2, 4), (1, 4), (4, 8)])
def test_soft_threshold_is_continuous_where_hard_masks_jump(gamma, n, m):
    a = normal(20_000, m, seed=1, dtype=torch.float64)
    b = a + 1e-4 * normal(20_000, m, seed=2, dtype=torch.float64)
    b = b.abs().roll(1, 0).copysign(a) * 1e-9 + b
    gap = (a - b).abs().amax(1)
    moved = (soft_threshold(a, n, m, gamma=gamma) - soft_threshold(b, n, m, gamma=gamma)).abs()
    assert (moved.amax(1) <= 2 * gap + 1e-15).all()
    hard = (a * nm_mask(a, n, m) - b * nm_mask(b, n, m)).abs().amax(1)
    assert (hard > 100 * gap).any()


def test_scale_equivariance_is_exact_for_powers_of_two():
    x = normal(1000, 8)
    for c in (2.0**-40, 2.0**40):
        assert torch.equal(soft_threshold(x * c, gamma=0.5), soft_threshold(x, gamma=0.5) * c)


def test_degenerate_inputs():
    x = normal(3, 8)
    same = soft_threshold(x, 4, 4)
    assert torch.equal(same, x) and same.data_ptr() != x.data_ptr()
    assert soft_threshold(torch.zeros(0, 8)).shape == (0, 8)
    assert soft_threshold(torch.zeros(3, 0)).shape == (3, 0)
    expanded = torch.tensor([1.0, 2.0, 3.0, 4.0]).expand(5, 4)
    assert torch.equal(soft_threshold(expanded)[3], torch.tensor([0.0, 0.0, 1.0, 2.0]))
    assert not soft_threshold(x.requires_grad_()).requires_grad


@pytest.mark.parametrize(
    ("shape", "options", "words"),
    [
        ((4,), {"gamma": -0.1}, "gamma must lie in"),
        ((4,), {"gamma": 1.1}, "gamma must lie in"),
        ((4,), {"gamma": nan}, "gamma must lie in"),
        ((6,), {}, "not a multiple"),
        ((4,), {"n": 5}, "1 ≤ N ≤ M"),
        ((4,), {"backend": "triton"}, "needs a CUDA tensor"),
    ],
)
def test_bad_options_are_refused(shape, options, words):
    with pytest.raises(ValueError, match=words):
        soft_threshold(torch.zeros(shape), **options)


def test_scale_golden_and_optimality():
    g = load("sste")
    for k in "012":
        w = g[f"w{k}"]
        s = soft_threshold(w)
        beta = optimal_scale(w, s)
        assert beta.dtype == torch.float32 and beta.dim() == 0
        torch.testing.assert_close(beta, g[f"beta{k}"], rtol=1e-6, atol=0)
        slope = ((w - beta * s).double() * s.double()).sum() / (s.double() ** 2).sum()
        assert abs(slope) < 1e-6
        torch.testing.assert_close(l1_scale(w, s), w.abs().sum() / s.abs().sum())


def test_scale_of_normal_and_uniform_weights():
    w = normal(512, 1024) * 1e-6
    assert float(optimal_scale(w, soft_threshold(w))) == pytest.approx(1.484, abs=4e-3)
    w = torch.rand(512, 1024, generator=torch.Generator().manual_seed(1)) * 2 - 1
    assert float(optimal_scale(w, soft_threshold(w))) == pytest.approx(1.749, abs=4e-3)


def test_scale_of_zero_weights_is_one():
    for zero in (torch.zeros(2, 4), torch.ones(2, 4)):
        s = soft_threshold(zero)
        assert not s.any()
        assert optimal_scale(zero, s) == 1 and l1_scale(zero, s) == 1
    tiny = torch.tensor([1e-44, 2e-44, 3e-44, 4e-44])
    assert torch.isfinite(optimal_scale(tiny, soft_threshold(tiny)))
