"""Exact distribution of MVUE samples, moment by moment, in fp64.

The tests feed the middle and both ends of every interval of the uniforms. This fixes the length of
each interval, which is the probability of its outcome, to 1e-12.
"""

import itertools

import pytest
import torch

from sparsepretrain import kernels
from support.block_cases import every_dtype, generator, kernel
from support.golden_vectors import load
from support.same_bits import DEVICE

INSET = 1e-12
ESTIMATORS = ["approximate", "exact"]
PAIRS = list(itertools.permutations(range(4), 2))


def mvue64(x, **options):
    """Sample with the reference; others have no fp64 and are compared bit by bit elsewhere."""
    return kernels.mvue(x, backend="reference", **options)


def mvue(x, **options):
    options = {k: v.to(DEVICE) if isinstance(v, torch.Tensor) else v for k, v in options.items()}
    return kernel("mvue")(x.to(DEVICE), **options).cpu()


def groups(count=2000, seed=0):
    """Groups without zeros; a third spans six orders of magnitude: one entry often dominates."""
    x = torch.randn(count, 4, generator=generator(seed), dtype=torch.float64)
    x[1::3] *= 10.0 ** (6 * torch.rand(x[1::3].shape, generator=generator(1)).double() - 3)
    x[5::7] = x[5::7].sign()
    return x


def intervals(weights):
    """(starts, ends) of the parts of [0, 1) that belong to the entries of each row."""
    ends = weights.cumsum(1) / weights.sum(1, keepdim=True)
    ends[:, -1] = 1.0
    return torch.cat([torch.zeros_like(ends[:, :1]), ends[:, :-1]], 1), ends


def corners(start, end):
    """Points just inside both ends, and the middle; all equal in an empty interval."""
    inset = torch.minimum(torch.full_like(start, INSET), (end - start) / 4)
    return start + inset, (start + end) / 2, end - inset


def test_approximate_law_is_unbiased_on_every_interval():
    """P(i, then j) = a_i/S · a_j/(S - a_i), to 1e-12, and the moments that follow."""
    x = groups()
    a = x.abs()
    p, joint = torch.zeros_like(x), torch.zeros(len(x), 4, 4, dtype=x.dtype)
    mean, second = torch.zeros_like(x), torch.zeros_like(joint)
    for i, j in PAIRS:
        rest = a.clone()
        rest[:, i] = 0
        (low0, high0), (low1, high1) = intervals(a), intervals(rest)
        estimates = []
        for r0 in corners(low0[:, i], high0[:, i]):
            for r1 in corners(low1[:, j], high1[:, j]):
                estimates.append(mvue64(x, uniforms=torch.stack([r0, r1], 1)[:, None]))
        assert all(torch.equal(estimates[0], other) for other in estimates[1:])
        kept = estimates[0] != 0
        assert kept[:, [i, j]].all() and (kept.sum(1) == 2).all()
        probability = a[:, i] / a.sum(1) * rest[:, j] / rest.sum(1)
        p[:, [i, j]] += probability[:, None]
        joint[:, i, j] += probability
        joint[:, j, i] += probability
        mean += probability[:, None] * estimates[0]
        second += probability[:, None, None] * estimates[0][:, :, None] * estimates[0][:, None, :]
    scale = x.abs().amax(1)
    assert ((mean - x).abs() <= 1e-12 * scale[:, None]).all()
    variance = x**2 * (1 / p - 1)
    covariance = second - x[:, :, None] * x[:, None, :]
    diagonal = covariance.diagonal(dim1=1, dim2=2)
    assert ((diagonal - variance).abs() <= 1e-12 * (variance + scale[:, None] ** 2)).all()
    expected = x[:, :, None] * x[:, None, :] * (joint / (p[:, :, None] * p[:, None, :]) - 1)
    off = ~torch.eye(4, dtype=torch.bool)
    error = (covariance - expected).abs() / scale[:, None, None] ** 2
    assert (error[:, off] <= 1e-12).all()
    assert ((p.sum(1) - 2).abs() < 1e-12).all() and (p < 1 + 1e-12).all()


def exact_inclusion(a):
    """p of least variance: 2a/S; if one entry exceeds the sum R of the others, 1 and a/R."""
    k = a.argmax(1, keepdim=True)
    rest = a.scatter(1, k, 0).sum(1, keepdim=True)
    share = torch.where(a.gather(1, k) > rest, rest, a.sum(1, keepdim=True) / 2)
    return (a / share).clamp(max=1)


def test_exact_inclusion_equals_golden():
    """The published optimum, which the tests of the law rest on."""
    g = load("mvue_exact")
    x = g["x"].double()
    p = torch.where((x != 0).sum(1, keepdim=True) <= 2, (x != 0).double(), exact_inclusion(x.abs()))
    torch.testing.assert_close(p.float(), g["p_opt"], rtol=1e-5, atol=1e-6)
    variance = torch.where(x == 0, 0, x**2 * (1 / p - 1)).sum(1)
    torch.testing.assert_close(variance.float(), g["var_opt"], rtol=1e-4, atol=1e-6)


def test_exact_law_is_unbiased_on_every_interval():
    """Between two fractional parts of C_i the selection is constant and as systematic sampling."""
    x = groups()
    p = exact_inclusion(x.abs())
    c = torch.cat([torch.zeros(len(x), 1, dtype=x.dtype), p.cumsum(1)], 1)
    c[:, 4] = 2
    cuts = torch.cat([c[:, :4] % 1, torch.ones(len(x), 1, dtype=x.dtype)], 1).sort(1).values
    mean, mass = torch.zeros_like(x), torch.zeros_like(x)
    for start, end in zip(cuts[:, :-1].t(), cuts[:, 1:].t(), strict=True):
        wide = end - start > 1e-9
        points = corners(start, end)
        estimates = [mvue64(x, estimator="exact", uniforms=u[:, None, None]) for u in points]
        assert all(torch.equal(estimates[0][wide], other[wide]) for other in estimates[1:])
        u = points[1][:, None]
        hit = [((c[:, :4] <= v) & (v < c[:, 1:])) for v in (u, u + 1)]
        assert torch.equal((estimates[0] != 0)[wide], (hit[0] | hit[1])[wide])
        mean += (end - start)[:, None] * estimates[1]
        mass += (end - start)[:, None] * (estimates[1] != 0)
    # intervals below 1e-9 are too narrow to resolve; groups with one are left out
    scale = x.abs().amax(1, keepdim=True)
    clear = ((cuts.diff(dim=1) > 1e-9) | (cuts.diff(dim=1) < 1e-15)).all(1)
    assert clear.float().mean() > 0.9
    assert ((mean - x).abs() <= 1e-12 * scale)[clear].all()
    assert ((mass - p).abs() <= 1e-12)[clear].all()


@every_dtype
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_powers_of_two_scale_exactly(dtype, estimator):
    """No absolute epsilon: scaling by 2^k changes no decision and no bit of a significand."""
    x = torch.randn(2000, 4, generator=generator(2), dtype=torch.float64)
    x = x.clamp(-4, 4).abs().clamp(min=2.0**-6) * x.sign()
    x[::5, 1:] = 0  # one entry that dominates
    x[1::5, 0] *= 16
    x[2::5, 2] = 0
    x = x.to(dtype)
    low, high = (-6, 8) if dtype == torch.float16 else (-100, 100)
    y = mvue(x, estimator=estimator, key=1)
    for k in (low, -1, 1, high):
        scaled = mvue((x.double() * 2.0**k).to(dtype), estimator=estimator, key=1)
        assert torch.equal(scaled.double(), y.double() * 2.0**k), k
    assert torch.equal(mvue(-x, estimator=estimator, key=1), -y)
