"""Defects of published samplers: MVUE and SDGP's random pruning (docs/published_defects.md)."""

import pytest
import torch

from sparsepretrain.kernels import NoiseKey, mvue, prune_gradient

ESTIMATORS = ["approximate", "exact"]


def published_inclusion(x, epsilon=2.0**-23):
    """huyz2023/2by4-pretrain, utils.py: an absolute epsilon and sums as "total minus own"."""
    a = x.abs() + epsilon
    total = a.sum(-1, keepdim=True)
    odds = a / (total - a)
    return a / total * (1 + odds.sum(-1, keepdim=True) - odds)


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_dominant_value_among_tiny_ones_is_exact(estimator, dtype):
    """The same where no entry is zero, so that something has to be drawn."""
    tiny = 1e-18 if dtype == torch.float64 else 1e-9
    groups = (torch.eye(4).double() * 8 + tiny).to(dtype)
    assert published_inclusion(groups, 0.0).isnan().any(1).all()
    for key in range(8):
        y = mvue(groups, estimator=estimator, key=key)
        assert torch.equal(y.diagonal(), groups.diagonal())
        drawn = y.double().fill_diagonal_(0).sum(1)
        torch.testing.assert_close(drawn, torch.full_like(drawn, 3 * tiny), rtol=1e-2, atol=0)


def test_row_blocks_draw_different_numbers():
    """triton_ops.py:40-41,67: rows r and r + 1024 share draws, shifted by k/16 groups."""
    rows, k = 2048, 64
    for dim, shape in ((0, (k, rows)), (1, (rows, k))):
        x = torch.ones(shape)
        kept = (mvue(x, dim=dim, key=1) != 0).movedim(dim, -1).view(rows, k // 4, 4)
        for shift in (0, 4):
            same = kept[:1024, shift:] == kept[1024:, : k // 4 - shift]
            # two random pairs of four agree entirely with probability 1/6
            share = float(same.all(-1).float().mean())
            assert abs(share - 1 / 6) < 5 * (5 / 36 / same[..., 0].numel()) ** 0.5, (dim, shift)


def test_a_draw_of_zero_keeps_two():
    """utils.py: ``<=`` with a zeroed weight draws the first position again when r is 0."""
    x = torch.tensor([[1.0, 2.0, 3.0, 4.0], [0.0, 2.0, 3.0, 4.0]])
    y = mvue(x, uniforms=torch.zeros(2, 1, 2))
    assert (y != 0).sum(1).tolist() == [2, 2] and y[1, 0] == 0


def test_draws_follow_the_key_only():
    """triton_ops.py:58: Python's ``random``; _semi_structured_conversions.py:349: block size."""
    x = torch.randn(4096, 40, generator=torch.Generator().manual_seed(0))
    whole = mvue(x, dim=0, key=NoiseKey(3, 4))
    for start, stop in ((0, 8), (2048, 4096)):
        part = mvue(x[start:stop], dim=0, key=NoiseKey(3, 4, start // 4))
        assert torch.equal(part, whole[start:stop])


@pytest.mark.parametrize(("n", "m"), [(2, 4), (1, 2), (1, 4), (4, 8)])
def test_random_pruning_is_uniform(n, m):
    """prune_kernel.cu:86: inclusion 0.500, 0.516, 0.527, 0.457; a group of 2 is never shuffled."""
    count = 100_000
    y = prune_gradient(torch.ones(count, m), n, m, variant="random", key=2)
    assert ((y != 0).sum(1) == n).all()
    spread = (n / m * (1 - n / m) / count) ** 0.5
    assert ((y != 0).float().mean(0) - n / m).abs().max() < 5 * spread


def test_random_pruning_can_be_unbiased():
    """prune_kernel.cu writes kept values unchanged: the expected gradient shrinks by n/m."""
    x = torch.tensor([1.0, -2.0, 3.0, 4.0]).expand(100_000, 4)
    published = prune_gradient(x, variant="random", key=1).mean(0)
    torch.testing.assert_close(published, x[0] / 2, rtol=0.05, atol=0)
    ours = prune_gradient(x, variant="random", rescale=True, key=1).mean(0)
    torch.testing.assert_close(ours, x[0], rtol=0.02, atol=0)
