"""Values in given memory with masks in bits, and memory beyond 32 bits."""

import pytest
import torch

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
from support.parity import DTYPES, nasty
from support.same_bits import DEVICE, assert_same

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
    mask = nm_mask(x, dim=dim, backend="reference")
    assert_same(found[5], masked_decay_(x.clone(), x, mask, 0.25, backend="triton"))


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
    blocks.copy_(nasty((4, 64), 4, special=False))
    near = blocks.clone()
    assert_same(
        transposable_mask(blocks, backend="triton"), transposable_mask(near, backend="reference")
    )
