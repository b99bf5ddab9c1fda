"""Timer, result type and command line of all benchmark scripts.

Machines are noisy: only times of one round in one process are compared, as the median of their
ratio over rounds.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from sparsepretrain.files import write_atomic
from sparsepretrain.kernels.timing import Series, measure

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
ON_CPU = ("cpu", "documents", "transposable")
"""Scripts that measure on a CPU, at full size."""
TOLERANCE = 1e-2
"""Largest relative error of a matmul: two roundings to bf16."""


@dataclass(slots=True, kw_only=True)
class Case:
    """One measured number with its details."""

    name: str
    value: float | None = None
    """None: not measured, for the reason in `status`."""
    unit: str = "µs"
    at_most: float | None = None
    """Goal of the project; likewise ``at_least``."""
    at_least: float | None = None
    status: str = "ok"
    """`ok`, or `skipped`, `wrong` or `failed` and the reason."""
    detail: dict[str, Any] = field(default_factory=dict)
    """Further metrics: rounds, spread, error, ratios."""

    @property
    def ok(self) -> bool | None:
        """True if the limit is kept; None without a limit or a value."""
        if self.is_error:
            return False
        if self.value is None:
            return None
        if self.at_most is not None:
            return self.value <= self.at_most
        return None if self.at_least is None else self.value >= self.at_least

    @property
    def is_error(self) -> bool:
        """True if the result is wrong, or the work failed."""
        return self.status.startswith(("wrong", "failed"))

    def as_dict(self) -> dict[str, Any]:
        """Return the case as JSON values."""
        return {**dataclasses.asdict(self), "ok": self.ok}


Work = Callable[[], Iterable[Case]]
"""Measures some cases."""


@dataclass(frozen=True, slots=True)
class Options:
    """Choices of the command line that decide what is measured."""

    quick: bool = False
    methods: tuple[str, ...] = ()
    """Names of methods; empty: the script's own choice."""
    sparse_matmuls: str = "emulate"
    fp8: bool = False

    @property
    def label(self) -> str:
        """Suffix for the name of a case."""
        label = ", fp8" if self.fp8 else ""
        if self.sparse_matmuls != "emulate":
            label += f", sparse_matmuls={self.sparse_matmuls}"
        return label

    def precision(self, device: torch.device) -> dict[str, str] | None:
        """Return the `precision` argument of `sparsify`; a CPU simulates fp8."""
        if not self.fp8:
            return None
        recipe = "hybrid" if self.sparse_matmuls == "emulate" else "e4m3"
        return {"name": "fp8" if device.type == "cuda" else "fp8_sim", "recipe": recipe}


def interleave(
    works: Mapping[str, Callable[[], Any]],
    rounds: int,
    *,
    device: torch.device = CPU,
    warmup: int = 2,
) -> dict[str, Series]:
    """Time every work once per round, in an order that rotates.

    On a CUDA device works are captured in graphs and timed by events unless they synchronize;
    elsewhere the CPU clock counts.
    """
    if device.type == "cuda":
        return measure({name: [work] for name, work in works.items()}, rounds=rounds)
    names = list(works)
    us: dict[str, list[float]] = {name: [] for name in names}
    for index in range(-warmup, rounds):
        shift = index % len(names)
        for name in names[shift:] + names[:shift]:
            started = time.perf_counter()
            works[name]()
            if index >= 0:
                us[name].append(1e6 * (time.perf_counter() - started))
    return {name: Series(us=us[name], mode="eager") for name in names}


def ratios(over: Series, under: Series) -> list[float]:
    """Return ``over / under`` of every round."""
    return [a / b for a, b in zip(over.us, under.us, strict=True)]


def ratio(name: str, over: Series, under: Series, at_most: float | None = None) -> Case:
    """Return the median of ``over / under`` over rounds, with quartiles and both medians."""
    found = sorted(ratios(over, under))
    quarter = len(found) // 4
    detail = {
        "rounds": len(found),
        "quartiles": [found[quarter], found[-1 - quarter]],
        "median_seconds": [statistics.median(series.us) / 1e6 for series in (over, under)],
    }
    value = statistics.median(found)
    return Case(name=name, value=value, unit="×", at_most=at_most, detail=detail)


def timed(name: str, series: Series, others: Mapping[str, Series], **detail: Any) -> Case:
    """Return the median time and the speed relative to `others` in the same rounds."""
    ordered = sorted(series.us)
    last = len(ordered) - 1
    found = {
        "p10": ordered[round(0.1 * last)],
        "p50": statistics.median(ordered),
        "p90": ordered[round(0.9 * last)],
        "rounds": len(ordered),
    }
    speed = {k: statistics.median(ratios(theirs, series)) for k, theirs in others.items()}
    detail = {**found, "mode": series.mode, "times_as_fast_as": speed, **detail}
    return Case(name=name, value=found["p50"], detail=detail)


def fresh(values: Any) -> Any:
    """Return copies with equal strides, for operations that work in place."""
    return tree_map_only(Tensor, lambda t: t.clone(memory_format=torch.preserve_format), values)


def difference(got: Any, expected: Any) -> float:
    """Return the largest error over the largest expected value, or the fraction of unequal bits.

    Infinite if shapes, dtypes or the positions of NaNs differ.
    """
    if isinstance(expected, list | tuple):
        return max((difference(g, e) for g, e in zip(got, expected, strict=True)), default=0.0)
    if got.shape != expected.shape or got.dtype != expected.dtype:
        return float("inf")
    if not expected.numel():
        return 0.0
    if not expected.is_floating_point():
        return (got != expected).double().mean().item()
    a, b = got.float(), expected.float()
    if not torch.equal(a.isnan(), b.isnan()):
        return float("inf")
    same = (a == b) | a.isnan()
    largest = b.nan_to_num(0.0, 0.0, 0.0).abs().max().clamp_min(torch.finfo(b.dtype).tiny)
    return torch.where(same, 0.0, (a - b).abs() / largest).max().item()


def needs_gpu(name: str) -> list[Case]:
    """Return the case of a work that a machine without a GPU cannot do."""
    return [Case(name=name, status="skipped: needs a CUDA GPU")]


def reason(error: Exception) -> str:
    """Return an error in one line."""
    return " ".join(str(error).split())[:160] or type(error).__name__


def attempt(name: str, work: Work) -> list[Case]:
    """Measure; errors become cases, so that the next work is measured too."""
    try:
        return [*work()]
    except torch.OutOfMemoryError:
        return [Case(name=name, status="skipped: out of memory")]
    except Exception as error:
        return [Case(name=name, status=f"failed: {reason(error)}")]


def main(
    script: str,
    works: Callable[[Options], Mapping[str, Work]],
    arguments: list[str] | None = None,
    *,
    methods: bool = False,
) -> int:
    """Measure, print and write JSON after every case.

    Args:
        script: name of the script in the results.
        works: returns name -> work, in order.
        arguments: None: arguments of the process.
        methods: offer the choice of methods, sparse matmuls and fp8.

    Returns:
        1 if a case is wrong, failed or (without ``--quick``) misses its limit, else 0.
    """
    parser = argparse.ArgumentParser(prog=f"benchmarks/{script}.py")
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="write the results here")
    parser.add_argument("--quick", action="store_true", help="few rounds: does the script run?")
    parser.add_argument("--only", default="*", metavar="GLOB", help="cases with such a name")
    parser.add_argument("--budget", type=float, metavar="S", help="begin no case after S seconds")
    if methods:
        parser.add_argument("--methods", default="", metavar="A,B", help="these, and dense")
        parser.add_argument("--sparse-matmuls", default="emulate", choices=["emulate", "auto"])
        parser.add_argument("--fp8", action="store_true", help="sparse layers multiply in fp8")
    given = parser.parse_args(arguments)
    options = Options(given.quick)
    if methods:
        names = tuple(filter(None, given.methods.split(",")))
        options = Options(given.quick, names, given.sparse_matmuls, given.fp8)
    if not torch.cuda.is_available() and script not in ON_CPU:
        print("no CUDA GPU: tiny sizes only", flush=True)
    chosen = {k: work for k, work in works(options).items() if fnmatch(k, given.only)}
    if given.out is not None:  # fail before minutes are spent
        given.out.parent.mkdir(parents=True, exist_ok=True)
    words = sys.argv[1:] if arguments is None else arguments
    cases = measure_all(chosen, header(script, words, options.quick), given.out, given.budget)
    return int(any(c.is_error or (c.ok is False and not options.quick) for c in cases))


def measure_all(
    works: Mapping[str, Work], head: dict[str, Any], out: Path | None, budget: float | None
) -> list[Case]:
    """Measure every work in turn; the file is complete after every case."""
    started, cases = time.monotonic(), list[Case]()
    for index, (name, work) in enumerate(works.items()):
        late = budget is not None and time.monotonic() - started > budget
        left = f"the last {len(works) - index} of {len(works)}"
        over = [Case(name=left, status=f"skipped: {budget} s are over")]
        cases += (found := over if late else attempt(name, work))
        for case in found:
            print(describe(case.as_dict()), flush=True)
        write_results(out, head, cases)
        if late:
            break
    return cases


def write_results(out: Path | None, head: dict[str, Any], cases: Iterable[Case]) -> None:
    """Write a results file, which is there as a whole or not at all."""
    if out is not None:
        result = {**head, "cases": [case.as_dict() for case in cases]}
        write_atomic(out, json.dumps(result, indent=1) + "\n")


def describe(case: dict[str, Any]) -> str:
    """Return a case of a results file as one line."""
    if case["value"] is None:
        return f"{case['name']}: {case['status']}"
    digits = ".4g" if abs(case["value"]) < 1e4 else ",.0f"
    text = f"{case['name']}: {case['value']:{digits}} {case['unit']}"
    speed = case["detail"].get("times_as_fast_as", {})
    text += "".join(f", {times:.2f}× {other}" for other, times in speed.items())
    for key, sign in (("at_most", "≤"), ("at_least", "≥")):
        if case[key] is not None:
            missed = ", missed" if case["ok"] is False else ""
            text += f" ({sign} {case[key]:g}{missed})"
    return text if case["status"] == "ok" else f"{text}, {case['status']}"


def header(script: str, words: list[str], quick: bool) -> dict[str, Any]:
    """Return command, versions, commit and hardware."""
    from sparsepretrain.config.compose import shell_line
    from sparsepretrain.training.hardware import environment

    cuda = torch.cuda.is_available()
    command = shell_line(["python", f"benchmarks/{script}.py", *words])
    found = environment(CUDA if cuda else CPU) | {"command": command}
    return {"script": script, "quick": quick, "environment": found, "gpu": gpu() if cuda else None}


def gpu() -> dict[str, Any]:
    """Return driver, clocks and power of the CUDA device; nothing is set."""
    from sparsepretrain.kernels.cusparselt.packed24 import version

    uuid = torch.cuda.get_device_properties(torch.cuda.current_device()).uuid
    fields = "driver_version,clocks.sm,clocks.mem,clocks.max.sm,power.draw,power.limit"
    # by UUID: nvidia-smi ignores CUDA_VISIBLE_DEVICES
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader", f"--id=GPU-{uuid}"]
    found = {"cuda": torch.version.cuda, "cusparselt": version()}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return found
    values = map(str.strip, done.stdout.split(","))
    return found | dict(zip(fields.split(","), values, strict=False))
