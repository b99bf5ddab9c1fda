"""Triton's own launch path under a driver that runs nothing (``libcuda.c``).

Binding of arguments, specialization, ptxas and the C launcher are those of a launch on a Hopper
GPU. Tensors lie on the CPU: only their addresses are passed on.
"""

import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

CAPABILITY = 90
SOURCE = Path(__file__).with_name("libcuda.c")
NAME = "libcuda.so.1"


class Launch(NamedTuple):
    """One launch that reached the driver."""

    kernel: str
    grid: tuple[int, ...]
    threads: int


def compiler() -> str | None:
    """C compiler of this machine, which Triton needs for its launchers too."""
    return os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc")


class StubDriver:
    """The library, loaded into this process under the name of the real one."""

    def __init__(self, directory: Path) -> None:
        path = directory / NAME
        flags = ["-shared", "-fPIC", "-O1", "-w", f"-Wl,-soname,{NAME}", "-o", str(path)]
        subprocess.run([str(compiler()), *flags, str(SOURCE)], check=True)
        (directory / "libcuda.so").symlink_to(NAME)  # Triton 3.5 links with -lcuda
        # Launchers are linked against this name; the loader takes the library that has it already.
        self._library = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
        self._library.stub_launched.restype = ctypes.c_char_p
        self.directory = directory

    def launches(self, begin: int = 0) -> list[Launch]:
        """Launches from number ``begin`` on."""
        found = []
        for index in range(begin, self._library.stub_launches()):
            kernel, *numbers = self._library.stub_launched(index).decode().split()
            *grid, threads = map(int, numbers)
            found.append(Launch(kernel, tuple(grid), threads))
        return found

    @contextmanager
    def active(self) -> Iterator[None]:
        """Kernels asked for by name launch here, on CPU tensors."""
        settings = {
            "TRITON_LIBCUDA_PATH": str(self.directory),
            "TRITON_CACHE_DIR": str(self.directory / "cache"),
        }
        with patch.dict(os.environ, settings):
            from triton.backends.compiler import GPUTarget
            from triton.backends.nvidia.driver import CudaDriver, CudaLauncher, CudaUtils
            from triton.runtime import driver

            from sparsepretrain.kernels import dispatch

            class Driver(CudaDriver):
                def __init__(self) -> None:  # without asking torch, which sees no GPU
                    self.utils, self.launcher_cls = CudaUtils(), CudaLauncher
                    self.get_current_device = lambda: 0
                    self.set_current_device = lambda device: None
                    self.get_current_stream = lambda device: 0
                    self.get_device_capability = lambda device=0: divmod(CAPABILITY, 10)

                def get_current_target(self) -> GPUTarget:
                    return GPUTarget("cuda", CAPABILITY, 32)

            def choose_backend(name: str, backend: str | None, x: object) -> str:
                return backend or "reference"

            # It stays active: without a GPU Triton has no other driver to go back to.
            driver.set_active(Driver())
            with patch.object(dispatch, "choose_backend", choose_backend):
                yield
