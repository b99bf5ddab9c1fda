"""N:M masks, soft threshold, transposable masks: the bits of the reference."""

import pytest
import torch
import triton
from packaging import version
from parity import DTYPES, layouts, nasty
from same_bits import COMPILED, DEVICE, assert_same

from sparsepretrain.kernels import (
    apply_mask,
    masked_decay_,
    nm_mask,
    nm_prune,
    pack_rows,
    packed_flip_count,
    soft_prune,
    soft_threshold,
    transposable_mask,
)

lost_nan = pytest.mark.xfail(
    not COMPILED and version.parse(triton.__version__) < version.parse("3.8"),
    reason="its interpreter returns NaN for tl.minimum(x, NaN); machine code returns x",
    strict=False,  # a shape may be too small for a NaN
)
PATTERNS = [(2, 4), (1, 4), (2, 8), (1, 16), (3, 5), (16, 32)]


def shapes(m):
    """(shape, group axis) with sizes that fill no tile; one of them where kernels are compiled."""
    wide = (9 if m <= 8 else 5) * m
    sizes = [((37, wide), 1), ((wide, 37), 0), ((3, 5 * m, 7), 1), ((0, m), 1), ((m,), 0)]
    return sizes[:1] if COMPILED else sizes


@pytest.mark.parametrize("n, m", PATTERNS)
@pytest.mark.parametrize("ties", ["high", "low"])
def test_masks_equal_the_reference(n, m, ties):
    for seed, (shape, dim) in enumerate(shapes(m)):
        x = nasty(shape, seed)
        views = layouts(x) if len(shape) == 2 and shape[0] else [x]
        for i, view in enumerate(views):
            options = {"dim": dim, "ties": ties}
            expected = nm_mask(view, n, m, **options, backend="reference")
            assert_same(nm_mask(view, n, m, **options, backend="triton"), expected)
            narrow = view.to(DTYPES[(i + seed) % 3])
            both = [nm_prune(narrow, n, m, **options, backend=b) for b in ("triton", "reference")]
            for got, wanted in zip(*both, strict=True):
                assert_same(got, wanted)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n, m", PATTERNS)
def test_soft_threshold_equals_the_reference(n, m, dtype):
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


INTO = [((37, 36), 1), ((36, 37), 0), ((24, 264), 1), ((264, 24), 0), ((8, 12), 0), ((12, 8), 1)]
INTO += [((4, 4), 1), ((8, 4), 0), ((3, 20, 7), 1), ((0, 8), 1)]  # which nothing packs in one pass


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape, dim", INTO)
def test_values_in_given_memory_and_masks_in_bits(shape, dim, dtype):
    x, scale = nasty(shape, 7), torch.tensor(1.37, device=DEVICE)

    def results(backend):
        new = [torch.full(shape, 9.0, dtype=dtype, device=DEVICE) for _ in range(3)]
        options = {"dim": dim, "backend": backend}
        values, code = nm_prune(x, out=new[0], **options)
        soft, soft_code = soft_prune(x, gamma=0.3, scale=scale, out=new[1], **options)
        masked = apply_mask(x, code, out=new[2], backend=backend)
        assert all(a is b for a, b in zip((values, soft, masked), new, strict=True))
        decayed = masked_decay_(x.clone(), x, code, 0.25, backend=backend)
        last = code.clone()
        flips = packed_flip_count(last, soft_code, replace=True, backend=backend)
        return values, code, soft, soft_code, masked, decayed, flips, last

    found = results("triton")
    for got, wanted in zip(found, results("reference"), strict=True):
        assert_same(got, wanted)
    assert_same(found[1], pack_rows(nm_mask(x, dim=dim, backend="reference")))
    for ties in ("high", "low"):
        options = {"dim": dim, "ties": ties, "packed": True}
        alone = [nm_mask(x.to(dtype), **options, backend=b) for b in ("triton", "reference")]
        assert_same(*alone)
    assert_same(found[7], found[3])


@lost_nan
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(416, 416), (20, 36), (4, 4), (0, 8), (132, 68)])
def test_transposable_masks_equal_the_reference(shape, dtype):
    x = nasty(shape, 1).to(dtype)
    for view in layouts(x) if shape[0] else [x]:
        expected = transposable_mask(view, backend="reference")
        assert_same(transposable_mask(view, backend="triton"), expected)


@lost_nan
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
