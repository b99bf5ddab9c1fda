"""Blocks that break kernels, the backend under test, and how results are compared.

The same cases run against every backend: a property calls ``kernel("nm_mask")(x.to(DEVICE), …)``
and compares bits with a plain-Python oracle (block_oracles.py). Environment:

    SPARSEPRETRAIN_TEST_BACKEND   passed to every kernel: cpu (default: the loops, every result is
                                  compared with the reference, too), reference or triton
    SPARSEPRETRAIN_TEST_DEVICE    where its tensors are: cpu (default) or cuda
    SPARSEPRETRAIN_TEST_BLOCKS    blocks per call (4096)
    SPARSEPRETRAIN_TEST_CALLS     calls per property and dtype (3)

Triton on the CPU needs ``TRITON_INTERPRET=1`` from the start of the process.
"""

import functools
import inspect
import os

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from sparsepretrain import kernels
from sparsepretrain.kernels.dispatch import find
from support.same_bits import DEVICE, LAYOUTS, assert_same, lay_out

BACKEND = os.environ.get("SPARSEPRETRAIN_TEST_BACKEND", "cpu")
BLOCKS = int(os.environ.get("SPARSEPRETRAIN_TEST_BLOCKS", "4096"))
CALLS = int(os.environ.get("SPARSEPRETRAIN_TEST_CALLS", "3"))


DTYPES = [torch.float32, torch.float16, torch.bfloat16]
if BACKEND != "triton":
    DTYPES.insert(0, torch.float64)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))

AXES = ["last", "first", "middle"]
COMPOSED = ("nm_prune", "prune_gradient", "bimask_masks", "bimask_prune")
"""Have no loop of their own and call operations that do."""
PATTERNS = [(2, 4), (1, 4), (3, 4), (2, 8), (4, 8), (1, 16), (16, 32), (5, 7), (1, 1), (4, 4)]


def kernel(name):
    """The public function ``name``, bound to the backend under test."""
    function = getattr(kernels, name)
    if "backend" not in inspect.signature(function).parameters:
        return function
    if BACKEND != "cpu":
        return functools.partial(function, backend=BACKEND)
    loops = find(name, "cpu") or name in COMPOSED
    return functools.partial(_both, function) if loops else function


def _both(function, *args, **options):
    """The result on the CPU, which has the bits of the reference."""
    copies = [a.clone() if isinstance(a, torch.Tensor) else a for a in args]
    got, want = (
        function(*values, **options, backend=backend)
        for values, backend in ((args, None), (copies, "reference"))  # None: loops where there are
    )
    pairs = zip(got, want, strict=True) if isinstance(got, tuple | list) else [(got, want)]
    for ours, theirs in pairs:
        assert_same(ours, theirs)
    return got


def many_blocks(**strategies):
    """A property of a few calls with many blocks each: what varies is drawn by hypothesis."""

    def decorate(test):
        drawn = given(seed=st.integers(0, 2**32 - 1), **strategies)(test)
        # thousands of blocks would shrink for minutes, and a failure names its first block anyway
        phases = (Phase.explicit, Phase.generate)
        return settings(max_examples=CALLS, deadline=None, print_blob=True, phases=phases)(drawn)

    return decorate


layouts = st.sampled_from(LAYOUTS)
# groups in a row: with BLOCKS a power of two, sizes that do not fill a kernel's block
places = st.tuples(st.sampled_from(AXES), st.sampled_from([1, 3, 5, 13]), layouts)


def generator(seed):
    return torch.Generator().manual_seed(seed)


def nasty_blocks(seed, dtype, m=4, *, count=BLOCKS, finite=False):
    """(count, m) of ``dtype``; each block is of one kind, all kinds occur.

    Normal numbers, ties between small integers (and between +0 and -0), special values (the
    smallest and largest of the dtype, infinities, NaN), random bit patterns (every exponent), one
    value among zeros, and values that differ in the last bits.
    """
    g, info = generator(seed), torch.finfo(dtype)
    shape = (count, m)
    eps, tiny = info.eps, info.smallest_normal
    special = [0.0, -0.0, tiny * eps, -3 * tiny * eps, tiny, -tiny * (1 - eps), 1.0, -1.0]
    special += [1 + eps, -(1 + eps), 1 - eps / 2, 0.1, info.max, -info.max]
    special += [] if finite else [torch.inf, -torch.inf, torch.nan]
    special = torch.tensor(special, dtype=torch.float64).to(dtype)

    def pick(values):
        return values[torch.randint(len(values), shape, generator=g)]

    alone = torch.zeros(shape, dtype=dtype)
    alone.scatter_(1, torch.randint(m, (count, 1), generator=g), pick(special))
    kinds = torch.stack(
        [
            torch.randn(shape, generator=g, dtype=torch.float64).to(dtype),
            pick(torch.tensor([-2.0, -1.0, -0.0, 0.0, 1.0, 2.0])).to(dtype),
            pick(special),
            random_bits(shape, dtype, g, finite=finite),
            alone,
            (1 + eps * torch.randint(-2, 3, shape, generator=g)).double().to(dtype),
        ]
    )
    return kinds[torch.randint(len(kinds), (count,), generator=g), torch.arange(count)]


def random_bits(shape, dtype, g, *, finite=False):
    """Every exponent is equally likely; subnormals, and infinities and NaN unless ``finite``."""
    integer = {8: torch.int64, 4: torch.int32, 2: torch.int16}[dtype.itemsize]
    info = torch.iinfo(integer)
    x = torch.randint(info.min, info.max, shape, generator=g, dtype=integer).view(dtype)
    # payloads of NaN differ between devices and mean nothing
    return torch.where(x.isfinite(), x, 1.5) if finite else torch.where(x.isnan(), torch.nan, x)


def place(blocks, where):
    """(x, dim): the blocks as groups along ``dim`` of a tensor on the device; ``where``: places."""
    axis, per_row, layout = where
    m = blocks.shape[1]
    rows = len(blocks) // (3 * per_row) * 3
    x, dim = blocks[: rows * per_row].reshape(rows, per_row * m), -1
    if axis == "first":
        x, dim = x.t().contiguous(), 0
    elif axis == "middle":
        x, dim = x.view(3, rows // 3, per_row * m).movedim(-1, 1).contiguous(), 1
    return lay_out(x.to(DEVICE), layout), dim


def blocks_of(x, dim, m):
    """(blocks, m): inverse of :func:`place`, for any strides."""
    return x.cpu().movedim(dim, -1).reshape(-1, m)
