"""Where the tests of kernels run, tensors in other memory, and comparison bit for bit.

Needs nothing but pytest and torch: a GPU machine may have no more.
"""

import os

import pytest
import torch

DEVICE = os.environ.get("SPARSEPRETRAIN_TEST_DEVICE", "cpu")
COMPILED = DEVICE != "cpu"
"""Triton kernels are compiled, half a second for each variant, not interpreted."""
# Random123, kat_vectors: (counter, key, output) of philox4x32-10
PHILOX = [
    ((0, 0, 0, 0), (0, 0), "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ((2**32 - 1,) * 4, (2**32 - 1,) * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        "d16cfe09 94fdcceb 5001e420 24126ea1",
    ),
]
LAYOUTS = ["contiguous", "transposed", "sliced", "strided", "expanded"]


def lay_out(x, layout):
    """``x`` in other memory; ``expanded`` repeats a slice, with stride 0, of the shortest axis."""
    if layout == "transposed":
        return x.movedim(-1, 0).contiguous().movedim(0, -1)
    if layout == "sliced":  # an odd offset; what lies beside must neither be read nor written
        big = torch.full([s + 3 for s in x.shape], 77.0, device=x.device).to(x.dtype)
        view = big[tuple(slice(1, s + 1) for s in x.shape)]
        return view.copy_(x)
    if layout == "strided":
        wide = torch.full((*x.shape[:-1], 2 * x.shape[-1]), 77.0, device=x.device).to(x.dtype)
        return wide[..., 1::2].copy_(x)
    if layout == "expanded":
        return x.narrow(min(range(x.dim()), key=lambda axis: x.shape[axis]), 0, 1).expand(x.shape)
    return x


def assert_same(got, want, inputs=None, *, signed_zero=True):
    """Equal shape, dtype and bits, except that any NaN equals any other; names a block if not."""
    got, want = got.cpu(), want.cpu()
    assert (got.dtype, got.shape) == (want.dtype, want.shape)
    if want.dtype.itemsize == 1 and want.is_floating_point():
        got, want = got.float(), want.float()
    same = got == want
    if want.is_floating_point():
        if signed_zero:
            same &= got.signbit() == want.signbit()
        same |= got.isnan() & want.isnan()
    if same.all():
        return
    first = tuple((~same).nonzero()[0].tolist())[:1]
    source = "" if inputs is None else f"\n  input {inputs.cpu()[first].tolist()}"
    pytest.fail(
        f"{int((~same).sum())} of {same.numel()} elements differ, first in {first}:{source}"
        f"\n  got   {got[first].tolist()}\n  want  {want[first].tolist()}"
    )
