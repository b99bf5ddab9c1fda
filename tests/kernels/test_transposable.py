"""Transposable masks of any N:M: feasible for every block, near the optimum, exact on request."""

import itertools

import pytest
import torch
from scipy.optimize import linear_sum_assignment

from sparsepretrain import kernels
from sparsepretrain.kernels import tsenor
from sparsepretrain.kernels.transposable import _best_of_90, _optimum
from support.block_cases import every_dtype, generator, kernel, nasty_blocks
from support.same_bits import DEVICE, LAYOUTS, lay_out

PATTERNS = [(4, 8), (8, 16), (1, 4), (2, 8), (1, 2), (3, 4), (5, 7), (1, 16), (15, 16), (1, 1)]
GAPS = {(4, 8): 0.2, (8, 16): 0.2, (1, 4): 0.15, (2, 8): 0.4}
"""Pattern -> percent of the optimal sum that TSENOR may lose on average."""


def matrix(blocks):
    """(count, M, M) as a matrix whose blocks lie in two rows."""
    count, m, _ = blocks.shape
    return blocks.view(2, count // 2, m, m).transpose(1, 2).reshape(2 * m, count // 2 * m)


def blocks_of(x, m):
    return x.cpu().reshape(len(x) // m, m, -1, m).transpose(1, 2).reshape(-1, m, m)


def sums(mask, m):
    blocks = blocks_of(mask, m)
    return blocks.sum(1), blocks.sum(2)


def kept(blocks, masks):
    return (blocks.abs().double() * masks).sum((1, 2))


@every_dtype
@pytest.mark.parametrize(("n", "m"), PATTERNS)
def test_every_block_is_feasible(dtype, n, m):
    """Zeros, ties, NaN, infinities, every exponent, one value among zeros, last bits."""
    blocks = nasty_blocks(m, dtype, m * m, count=600).view(-1, m, m)
    blocks[0], blocks[1], blocks[2] = 0.0, torch.nan, torch.inf
    blocks[3] = torch.finfo(dtype).max
    blocks[4] = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    blocks[5:200:2, 1:] = torch.finfo(dtype).tiny  # one row outweighs the others
    x = matrix(blocks)
    for layout in LAYOUTS:
        mask = kernel("transposable_mask")(lay_out(x.to(DEVICE), layout), n, m)
        assert mask.dtype == torch.bool and mask.shape == x.shape
        assert all((each == n).all() for each in sums(mask, m)), layout


@pytest.mark.parametrize("exact", [False, True])
def test_the_largest_values_are_kept(exact):
    """An infinity counts as the largest number, and NaN as an infinity."""
    for n, m in ((4, 8), (1, 4), (2, 3)):
        for value in (torch.nan, torch.inf, 1e38):
            x = torch.randn(m, 5 * m, generator=generator(0))
            where = torch.arange(m), torch.arange(m).flip(0) + m
            x[where] = value
            mask = kernels.transposable_mask(x, n, m, exact=exact)
            assert mask[where].all()


@pytest.mark.parametrize(("n", "m"), GAPS)
def test_tsenor_is_near_the_optimum(n, m):
    blocks = torch.randn(200, m, m, generator=generator(1))
    x = matrix(blocks)
    optimal = kept(blocks, blocks_of(kernels.transposable_mask(x, n, m, exact=True), m))
    lost = 1 - kept(blocks, blocks_of(kernels.transposable_mask(x, n, m), m)) / optimal
    assert lost.min() > -1e-6 and 100 * lost.mean() < GAPS[n, m]
    assert (lost < 1e-6).any()


@pytest.mark.parametrize("bound", [1e-30, 1e30])
def test_a_common_factor_changes_no_mask(bound):
    """Powers of two scale every magnitude of a block exactly."""
    x = torch.randn(32, 64, generator=generator(2)).clamp(-4, 4)
    factor = 2.0 ** round(torch.tensor(bound).log2().item())
    first = kernels.transposable_mask(x, 4, 8)
    assert torch.equal(kernels.transposable_mask(x * factor, 4, 8), first)
    assert torch.equal(kernels.transposable_mask(-x, 4, 8), first)
    half = x.bfloat16()
    assert torch.equal(
        kernels.transposable_mask(half, 4, 8), kernels.transposable_mask(half.double(), 4, 8)
    )


def test_a_block_depends_on_itself_alone(monkeypatch):
    """Not on its neighbors or on the number of blocks, so ranks choose the masks of one process."""
    x = torch.randn(48, 64, generator=generator(3))
    whole = kernels.transposable_mask(x, 4, 8)
    for start, stop in ((0, 8), (8, 24), (40, 48)):
        part = kernels.transposable_mask(x[start:stop], 4, 8)
        assert torch.equal(part, whole[start:stop])
    monkeypatch.setitem(tsenor.ENTRIES, "cpu", 5 * 64)
    assert torch.equal(kernels.transposable_mask(x, 4, 8), whole)


@pytest.mark.parametrize(("n", "m"), [(1, 3), (2, 3), (1, 4), (2, 4), (3, 4)])
def test_the_optimum_is_that_of_brute_force(n, m):
    rows = [row for row in itertools.product((0, 1), repeat=m) if sum(row) == n]
    masks = torch.tensor([*itertools.product(rows, repeat=m)])
    masks = masks[(masks.sum(1) == n).all(1)]
    blocks = torch.randn(40, m, m, generator=generator(4)).abs()
    blocks[::4] = blocks[::4].mul(2).round()  # ties
    blocks[1] = 0.0
    best = (blocks[:, None].double() * masks).sum((2, 3)).amax(1)
    found = _optimum(blocks, n)
    assert all((found.sum(axis) == n).all() for axis in (1, 2))
    torch.testing.assert_close(kept(blocks, found), best, rtol=1e-6, atol=0)
    if (n, m) == (2, 4):
        torch.testing.assert_close(
            kept(blocks, _best_of_90(blocks).view(-1, 4, 4)), best, rtol=1e-6, atol=0
        )


def test_the_optimum_of_one_in_m_is_an_assignment():
    for m in (8, 16):
        blocks = torch.rand(10, m, m, generator=generator(5))
        found = kept(blocks, _optimum(blocks, 1))
        for block, value in zip(blocks, found, strict=True):
            best = block[linear_sum_assignment(block, maximize=True)].double().sum()
            assert float(value) == pytest.approx(float(best), rel=1e-6)


def test_swaps_complete_any_greedy_rounding():
    """Also of random orders, which leave many more rows without N ones; the first swap is best."""
    for n, m in ((1, 4), (2, 8), (4, 8), (8, 16), (3, 5)):
        order = torch.rand(m, m, 2000, generator=generator(6))
        scaled = torch.rand(m, m, 2000, generator=generator(7))
        mask = tsenor._round(order, n)
        lacking = (n - mask.sum(0)).sum(0)
        assert mask.sum(0).max() <= n and mask.sum(1).max() <= n
        assert n == 1 or (lacking > 0).any(), "there is something to complete"
        before = mask.clone()
        tsenor._complete_(mask, scaled, n)
        assert (mask.sum(0) == n).all() and (mask.sum(1) == n).all()
        for block in (lacking == 1).nonzero()[:20, 0]:
            old, new, w = before[..., block], mask[..., block], scaled[..., block].double()
            i, j = (int((old.sum(axis) < n).nonzero()) for axis in (1, 0))
            gains = [
                w[i, column] + w[row, j] - w[row, column]
                for row, column in old.nonzero().tolist()
                if not (old[i, column] or old[row, j])
            ]
            gain = float((w * new).sum() - (w * old).sum())
            assert gain == pytest.approx(float(max(gains)), abs=1e-6)


def test_projections_reach_the_optimum_with_entropy(monkeypatch):
    """Rows and columns of N, nothing above 1, and log S = τ|W| + f + g wherever S is below 1."""
    monkeypatch.setattr(tsenor, "SHARPNESS", 8.0)
    monkeypatch.setattr(tsenor, "ITERATIONS", 2000)
    monkeypatch.setattr(tsenor, "EXPONENT_BITS", 24)
    scaled = torch.rand(8, 8, 20, generator=generator(8), dtype=torch.float64)
    scaled /= scaled.amax((0, 1))
    s = tsenor._relax(scaled, 4)
    assert s.max() <= 1 and (s == 1).any(0).any(0).all(), "every block clips some"
    assert all((s.sum(axis) - 4).abs().max() < 1e-6 for axis in (0, 1))
    d = s.log() - 8 * scaled
    for i, j in itertools.combinations(range(8), 2):
        differences = d[i] - d[j]  # equal in all columns whose entries are below 1
        free = (s[i] < 1 - 1e-6) & (s[j] < 1 - 1e-6)
        low = differences.masked_fill(~free, torch.inf).amin(0)
        high = differences.masked_fill(~free, -torch.inf).amax(0)
        assert (high - low)[free.sum(0) > 1].abs().max() < 1e-5


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_nothing_to_search(device):
    x = torch.zeros(8, 16, device=device)
    assert kernels.transposable_mask(x[:0], 4, 8).shape == (0, 16)
    assert kernels.transposable_mask(x, 8, 8).shape == x.shape
    assert kernels.transposable_mask(x, 4, 8).device == x.device
    if device == "cpu":
        assert kernels.transposable_mask(x, 8, 8).all()
