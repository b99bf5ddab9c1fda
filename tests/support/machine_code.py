"""Machine code of a kernel, compiled without a GPU: registers and spills.

A launch is recorded with everything the launcher chose (tile, constants, warps) and compiled for a
named architecture by Triton's own compiler. No driver is involved.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import os
import pkgutil
import re
import subprocess
import tempfile
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

from sparsepretrain.kernels import triton as kernels

CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


class Launch(NamedTuple):
    """One kernel launch as the launcher asked for it."""

    kernel: Any
    args: tuple[Any, ...]
    keywords: dict[str, Any]
    """Constants by the names of parameters, and compiler options: warps, fusion."""

    @property
    def name(self) -> str:
        return kernel_name(self.kernel)


class Usage(NamedTuple):
    """Registers of one kernel, per thread."""

    registers: int
    spilled: int
    """Bytes of stack and local memory, which only spilled registers need here."""


def kernel_name(kernel: Any) -> str:
    """``soft._soft_24_kernel`` for that kernel of ``kernels/triton/soft.py``."""
    module = kernel.__module__.rpartition(".")[2]
    return f"{module}.{kernel.__name__}"


@contextmanager
def recording() -> Iterator[list[Launch]]:
    """Collect launches instead of launching: tensors may lie on the CPU and are not touched.

    The launcher's own Python runs as ever, so tiles and constants are those of a real run.
    """
    launches: list[Launch] = []

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **keywords: Any) -> None:
        launches.append(Launch(kernel, args, keywords))

    # The variable makes dispatch accept CPU tensors; kernels were defined before, so that nothing
    # is interpreted.
    with patch.dict(os.environ, TRITON_INTERPRET="1"), patch.object(JITFunction, "run", run):
        yield launches


def source_of(launch: Launch, target: GPUTarget) -> tuple[ASTSource, dict[str, Any]]:
    """(what Triton's launcher would compile for the arguments of a launch, compiler options)."""
    kernel, backend = launch.kernel, make_backend(target)
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    bound, specialization, options = bind(*launch.args, **launch.keywords)
    packed, signature, constants, attributes = kernel._pack_args(
        backend, launch.keywords, bound, specialization, options
    )
    return ASTSource(kernel, signature, constants, attributes), packed.__dict__


def compile_launch(launch: Launch, capability: int) -> Usage:
    """Compile for ``capability`` (80, 90, 100) and read the resource usage.

    TritonError: the architecture cannot run the kernel (fp8 e4m3 before sm_89).
    """
    target = GPUTarget("cuda", capability, 32)
    source, options = source_of(launch, target)
    compiled = triton.compile(source, target=target, options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        words = [CUOBJDUMP, "-res-usage", file.name]
        usage = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", usage)
    if found is None:
        raise ValueError(f"cuobjdump printed no resource usage: {usage[:200]!r}")
    registers, stack, local = map(int, found.groups())
    return Usage(registers, stack + local)


def entry_kernels() -> set[str]:
    """Return the kernels of ``kernels/triton/`` that are launched: no other kernel calls them."""
    names = [module.name for module in pkgutil.iter_modules(kernels.__path__)]
    modules = [importlib.import_module(f"{kernels.__name__}.{name}") for name in names]
    found: set[str] = set()
    called: set[str] = set()
    for module in modules:
        for function in vars(module).values():
            if isinstance(function, JITFunction) and function.__module__ == module.__name__:
                found.add(kernel_name(function))
                called |= _callees(function)
    return {name for name in found if not name.startswith("tiles.")} - called


def _callees(function: Any) -> set[str]:
    tree = ast.parse(textwrap.dedent(inspect.getsource(function.fn)))
    names = {
        n.func.id
        for n in ast.walk(tree)
        if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)
    }
    found = [function.fn.__globals__.get(name) for name in names]
    return {kernel_name(f) for f in found if isinstance(f, JITFunction)}
