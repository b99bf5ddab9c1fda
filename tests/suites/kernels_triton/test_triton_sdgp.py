"""Random gradient pruning in Triton: the positions that the reference draws."""

import pytest
import torch

from sparsepretrain.kernels import NoiseKey, prune_gradient, uniform_noise
from support.parity import DTYPES, nasty
from support.same_bits import DEVICE, assert_same


def both(g, n, m, **options):
    expected = prune_gradient(g.cpu(), n, m, backend="reference", **options)
    on_device = {k: v.to(DEVICE) if k == "uniforms" else v for k, v in options.items()}
    return prune_gradient(g, n, m, backend="triton", **on_device).cpu(), expected


@pytest.mark.parametrize("n, m", [(2, 4), (4, 4), (3, 6), (16, 32)])
def test_random_pruning_equals_the_reference(n, m):
    key = NoiseKey(0xDEADBEEF, 5, 2**32 - 3)
    conv = nasty((3, 2 * m, 5, 3), m).contiguous(memory_format=torch.channels_last)
    for i, (g, dim) in enumerate(
        [(nasty((37, 3 * m), m), 1), (nasty((3 * m, 37), m), 0), (conv, 1)]
    ):
        options = {"variant": "random", "rescale": i % 2 == 1, "dim": dim}
        assert_same(*both(g.to(DTYPES[i]), n, m, key=key, **options))


def test_equal_draws_are_ranked_like_the_reference():
    """In this group the eighth and ninth largest of sixteen uniforms are equal."""
    key = NoiseKey(0, 0, 110_968)
    largest = uniform_noise(key, 1, 16, 1)[0].sort(descending=True).values[0]
    assert largest[7] == largest[8]
    ones = torch.ones(1, 16, device=DEVICE)
    assert_same(*both(ones, 8, 16, variant="random", key=key))


def test_offsets_beyond_32_bits():
    storage = torch.empty(2**31 + 4096, dtype=torch.bfloat16, device=DEVICE)
    g = storage.as_strided((3, 64), (2**30 + 8, 1))
    g.copy_(nasty((3, 64), 3))
    for options in ({}, {"variant": "random", "key": 2}):
        for n, m in ((2, 4), (1, 8)):
            got = prune_gradient(g, n, m, backend="triton", **options)
            expected = prune_gradient(g.cpu().contiguous(), n, m, **options)
            assert_same(got.cpu(), expected)
