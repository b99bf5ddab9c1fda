"""Compiling and memory layout of CPU kernels.

Imported only where such a kernel runs; the references need torch alone.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import llvmlite.binding
import numba
import numpy
from numba.core.caching import NullCache
from numba.core.compiler import Compiler, CompileResult
from torch import Tensor

from sparsepretrain import __version__
from sparsepretrain.files import cache_directory, write_atomic

Array = Any
_SOURCES = hashlib.sha256(
    b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py")))
).digest()


class _Disjoint(Compiler):
    """No argument shares memory with an array that is written.

    Without that promise LLVM does not vectorize loops over several rows.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.state.flags.noalias = True


class _DiskCache(NullCache):
    """Machine code of one function on disk: a file per signature, processor and state of sources.

    Numba's own cache writes into the installed package, where pip leaves the files behind. Its
    index per function is overwritten by processes that compile at the same time, and misses edits
    of inlined functions.
    """

    def __init__(self, function: Callable[..., None]) -> None:
        self.function = function

    @property
    def cache_path(self) -> str:
        """Directory of the files: ``NUMBA_CACHE_DIR``, or a part of this user's cache."""
        config: Any = numba.config
        if config.CACHE_DIR:
            return str(config.CACHE_DIR)
        processor = llvmlite.binding.get_host_cpu_name()
        return str(cache_directory() / "kernels" / f"{__version__}-{processor}")

    def _file(self, signature: Any, codegen: Any) -> Path:
        versions = (numba.__version__, sys.implementation.cache_tag)
        name = self.function.__name__
        key = (self.function.__module__, signature, codegen.magic_tuple(), versions)
        digest = hashlib.sha256(repr(key).encode() + _SOURCES).hexdigest()
        return Path(self.cache_path, f"{name}-{digest[:16]}.nbc")

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """Return the cached code for a signature, or None if it is missing or unreadable."""
        target_context.refresh()
        file = self._file(sig, target_context.codegen())
        with contextlib.suppress(Exception), open(file, "rb") as stream:
            # Unpickling runs code, and a cache directory may be shared.
            if os.fstat(stream.fileno()).st_uid == os.geteuid():
                return CompileResult._rebuild(target_context, *pickle.load(stream))
        return None

    def save_overload(self, sig: Any, data: Any) -> None:
        """Write compiled code; without a writable directory every process compiles again."""
        with contextlib.suppress(Exception):
            file = self._file(sig, data.codegen)
            file.parent.mkdir(parents=True, exist_ok=True)
            # Ranks that start together compile the same function.
            write_atomic(file, pickle.dumps(data._reduce()), tag=f".{os.getpid()}")


def compiled(function: Callable[..., None]) -> Any:
    """Compile ``function`` at its first call with new types, and cache the code on disk.

    Neither fast-math nor contraction: the reference's bits. The arrays of a call must not overlap.
    """
    kernel: Any = numba.njit(nogil=True, error_model="numpy", pipeline_class=_Disjoint)(function)
    kernel._cache = _DiskCache(function)
    return kernel


inlined = numba.njit(forceinline=True, error_model="numpy", pipeline_class=_Disjoint)
"""A part of a kernel."""


def groups_of(x: Tensor, m: int, dim: int) -> Array:
    """Return groups of m along ``dim`` of a contiguous tensor: (groups, m, distance in memory)."""
    dim %= x.dim()
    inner = x.shape[dim + 1 :].numel()
    return x.numpy().reshape(x.numel() // max(m * inner, 1), m, inner)


def packs_groups4(x: Tensor, m: int, dim: int, out: Tensor) -> bool:
    """Return True if a loop over pairs of groups can write ``out`` and a mask packed by rows.

    The groups of four lie along memory in rows of whole bytes, in both tensors, and ``out`` needs
    no rounding. No loop takes arrays that overlap.
    """
    whole = x.dim() > 1 and x.shape[1:].numel() % 8 == 0 and x.stride(dim) == 1
    alike = out.dtype == x.dtype and x.is_contiguous() and out.is_contiguous()
    return m == 4 and whole and alike and out.data_ptr() != x.data_ptr()


@inlined
def packed_flags(a, b):
    """Return the flags of two groups of four in a byte, the first group in the low nibble."""
    none = numpy.uint8(0)
    low = (numpy.uint8(1) if a[0] else none) | (numpy.uint8(2) if a[1] else none)
    low |= (numpy.uint8(4) if a[2] else none) | (numpy.uint8(8) if a[3] else none)
    high = (numpy.uint8(16) if b[0] else none) | (numpy.uint8(32) if b[1] else none)
    high |= (numpy.uint8(64) if b[2] else none) | (numpy.uint8(128) if b[3] else none)
    return numpy.uint8(low | high)
