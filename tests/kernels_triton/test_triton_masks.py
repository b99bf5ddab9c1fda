"""N:M masks, soft threshold, transposable masks: the bits of the reference."""

import pytest
import torch
from parity import DTYPES, layouts, nasty
from same_bits import DEVICE, assert_same

from sparsepretrain.kernels import nm_mask, nm_prune, soft_threshold, transposable_mask

PATTERNS = [(2, 4), (1, 4), (2, 8), (1, 16), (3, 5), (16, 32)]


def shapes(m):
    """(shape, group axis) with sizes that fill no tile."""
    return [((37, 9 * m), 1), ((9 * m, 37), 0), ((3, 5 * m, 7), 1), ((0, m), 1), ((m,), 0)]


@pytest.mark.parametrize("n, m", PATTERNS)
@pytest.mark.parametrize("ties", ["high", "low"])
def test_masks(n, m, ties):
    for seed, (shape, dim) in enumerate(shapes(m)):
        x = nasty(shape, seed)
        for view in layouts(x) if len(shape) == 2 and shape[0] else [x]:
            options = {"dim": dim, "ties": ties}
            expected = nm_mask(view, n, m, **options, backend="reference")
            assert_same(nm_mask(view, n, m, **options, backend="triton"), expected)
            for dtype in DTYPES:
                narrow = view.to(dtype)
                both = [
                    nm_prune(narrow, n, m, **options, backend=b) for b in ("triton", "reference")
                ]
                for got, wanted in zip(*both, strict=True):
                    assert_same(got, wanted)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n, m", PATTERNS)
def test_soft_threshold(n, m, dtype):
    scale = torch.tensor(1.37, device=DEVICE)
    for seed, (shape, dim) in enumerate(shapes(m)):
        x = nasty(shape, seed).to(dtype)
        views = list(layouts(x)) if len(shape) == 2 and shape[0] else [x]
        for i, view in enumerate(views):
            gamma = (0.0, 0.3, 1.0)[(i + seed) % 3]
            for options in ({}, {"scale": scale, "dtype": torch.bfloat16}):
                options |= {"dim": dim, "gamma": gamma}
                expected = soft_threshold(view, n, m, **options, backend="reference")
                assert_same(soft_threshold(view, n, m, **options, backend="triton"), expected)


@pytest.mark.parametrize("n, m", [(2, 4), (1, 8)])
def test_many_groups(n, m):
    x = nasty((128, 90 * m), 5)  # 11,520 groups
    assert_same(nm_mask(x, n, m, backend="triton"), nm_mask(x, n, m, backend="reference"))
    for gamma in (0.0, 0.7):
        options = {"gamma": gamma, "backend": "reference"}
        expected = soft_threshold(x, n, m, **options)
        assert_same(soft_threshold(x, n, m, gamma=gamma, backend="triton"), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(416, 416), (20, 36), (4, 4), (0, 8), (132, 68)])
def test_transposable(shape, dtype):
    x = nasty(shape, 1).to(dtype)
    for view in layouts(x) if shape[0] else [x]:
        expected = transposable_mask(view, backend="reference")
        assert_same(transposable_mask(view, backend="triton"), expected)


def test_offsets_beyond_32_bits():
    """The second row lies 2³¹ elements after the first; untouched memory costs nothing."""
    values = nasty((2, 64), 3)
    storage = torch.empty(2**31 + 4096, dtype=torch.bfloat16, device=DEVICE)
    x = storage.as_strided((2, 64), (2**31, 1))
    x.copy_(values)
    near = values.to(torch.bfloat16)
    assert_same(nm_mask(x, backend="triton"), nm_mask(near, backend="reference"))
    expected = soft_threshold(near, backend="reference")
    assert_same(soft_threshold(x, backend="triton"), expected)
    blocks = storage.as_strided((4, 64), (2**29 + 8, 1))
    blocks.copy_(nasty((4, 64), 4))
    near = blocks.clone()
    assert_same(
        transposable_mask(blocks, backend="triton"), transposable_mask(near, backend="reference")
    )
