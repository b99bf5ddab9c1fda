"""What every CPU kernel shares: compiling, groups in memory, threads.

Imported only where such a kernel runs; the references need torch alone.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import os
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numba
import torch
from numba.core import types
from numba.core.caching import FunctionCache
from numba.core.compiler import Compiler
from numba.extending import intrinsic
from torch import Tensor

from sparsepretrain.files import write_atomic

Array = Any
PER_THREAD = 2**21
"""Elements of which a thread has at least so many. A second one must be woken, waits for the GIL
and shares its core with what OpenMP still does: for a millisecond of work steps become slower."""
_SOURCES = hashlib.sha256(
    b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py")))
).digest()


class _Disjoint(Compiler):
    """No argument shares memory with an array that is written.

    Without that promise LLVM does not vectorise loops over several rows.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.state.flags.noalias = True


class _Folder:
    """Compiled code on disk, one file per function, types, processor and sources of this folder.

    Numba's own files have one index per function, which processes that compile at the same time
    overwrite, and do not see that an imported function has changed.
    """

    def __init__(self, path: str, name: str) -> None:
        self.path, self.name = path, name

    def _file(self, key: Any) -> Path:
        digest = hashlib.sha256(repr((key, numba.__version__)).encode() + _SOURCES)
        return Path(self.path, f"{self.name}-{digest.hexdigest()[:16]}.nbc")

    def load(self, key: Any) -> Any:
        """What was saved under ``key``; None: nothing, or nothing that can be read."""
        with contextlib.suppress(Exception):
            return pickle.loads(self._file(key).read_bytes())
        return None

    def save(self, key: Any, data: Any) -> None:
        """Keep ``data`` if that is possible."""
        with contextlib.suppress(Exception):
            write_atomic(self._file(key), pickle.dumps(data))


def compiled(function: Callable[..., None]) -> Any:
    """``function`` as machine code, for the types it is first called with; kept on disk.

    Neither fast-math nor contraction: the reference's bits. The arrays of a call must not overlap.
    """
    kernel: Any = numba.njit(nogil=True, error_model="numpy", pipeline_class=_Disjoint)(function)
    with contextlib.suppress(Exception):  # no folder can be written, or another version of Numba
        cache = FunctionCache(function)
        folder: Any = _Folder(cache.cache_path, cache._impl.filename_base)
        cache._cache_file = folder
        kernel._cache = cache
    return kernel


inlined = numba.njit(forceinline=True, error_model="numpy", pipeline_class=_Disjoint)
"""A part of a kernel."""


@functools.lru_cache(maxsize=1)
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(os.cpu_count(), "sparsepretrain-kernel")


os.register_at_fork(after_in_child=_threads.cache_clear)  # a child has none of its parent's


def run(kernel: Any, rows: int, arrays: tuple[Array, ...], *numbers: Any) -> None:
    """``kernel(*arrays, *numbers)`` on parts of the rows, on at most as many threads as torch's.

    Args:
        kernel: of :func:`compiled`.
        rows: that arrays consist of: each is cut along axis 0 into as many equal parts, or empty.
        arrays: C-contiguous.
        numbers: of the types that the kernel computes in.
    """
    if not rows:
        return
    parts = min(torch.get_num_threads(), arrays[0].size // PER_THREAD, rows)
    if parts < 2:
        kernel(*arrays, *numbers)
        return
    ends = [rows * i // parts for i in range(parts + 1)]
    cut = [
        [a[len(a) // rows * start : len(a) // rows * stop] for a in arrays]
        for start, stop in itertools.pairwise(ends)
    ]
    waiting = []
    for part in cut[1:]:
        try:
            waiting.append(_threads().submit(kernel, *part, *numbers))
        except RuntimeError:  # the interpreter is shutting down: there are no threads any more
            kernel(*part, *numbers)
    kernel(*cut[0], *numbers)
    for done in waiting:
        done.result()


@intrinsic
def _pointer(typing: Any, address: Any, like: Any) -> Any:
    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

    return types.CPointer(like.dtype)(address, like), build


@inlined
def array_at(address, size, like):
    """The array of ``size`` elements of the type of ``like`` at an address (a tensor's data_ptr).

    One call can so take many tensors: a NumPy array of each costs microseconds.
    """
    pointer: Any = _pointer
    return numba.carray(pointer(address, like), size)


def groups_of(x: Tensor, m: int, dim: int) -> Array:
    """The groups of m along ``dim`` of a contiguous tensor: (groups, m, distance in memory)."""
    dim %= x.dim()
    inner = x.shape[dim + 1 :].numel()
    return x.numpy().reshape(x.numel() // max(m * inner, 1), m, inner)
