"""Philox in Triton: the grid of the reference, keys in device memory."""

import pytest
import torch

from sparsepretrain.kernels import ClockKey, NoiseKey, key_words, noise_key, uniform_noise
from support.same_bits import DEVICE, assert_same

KEYS = [(3, 5, 0), (0xDEADBEEF, 0xFFFFFFFF, 2**32 - 2), (0x80000000, 1, 2**33 + 5)]


@pytest.mark.parametrize("parts", KEYS)
@pytest.mark.parametrize("words", [1, 2])
def test_grid_equals_the_reference(parts, words):
    tensors = [torch.tensor(p, device=DEVICE) for p in parts]
    for groups, features in ((37, 301), (1, 1), (0, 4), (4, 0), (300, 3)):
        expected = uniform_noise(NoiseKey(*parts), groups, features, words)
        for key in (parts, tensors, (tensors[0], parts[1], tensors[2])):
            got = uniform_noise(NoiseKey(*key), groups, features, words, DEVICE, backend="triton")
            assert len(got) == words
            for a, b in zip(got, expected, strict=True):
                assert_same(a.cpu(), b)


def test_a_changed_tensor_changes_the_noise():
    """A replayed CUDA graph launches with the same pointers; so does the second call here."""
    key = NoiseKey(*(torch.tensor(v, device=DEVICE) for v in KEYS[0]))
    for parts in KEYS:
        for tensor, value in zip(key, parts, strict=True):
            tensor.fill_(value)
        got = uniform_noise(key, 9, 20, 2, DEVICE, backend="triton")
        for a, b in zip(got, uniform_noise(NoiseKey(*parts), 9, 20, 2), strict=True):
            assert_same(a.cpu(), b)


@pytest.mark.parametrize("seed", [0, 7, 2**32, 2**63 - 1])
@pytest.mark.parametrize("step", [0, 1, 2**31, 2**40 + 3])
def test_clock_keys_equal_noise_keys(seed, step):
    for micro, layer, product, room in ((0, 0, 0, 1), (3, 1, 2, 2**31), (2**33 + 1, 4000, 1, 77)):
        clock, index = (torch.tensor(x, device=DEVICE) for x in ([step, micro], layer))
        words = noise_key(seed, step, layer, product, micro * room)
        expected = uniform_noise(words, 3, 4, 2)
        for number in (layer, index):  # a compiled graph has the layer in device memory
            key = ClockKey(clock, seed, number, product, room)
            assert tuple(map(int, key_words(key))) == words
            got = uniform_noise(key, 3, 4, 2, DEVICE, backend="triton")
            for a, b in zip(got, expected, strict=True):
                assert_same(a.cpu(), b)
