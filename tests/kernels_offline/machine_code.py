"""What the compiler makes of a kernel, read without a GPU: registers, spills, instructions.

A launch is recorded with everything the launcher chose (tile, constants, warps), compiled for a
named architecture by Triton's own compiler and read back with the disassembler of its wheel. No
driver is involved, so the numbers are facts about the machine code, not about time.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any
from unittest.mock import patch

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

LANES = {"issue": 128, "alu": 64, "fma": 128, "imad": 64, "xu": 16}
"""Results per clock and multiprocessor of what executes instructions, on sm_90.

``issue`` takes all of them. ``imad`` is the half of ``fma`` that multiplies integers too. On sm_80
``fma`` is no wider than that half; what other architectures differ in is not modelled.
"""
_PIPES = {
    "fma": "FADD FADD2 FMUL FMUL2 FFMA FFMA2 HADD2 HMUL2 HFMA2",
    "imad": "IMAD IDP",
    "xu": "MUFU F2F F2I I2F I2I FRND FLO POPC BREV",
    "memory": "LDG STG LDS STS LDL STL LDSM STSM SHFL ATOM ATOMG ATOMS RED REDG",
    "control": "BAR BMOV BRA BREAK BSSY BSYNC CALL CCTL CS2R DEPBAR ERRBAR EXIT LDC LDCU MEMBAR "
    "R2UR RET S2R S2UR ULDC WARPSYNC YIELD",
}
PIPE_OF = {opcode: pipe for pipe, opcodes in _PIPES.items() for opcode in opcodes.split()}
"""Opcode without modifiers -> the pipe that executes it. Those of uniform registers begin with U;
the others, integers, logic, comparisons, selection and rounding, are those of ``alu``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """One kernel launch as the launcher asked for it."""

    kernel: Any
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    keywords: dict[str, Any]
    """Constants by the names of parameters, and compiler options: warps, fusion."""

    @property
    def name(self) -> str:
        """Module and name of the kernel."""
        return kernel_name(self.kernel)


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What stands in the machine code of one kernel."""

    registers: int
    """Per thread."""
    stack: int
    """Bytes per thread, where spilled registers would lie."""
    shared: int
    """Bytes per program, static and dynamic."""
    threads: int
    """Per program."""
    opcodes: list[str] = field(repr=False)
    """Opcode with modifiers of every instruction that does something."""
    times: list[int] = field(repr=False)
    """How often a thread executes each, if it skips none."""
    loops: list[int]
    """Rounds of each loop; 0: not known, and counted once."""

    @cached_property
    def spills(self) -> int:
        """Loads and stores of local memory."""
        return self._count(r"(LDL|STL)\b")

    @cached_property
    def loads(self) -> int:
        """Loads from global memory."""
        return self._count(r"LDG\b")

    @cached_property
    def wide_loads(self) -> int:
        """Those of 128 bits or more per thread."""
        return self._count(r"LDG\b.*\.(128|256|ENL2)")

    @cached_property
    def executed(self) -> dict[str, int]:
        """Instructions per thread that each of :data:`LANES` executes."""
        count: Counter[str] = Counter()
        for opcode, times in zip(self.opcodes, self.times, strict=True):
            name = opcode.partition(".")[0]
            count["issue"] += times
            count[PIPE_OF.get(name, "uniform" if name.startswith("U") else "alu")] += times
        count["fma"] += count["imad"]
        return {pipe: count[pipe] for pipe in LANES}

    def _count(self, pattern: str) -> int:
        return sum(re.match(pattern, opcode) is not None for opcode in self.opcodes)


def kernel_name(kernel: Any) -> str:
    """``soft._soft_24`` for the kernel ``_soft_24`` of ``kernels/triton/soft.py``."""
    module = kernel.__module__.rpartition(".")[2]
    return f"{module}.{kernel.__name__}"


@contextmanager
def recording() -> Iterator[list[Launch]]:
    """Collect launches instead of launching: tensors may lie on the CPU and are not touched.

    The launcher's own Python runs as ever, so tiles and constants are those of a real run.
    """
    launches: list[Launch] = []

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **keywords: Any) -> None:
        launches.append(Launch(kernel=kernel, grid=grid, args=args, keywords=keywords))

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


def compile_launch(launch: Launch, capability: int) -> Facts:
    """Compile for ``capability`` (80, 90, 100) and read the machine code.

    Raises:
        TritonError: the architecture cannot run the kernel (fp8 e4m3 before sm_89).
    """
    target = GPUTarget("cuda", capability, 32)
    source, options = source_of(launch, target)
    compiled = triton.compile(source, target=target, options=options)
    return read_cubin(
        compiled.asm["cubin"], compiled.metadata.num_warps * 32, compiled.metadata.shared
    )


def read_cubin(cubin: bytes, threads: int, shared: int) -> Facts:
    """Facts of a cubin with one kernel, by cuobjdump (``-res-usage``) and nvdisasm."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = _tool("cuobjdump", "-res-usage", file.name)
        listing = _tool("nvdisasm", "-c", file.name)
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", usage)
    if found is None:
        raise ValueError(f"cuobjdump printed no resource usage: {usage[:200]!r}")
    registers, stack, static, local = map(int, found.groups())
    opcodes, times, loops = read_listing(listing)
    return Facts(
        registers=registers,
        stack=stack + local,
        shared=max(shared, static),
        threads=threads,
        opcodes=opcodes,
        times=times,
        loops=loops,
    )


def read_listing(listing: str) -> tuple[list[str], list[int], list[int]]:
    """(opcodes without NOP, how often each is executed, rounds of loops) of nvdisasm's text.

    Every kernel ends in a branch to itself, behind its EXIT: neither an instruction that runs nor
    a loop.
    """
    lines: list[str] = []
    opcodes: list[str] = []
    bodies: list[slice] = []
    labels: dict[str, int] = {}
    for line in listing.splitlines():
        if label := re.match(r"\s*(\.L_\S+):", line):
            labels[label[1]] = len(opcodes)
        instruction = re.match(r"\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)", line)
        if instruction is None or instruction[1].startswith("NOP"):
            continue
        branch = re.search(r"\bBRA\S*\s.*?`?\(?(\.L_\w+)", line)
        if branch and branch[1] in labels:
            if labels[branch[1]] == len(opcodes):
                continue
            bodies.append(slice(labels[branch[1]], len(opcodes) + 1))
        opcodes.append(instruction[1])
        lines.append(line)
    loops = [_rounds("\n".join(lines[body])) for body in bodies]
    times = [1] * len(opcodes)
    for body, rounds in zip(bodies, loops, strict=True):
        times[body] = [t * max(rounds, 1) for t in times[body]]
    return opcodes, times, loops


def _rounds(body: str) -> int:
    """Of a loop whose counter starts at 0 and ends at a constant; 0: no such counter is found."""
    for end in re.finditer(r"SETP\.NE\S* \w+, \w+, (U?R\d+)(?:\.reuse)?, 0x(\w+)", body):
        step = re.search(rf"ADD3? {end[1]},(?: U?P\w+,)* {end[1]}(?:\.reuse)?, 0x(\w+)", body)
        if step:
            return int(end[2], 16) // int(step[1], 16)
    return 0


def _tool(name: str, *args: str) -> str:
    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    return subprocess.run([path, *args], capture_output=True, text=True, check=True).stdout


def versions() -> dict[str, str]:
    """Triton and the assemblers of its wheel, which decide the figures."""
    result = {"triton": triton.__version__}
    for name in ("ptxas", "ptxas-blackwell"):
        try:
            found = re.search(r"release [\d.]+, V([\d.]+)", _tool(name, "--version"))
        except OSError:  # only Triton from 3.4 on has two
            continue
        result[name] = found[1] if found else "?"
    return result
