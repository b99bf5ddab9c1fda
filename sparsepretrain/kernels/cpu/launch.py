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
