"""Philox4x32-10 against the published vectors, and the grid of uniforms built on it."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsepretrain.kernels import NoiseKey, noise_key, uniform_like, uniform_noise
from sparsepretrain.kernels.noise import philox
from support.same_bits import PHILOX

ONES = 0xFFFFFFFF
WORD = st.integers(0, ONES)


@pytest.mark.parametrize(("counter", "key", "expected"), PHILOX)
def test_philox_equals_the_published_vectors(counter, key, expected):
    assert [f"{word:08x}" for word in philox(counter, key)] == expected.split()
    tensors = tuple(torch.tensor([word]) for word in counter)
    keys = tuple(torch.tensor(word) for word in key)
    for result in (philox(tensors, key), philox(tensors, keys)):
        assert [f"{int(word):08x}" for word in result] == expected.split()


@settings(max_examples=30, deadline=None)
@given(k0=WORD, k1=WORD, offset=st.integers(0, 2**33), groups=st.integers(0, 9), words=st.just(2))
def test_every_element_of_the_grid_is_philox(k0, k1, offset, groups, words):
    features = 7
    for key in (NoiseKey(k0, k1, offset), NoiseKey(*map(torch.tensor, (k0, k1, offset)))):
        out = uniform_noise(key, groups, features, words)
        assert len(out) == words
        for word in out:
            assert word.shape == (groups, features) and word.dtype == torch.float32
        for group in range(groups):
            for feature in range(features):
                block = philox(((offset + group) & ONES, feature, 0, 0), (k0, k1))
                for word, bits in zip(out, block, strict=False):
                    assert float(word[group, feature]) == (bits >> 8) * 2.0**-24
    assert torch.equal(uniform_noise(NoiseKey(k0, k1, offset), groups, features, 1)[0], out[0])


def test_every_coordinate_changes_the_key():
    base = {"seed": 3, "step": 4, "layer": 5, "matmul": 2}
    changes = [{}, *({k: v + 1} for k, v in base.items())]
    changes += [{"seed": 3 + 2**32}, {"step": 4 + 2**32}, {"seed": 2**63 - 1}, {"step": 0}]
    keys = [noise_key(**base | change)[:2] for change in changes]
    assert len(set(keys)) == len(keys)
    as_tensor = noise_key(**base | {"step": torch.tensor(4)})
    assert (int(as_tensor.k0), int(as_tensor.k1)) == keys[0]


def test_integer_seed_equals_its_noise_key():
    for seed in (0, 1, 2**40 + 3):
        expected = uniform_noise(NoiseKey(seed & ONES, seed >> 32), 3, 4, 1)[0]
        assert torch.equal(uniform_noise(seed, 3, 4, 1)[0], expected)


def test_uniforms_are_uniform_and_uncorrelated():
    a, b = uniform_noise(noise_key(0, 0, 0, 2), 512, 2048, 2)
    n = a.numel()
    for word in (a, b):
        assert word.min() >= 0 and word.max() < 1
        assert abs(float(word.double().mean()) - 0.5) < 5 * (1 / 12 / n) ** 0.5
        counts = torch.histc(word, 64, 0, 1)
        chi2 = ((counts - n / 64) ** 2 / (n / 64)).sum()
        assert chi2 < 63 + 5 * (2 * 63) ** 0.5

    def correlation(x, y):
        return abs(float(torch.corrcoef(torch.stack([x.flatten(), y.flatten()]))[0, 1]))

    limit = 5 / (n / 2) ** 0.5
    assert correlation(a, b) < limit
    assert correlation(a[:, :1024], a[:, 1024:]) < limit  # the published kernel repeats these
    for shift in (1, 4, 64):
        assert correlation(a[shift:, :1024], a[:-shift, 1024:]) < limit
        assert correlation(a[shift:], a[:-shift]) < limit
    c = uniform_noise(noise_key(0, 1, 0, 2), 512, 2048, 1)[0]
    assert correlation(a, c) < limit


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_uniform_like_draws_along_the_axis(dim):
    x = torch.empty(3, 4, 5, dtype=torch.bfloat16).movedim(0, 1)
    got = uniform_like(x, 7, dim)
    assert got.dtype == torch.float32 and got.shape == x.shape
    last = x.shape[dim]
    (grid,) = uniform_noise(7, x.numel() // last, last, 1)
    assert torch.equal(got.movedim(dim, -1).reshape(-1, last), grid)
    assert uniform_like(torch.empty(2, 0), 7, -1).shape == (2, 0)
