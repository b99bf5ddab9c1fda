"""Unbiased sampling of any N:M: law, least variance, extremes; 2:4: test_mvue24.py."""

import pytest
import torch
from hypothesis import strategies as st
from scipy.optimize import minimize

from sparsepretrain.kernels import mvue, noise_key, uniform_noise
from sparsepretrain.kernels.mvue_nm import water_filled
from support.block_cases import (
    BLOCKS,
    blocks_of,
    every_dtype,
    generator,
    kernel,
    many_blocks,
    nasty_blocks,
    place,
    places,
)
from support.same_bits import DEVICE

PATTERNS = [(1, 4), (4, 8), (2, 8), (8, 16), (3, 5), (1, 2), (7, 8), (1, 1)]
INSET = 1e-12


def groups(m, count=400):
    """Groups without zeros; a third spans six orders of magnitude: several entries are certain."""
    x = torch.randn(count, m, generator=generator(0), dtype=torch.float64)
    x[1::3] *= 10.0 ** (6 * torch.rand(x[1::3].shape, generator=generator(1)).double() - 3)
    x[5::7] = x[5::7].sign()
    return x


def inclusion(a, n):
    """p = min(1, a/c) with sum N, by bisection of log c."""
    low, high = a.amin(1, keepdim=True).log() - 40, a.sum(1, keepdim=True).log() + 1
    for _ in range(200):
        middle = (low + high) / 2
        too_many = (a / middle.exp()).clamp(max=1).sum(1, keepdim=True) > n
        low, high = torch.where(too_many, middle, low), torch.where(too_many, high, middle)
    return (a / high.exp()).clamp(max=1)


@pytest.mark.parametrize(("n", "m"), [p for p in PATTERNS if p[0] < p[1]])
def test_the_law_is_unbiased_on_every_interval(n, m):
    """Between two fractional parts of Σp the selection is constant and as systematic sampling."""
    x = groups(m)
    p = inclusion(x.abs(), n)
    c = torch.cat([torch.zeros(len(x), 1, dtype=x.dtype), p.cumsum(1)], 1)
    c[:, m] = n
    # intervals of length 1 bring the same fractional part again, but for rounding
    cuts = torch.cat([c[:, :m] % 1, torch.ones(len(x), 1, dtype=x.dtype)], 1).sort(1).values
    cuts = torch.cat([torch.zeros(len(x), 1, dtype=x.dtype), cuts], 1)
    mean, mass = torch.zeros_like(x), torch.zeros_like(x)
    second = torch.zeros_like(x)
    for start, end in zip(cuts[:, :-1].t(), cuts[:, 1:].t(), strict=True):
        wide = end - start > 1e-9
        inset = torch.minimum(torch.full_like(start, INSET * 100), (end - start) / 4)
        points = start + inset, (start + end) / 2, end - inset
        found = [mvue(x, n, m, uniforms=u[:, None, None], backend="reference") for u in points]
        assert all(torch.equal(found[1][wide], other[wide]) for other in (found[0], found[2]))
        assert ((found[1] != 0).sum(1) == n).all()
        u = points[1][:, None]
        hit = torch.stack([(c[:, :m] <= u + k) & (u + k < c[:, 1:]) for k in range(n)]).any(0)
        clear = wide[:, None] & (p < 1)
        assert torch.equal((found[1] != 0)[clear], hit[clear])
        length = (end - start)[:, None]
        mean += length * found[1]
        second += length * found[1] ** 2
        mass += length * (found[1] != 0)
    scale = x.abs().amax(1, keepdim=True)
    gaps = cuts.diff(dim=1)
    clear = ((gaps > 1e-9) | (gaps < 1e-13)).all(1)
    assert clear.float().mean() > 0.9
    assert ((mean - x).abs() <= 1e-11 * scale)[clear].all()
    assert ((mass - p).abs() <= 1e-11)[clear].all()
    variance = x**2 * (1 / p - 1)
    assert ((second - x**2 - variance).abs() <= 1e-11 * scale**2 * m)[clear].all()


@pytest.mark.parametrize(("n", "m"), [(1, 4), (2, 4), (4, 8), (2, 8), (3, 5)])
def test_the_variance_is_the_least(n, m):
    """Against a numerical optimum of Σ a²/p over all p with sum N, and against random p."""
    for x in groups(m, 24) / groups(m, 24).abs().amax(1, keepdim=True):
        a = x.abs().clamp(min=1e-3)
        p = inclusion(a[None], n)[0]
        least = float((a**2 / p).sum())
        square = (a**2).numpy()
        found = minimize(
            lambda q, square=square: float((square / q).sum()),
            torch.full((m,), n / m, dtype=torch.float64).numpy(),
            jac=lambda q, square=square: -square / q**2,
            bounds=[(1e-7, 1.0)] * m,
            constraints={"type": "eq", "fun": lambda q: q.sum() - n, "jac": lambda q: q * 0 + 1},
            method="SLSQP",
            options={"maxiter": 500, "ftol": 1e-12},
        )
        assert abs(found.x.sum() - n) < 1e-9
        assert least <= found.fun * (1 + 1e-9)
        others = torch.rand(200, m, generator=generator(3), dtype=torch.float64)
        for q in inclusion(others, n):
            assert least <= float((a**2 / q).sum()) * (1 + 1e-12)


def test_two_of_four_has_the_law_of_its_own_formulas():
    x = [v.clone() for v in groups(4, 2000).t()]
    u = torch.rand(2000, generator=generator(4), dtype=torch.float64)
    general = torch.stack(water_filled(x, 2, u, torch.finfo(torch.float64).max), 1)
    own = mvue(torch.stack(x, 1), estimator="exact", uniforms=u[:, None, None])
    assert torch.equal(general != 0, own != 0)
    torch.testing.assert_close(general, own, rtol=1e-12, atol=0)


@pytest.mark.parametrize("estimator", ["approximate", "exact"])
def test_the_estimator_chooses_among_samplers_of_two_of_four(estimator):
    x = torch.randn(16, 8, generator=generator(5))
    for n, m in ((4, 8), (1, 4)):
        expected = mvue(x, n, m, dim=0, key=3)
        assert torch.equal(mvue(x, n, m, dim=0, estimator=estimator, key=3), expected)
    assert torch.equal(mvue(x, dim=0, key=3), mvue(x, 2, 4, dim=0, key=3))


@every_dtype
@many_blocks(pattern=st.sampled_from(PATTERNS), where=places)
def test_every_group_is_n_of_m(dtype, seed, pattern, where):
    """The loops have the reference's bits; N values, or all of fewer, are kept and none shrinks."""
    n, m = pattern
    x, dim = place(nasty_blocks(seed, dtype, m, count=BLOCKS), where)
    blocks = blocks_of(x, dim, m)
    u = torch.randint(2**24, (len(blocks),), generator=generator(seed)) * 2.0**-24
    shape = (*x.movedim(dim, -1).shape[:-1], x.shape[dim] // m, 1)
    y = blocks_of(kernel("mvue")(x, n, m, dim=dim, uniforms=u.view(shape).to(DEVICE)), dim, m)
    finite = blocks.isfinite().all(1)
    nonzeros = (blocks != 0).sum(1)
    few = nonzeros <= n
    assert torch.equal(y[few & finite], blocks[few & finite])
    assert y[finite].isfinite().all() and not y[~finite].isfinite().all(1).any()
    wide, kept = blocks[finite].double(), (y[finite] != 0)
    # entries of 10⁻²⁹ of the largest may be dropped
    largest = wide.abs().amax(1, keepdim=True)
    sizable = (wide.abs() > largest * 1e-25).sum(1)
    assert (kept.sum(1) <= n).all()
    assert (kept.sum(1) >= sizable.clamp(max=n)).all()
    assert not (kept & (wide == 0)).any()
    assert (y[finite].double().abs() >= wide.abs())[kept].all()
    assert ((y[finite] > 0) == (wide > 0))[kept].all()


@pytest.mark.parametrize(("n", "m"), [(3, 4), (5, 7), (7, 8), (6, 16)])
def test_rounding_keeps_n_of_nearly_certain_values(n, m):
    """N equal values and small others: their sum over N may round below each of them."""
    x = torch.full((20000, m), 1e-9)
    x[:, :n] = 1 + torch.rand(20000, 1, generator=generator(8))
    assert (x[:, :n].cumsum(1)[:, -1] / n < x[:, 0]).any()
    y = kernel("mvue")(x.to(DEVICE), n, m, key=4).cpu()
    assert ((y != 0).sum(1) == n).all()
    assert (y[:, :n] != 0).double().mean() > 0.999


@every_dtype
@pytest.mark.parametrize(("n", "m"), [(4, 8), (1, 4)])
def test_powers_of_two_scale_exactly(dtype, n, m):
    x = torch.randn(500, m, generator=generator(2), dtype=torch.float64)
    x = (x.clamp(-4, 4).abs().clamp(min=2.0**-6) * x.sign()).to(dtype)
    y = kernel("mvue")(x.to(DEVICE), n, m, key=1).cpu()
    low, high = (-6, 6) if dtype == torch.float16 else (-100, 100)
    for k in (low, -1, high):
        scaled = kernel("mvue")((x.double() * 2.0**k).to(dtype).to(DEVICE), n, m, key=1).cpu()
        assert torch.equal(scaled.double(), y.double() * 2.0**k), k
    assert torch.equal(kernel("mvue")(-x.to(DEVICE), n, m, key=1).cpu(), -y)


@pytest.mark.parametrize(("n", "m"), [(4, 8), (1, 4), (2, 8)])
def test_axes_padding_and_keys(n, m):
    base = torch.randn(24, 6, generator=generator(6))
    y = mvue(base, n, m, dim=0, key=2)
    for length in (1, 5, 11, 23):
        padded = torch.cat([base[:length], torch.zeros(-length % m, 6)])
        assert torch.equal(
            mvue(base[:length], n, m, dim=0, key=2), mvue(padded, n, m, dim=0, key=2)[:length]
        )
    (u,) = uniform_noise(2, 24 // m, 6, 1)
    assert torch.equal(mvue(base, n, m, dim=0, uniforms=u.t()[..., None]), y)
    assert torch.equal(mvue(base.t(), n, m, dim=1, key=2), y.t())
    turned = mvue(base, n, m, dim=0, key=2, order="tokens_last")
    assert torch.equal(turned, y) and turned.stride(0) == 1
    key = noise_key(1, 2, 3, 2, 1)  # one group later
    later = mvue(base[m:], n, m, dim=0, key=key)
    assert torch.equal(later, mvue(base, n, m, dim=0, key=noise_key(1, 2, 3, 2))[m:])
    assert mvue(base[:0], n, m, dim=0, key=0).shape == (0, 6)


@pytest.mark.parametrize(("n", "m"), [(4, 8), (1, 4)])
def test_the_mean_of_keyed_draws_is_the_input(n, m):
    x = torch.randn(m, 4, generator=generator(7), dtype=torch.float64)
    draws = 4000
    y = mvue(x.repeat(draws, 1), n, m, dim=0, key=9).view(draws, m, 4)
    p = inclusion(x.t().abs(), n).t()
    deviation = (x**2 * (1 / p - 1) / draws).sqrt()
    assert ((y.mean(0) - x).abs() <= 5 * deviation + 1e-9).all()
