"""The continuous pruning function and its scales."""

import pytest
import torch

from sparsepretrain.kernels import (
    boundary_magnitudes,
    l1_scale,
    nm_mask,
    optimal_scale,
    soft_threshold,
)
from support.golden_vectors import load

CASES = ["rand0", "rand1", "rand2", "rand3", "ties", "zeros", "negative", "allequal"]
CASES += ["subnormal", "signedzero", "large", "inf"]
PATTERNS = [(1, 4), (2, 4), (3, 4), (2, 8), (4, 8), (1, 16), (16, 32)]


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


def test_degenerate_inputs():
    x = normal(3, 8)
    same = soft_threshold(x, 4, 4)
    assert torch.equal(same, x) and same.data_ptr() != x.data_ptr()
    expanded = torch.tensor([1.0, 2.0, 3.0, 4.0]).expand(5, 4)
    assert torch.equal(soft_threshold(expanded)[3], torch.tensor([0.0, 0.0, 1.0, 2.0]))
    assert not soft_threshold(x.requires_grad_()).requires_grad


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


def test_scale_of_subnormal_weights_is_finite():
    tiny = torch.tensor([1e-44, 2e-44, 3e-44, 4e-44])
    assert torch.isfinite(optimal_scale(tiny, soft_threshold(tiny)))
