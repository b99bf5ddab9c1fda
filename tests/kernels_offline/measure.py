"""What every kernel compiles to, on a machine without a GPU: facts about machine code, no times.

``make kernels-offline`` runs this file, which renews ``benchmarks/kernels_offline.json``.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import json
import math
import pkgutil
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from kernel_variants import all_cases
from machine_code import (
    LANES,
    Facts,
    Launch,
    compile_launch,
    kernel_name,
    recording,
    versions,
)
from triton.errors import TritonError
from triton.runtime.jit import JITFunction

from kernel_cases import KernelCase, Limit
from sparsepretrain.kernels import triton as kernels
from sparsepretrain.training.hardware import environment

RECORD = Path(__file__).parents[2] / "benchmarks" / "kernels_offline.json"
LIMITS_FOR = "3.9."
"""Triton that the limits were set with."""
OTHER_COMPILER = 1.4
"""Slack for another one: 3.6 makes up to a third more instructions and registers."""


@dataclass(slots=True, kw_only=True)
class Row:
    """One kernel of one case on one architecture."""

    case: str
    kernel: str
    architecture: str
    registers: int = 0
    spills: int = 0
    """Loads and stores of spilled registers, and bytes of stack: nothing may spill."""
    shared: int = 0
    """Bytes per program."""
    loads: int = 0
    wide_loads: int = 0
    """Loads of 128 bits."""
    pipes: dict[str, float] = dataclasses.field(default_factory=dict)
    """Instructions per element of the case by what executes them (``machine_code.LANES``)."""
    slots: float = 0.0
    """Of the issue of instructions, per element, in which the busiest pipe is busy."""
    busiest: str = ""
    loops: list[int] = dataclasses.field(default_factory=list)
    """Rounds of each."""
    bytes: float = 0.0
    """What an ideal kernel moves, per element of the case."""
    limit: dict[str, float] | None = None
    refused: str | None = None
    """Why the architecture cannot run the kernel."""
    problems: list[str] = dataclasses.field(default_factory=list)

    @property
    def name(self) -> str:
        """Case, kernel and architecture."""
        return f"{self.case} · {self.kernel} · {self.architecture}"

    @property
    def ok(self) -> bool:
        """Nothing spills, limits are kept, and refusals are the expected ones."""
        return not self.problems

    def as_dict(self) -> dict[str, Any]:
        """For the JSON."""
        return {**dataclasses.asdict(self), "ok": self.ok}


def measure() -> dict[str, Any]:
    """The contents of ``benchmarks/kernels_offline.json``."""
    pairs = [(case, capability) for case in all_cases() for capability in case.architectures]
    rows = []
    for number, (case, capability) in enumerate(pairs, 1):
        print(f"{number} of {len(pairs)}: {case.name}, sm_{capability}", file=sys.stderr)
        rows += examine(case, capability)
    return {
        "environment": environment(torch.device("cpu")) | {"command": "make kernels-offline"},
        "compilers": versions(),
        "cases": [row.as_dict() for row in rows],
        "within_limits": all(row.ok for row in rows),
    }


def examine(case: KernelCase, capability: int) -> list[Row]:
    """Compile what the case launches for one architecture and hold it against the limits."""
    rows = [_row(case, launch, capability) for launch in launches(case)]
    if capability in case.refused and not any(row.refused for row in rows):
        rows[-1].problems.append("compiles, although the case says that it cannot")
    return rows


def launches(case: KernelCase) -> list[Launch]:
    """Different kernels that the case launches, in order."""
    entry_kernels()  # imports and defines every kernel before launches are recorded
    inputs = case.make(case.offline, torch.device("cpu"))
    with recording() as recorded:
        case.run("triton", *inputs)
    return list({launch.name: launch for launch in reversed(recorded)}.values())[::-1]


def _row(case: KernelCase, launch: Launch, capability: int) -> Row:
    row = Row(case=case.name, kernel=launch.name, architecture=f"sm_{capability}")
    limit = case.limits.get(launch.name)
    try:
        facts = compile_launch(launch, capability)
    except TritonError as error:  # by the front end or, in older versions, by the assembler
        row.refused = " ".join(str(error.__cause__ or error).split())[-160:]
        if capability not in case.refused:
            row.problems.append(f"does not compile: {row.refused}")
        return row
    row.registers, row.shared, row.loops = facts.registers, facts.shared, facts.loops
    row.bytes = case.bytes
    row.spills = facts.spills + facts.stack
    row.loads, row.wide_loads = facts.loads, facts.wide_loads
    threads = facts.threads * math.prod(launch.grid) / math.prod(case.offline)
    row.pipes = {pipe: round(count * threads, 3) for pipe, count in facts.executed.items()}
    row.busiest, slots = max(_slots(row).items(), key=lambda pair: pair[1])
    row.slots = round(slots, 3)
    row.limit = None if limit is None else dataclasses.asdict(limit)
    row.problems += _problems(row, facts, limit)
    return row


def _slots(row: Row) -> dict[str, float]:
    """For how many slots of the issue each pipe is busy."""
    return {pipe: count * LANES["issue"] / LANES[pipe] for pipe, count in row.pipes.items()}


def _problems(row: Row, facts: Facts, limit: Limit | None) -> list[str]:
    found = []
    if row.spills:
        found.append(f"spills: {facts.spills} local loads and stores, {facts.stack} B of stack")
    if not all(row.loops):
        found.append("has a loop whose rounds are not known")
    if limit is None:
        return [*found, f"launches {row.kernel}, for which the case declares no limit"]
    slack = 1.0 if triton.__version__.startswith(LIMITS_FOR) else OTHER_COMPILER
    if row.registers > limit.registers * slack:
        found.append(f"{row.registers} registers > {limit.registers}")
    for pipe, slots in _slots(row).items():
        if slots > limit.slots * slack:
            found.append(f"{slots:.1f} slots per element of {pipe} > {limit.slots}")
    if row.wide_loads < limit.wide_loads:
        found.append(f"{row.wide_loads} loads of 128 bits < {limit.wide_loads}")
    return found


def entry_kernels() -> set[str]:
    """Kernels that are launched: those of ``kernels/triton/`` that no other one calls."""
    names = [module.name for module in pkgutil.iter_modules(kernels.__path__)]
    modules = [importlib.import_module(f"{kernels.__name__}.{name}") for name in names]
    found: dict[str, Any] = {}
    called: set[str] = set()
    for module in modules:
        for function in vars(module).values():
            if isinstance(function, JITFunction) and function.__module__ == module.__name__:
                found[kernel_name(function)] = function
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


if __name__ == "__main__":
    RECORD.write_text(json.dumps(measure(), indent=1) + "\n")
