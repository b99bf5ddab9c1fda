"""Where the tests of kernels run, tensors in other memory, and comparison bit for bit.

Needs nothing but pytest and torch: a GPU machine may have no more.
"""

import os

import pytest
import torch

DEVICE = os.environ.get("SPARSEPRETRAIN_TEST_DEVICE", "cpu")
COMPILED = DEVICE != "cpu"
"""Triton kernels are compiled, half a second for each variant, not interpreted."""
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
