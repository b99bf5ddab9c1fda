"""Philox in Triton: the published vectors, the grid of the reference, keys in device memory."""

import pytest
import torch
import triton
import triton.language as tl
from same_bits import DEVICE, PHILOX, assert_same

from sparsepretrain.kernels import ClockKey, NoiseKey, key_words, noise_key, uniform_noise
from sparsepretrain.kernels.triton import noise

KEYS = [(3, 5, 0), (0xDEADBEEF, 0xFFFFFFFF, 2**32 - 2), (0x80000000, 1, 2**33 + 5)]


@triton.jit
def philox_kernel(words_ptr, out_ptr):
    c0, c1, c2 = tl.load(words_ptr), tl.load(words_ptr + 1), tl.load(words_ptr + 2)
    c3, k0, k1 = tl.load(words_ptr + 3), tl.load(words_ptr + 4), tl.load(words_ptr + 5)
    r0, r1, r2, r3 = noise.philox(
        c0.to(tl.uint32), c1.to(tl.uint32), c2.to(tl.uint32), c3.to(tl.uint32),
        k0.to(tl.uint32), k1.to(tl.uint32),
    )  # fmt: skip
    tl.store(out_ptr, r0.to(tl.int64))
    tl.store(out_ptr + 1, r1.to(tl.int64))
    tl.store(out_ptr + 2, r2.to(tl.int64))
    tl.store(out_ptr + 3, r3.to(tl.int64))


@pytest.mark.parametrize(("counter", "key", "expected"), PHILOX)
def test_philox_equals_the_published_vectors(counter, key, expected):
    out = torch.empty(4, dtype=torch.int64, device=DEVICE)
    philox_kernel[(1,)](torch.tensor([*counter, *key], device=DEVICE), out)
    assert [f"{word:08x}" for word in out.tolist()] == expected.split()


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
