"""Kernels against the reference, other formulations and a device copy (``suite=kernels``).

An implementation is compared with the reference before it is timed: a wrong one gets no time.
Where there is no CUDA device the Triton cases are listed as skipped and the references run on
small inputs, to see that the suite works.
"""

from __future__ import annotations

import contextlib
import functools
import math
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from sparsepretrain.bench import gpu
from sparsepretrain.bench.kernel_cases import TINY, KernelCase, Shape, kernel_cases
from sparsepretrain.bench.timing import interleaved

OURS, REFERENCE, COMPILED, COPY = "triton", "reference", "compiled reference", "device copy"
SHADES = {OURS: "0.25", COMPILED: "0.6", REFERENCE: "0.8"}
"""Of bars, readable in grey."""
SKIPPED = "skipped: needs a CUDA GPU"
ROUNDS = 25
CUDA = torch.device("cuda")


@dataclass(slots=True, kw_only=True)
class Timed:
    """One implementation of one case on one shape."""

    case: str
    shape: list[int]
    impl: str
    status: str = "ok"
    """``ok``, ``wrong`` (no time then), or ``skipped: …`` and ``failed: …`` with the reason."""
    mode: str = ""
    max_err: float | None = None
    """Largest difference from the reference over the largest value; None: nothing to compare."""
    us: dict[str, float] | None = None
    bytes: float = 0.0
    """What an ideal kernel moves."""
    frac_of_copy: float | None = None
    goal: float | None = None
    """Smallest fraction of the copy's bandwidth."""
    goal_us: float | None = None
    ratio_to: dict[str, float] = field(default_factory=dict)
    """How many times faster than another implementation: median of the ratios of the rounds."""

    @property
    def name(self) -> str:
        """Case, shape and implementation."""
        return full_name(self.case, self.shape, self.impl)

    @property
    def ok(self) -> bool | None:
        """Whether the goal is kept; None without one, or without a GPU."""
        if self.status.startswith(("wrong", "failed")):
            return False
        if self.us is None:
            return None
        if self.goal_us is not None:
            return self.us["p50"] <= self.goal_us
        return None if self.goal is None or self.frac_of_copy is None else (
            self.frac_of_copy >= self.goal
        )  # fmt: skip

    @property
    def value_text(self) -> str:
        """Time and fraction of the copy, or why there is none."""
        if self.us is None:
            return self.status
        share = "" if self.frac_of_copy is None else f", {100 * self.frac_of_copy:.0f}% of copy"
        return f"{self.us['p50']:.3g} µs{share}"

    @property
    def limit_text(self) -> str:
        """The goal."""
        if self.goal_us is not None:
            return f"≤ {self.goal_us:g} µs"
        return "" if self.goal is None else f"≥ {100 * self.goal:g}% of copy"

    def as_dict(self) -> dict[str, Any]:
        """For the JSON."""
        return {**asdict(self), "ok": self.ok}


Work = Callable[[], list[Timed]]
"""Measures one case of a suite."""


def skipped(case: str, shape: list[int], why: str = SKIPPED) -> Timed:
    """A case that is not measured here, in any size or variant."""
    return Timed(case=case, shape=shape, impl="", status=why)


def failure(error: Exception) -> str:
    """Status of a case that ended in ``error``."""
    return f"failed: {' '.join(str(error).split())[:160]}"


def full_name(case: str, shape: list[int], impl: str) -> str:
    """What results are known by."""
    return ", ".join(filter(None, [case, "×".join(map(str, shape)), impl]))


def cases(quick: bool) -> list[Work]:
    """All cases on all their shapes, small ones last; without a GPU on a tiny one."""
    timed = kernel_cases()
    if not torch.cuda.is_available():
        return [functools.partial(on_cpu, case) for case in timed]
    rounds = 5 if quick else ROUNDS
    pairs = [
        (case, shape)
        for case in timed
        for shape in list(case.shapes.values())[: 1 if quick else None]
    ]
    pairs.sort(key=lambda pair: -math.prod(pair[1]))
    return [functools.partial(on_gpu, case, shape, rounds) for case, shape in pairs]


def on_cpu(case: KernelCase) -> list[Timed]:
    """Reference and other formulations on a small input; the kernel itself is skipped."""
    device = torch.device("cpu")
    inputs = case.make(TINY, device)
    expected = case.run("reference", *_fresh(inputs))
    works: dict[str, Callable[..., Any]] = {
        REFERENCE: functools.partial(case.run, "reference"),
        **case.others,
    }
    shape = list(TINY)
    goals: dict[str, Any] = {"goal": case.goal, "goal_us": case.goal_us}
    results = [Timed(case=case.name, shape=shape, impl=OURS, status=SKIPPED, **goals)]
    right: dict[str, Callable[[], object]] = {}
    for impl, work in works.items():
        error = difference(work(*_fresh(inputs)), expected)
        result = Timed(case=case.name, shape=shape, impl=impl, max_err=error)
        results.append(result)
        if error > max(case.tolerance, 1e-2 if impl in case.others else 0.0):
            result.status = "wrong"
        else:
            right[impl] = functools.partial(work, *inputs)
    seconds = interleaved(right, rounds=3, warmup=1)
    for result in results:
        if result.impl in seconds:
            us = [1e6 * s for s in seconds[result.impl]]
            result.us = gpu.Series(us=us, mode="eager").percentiles()
            result.mode = "eager"
    return results


def on_gpu(case: KernelCase, shape: Shape, rounds: int, device: torch.device = CUDA) -> list[Timed]:
    """Check every implementation, then time the right ones in interleaved rounds."""
    inputs = case.make(shape, device)
    expected = case.run("reference", *_fresh(inputs))

    def reference(*args: Any) -> Any:
        return case.run("reference", *args)

    works: dict[str, Callable[..., Any]] = {
        OURS: functools.partial(case.run, OURS),
        REFERENCE: reference,
    }
    if case.goal is not None or case.goal_us is not None:  # compiling takes seconds
        works[COMPILED] = torch.compile(reference, dynamic=False)
    works |= case.others
    ideal = case.bytes * shape[0] * shape[1]
    results = {
        impl: Timed(case=case.name, shape=list(shape), impl=impl, bytes=ideal) for impl in works
    }
    results[OURS].goal, results[OURS].goal_us = case.goal, case.goal_us
    sets = [inputs]
    for _ in range(1, gpu.copies_for(gpu.size_of(inputs), rotate=case.rotate)):
        sets.append(_fresh(inputs))
    right: dict[str, gpu.Calls] = {COPY: gpu.device_copy(device)}
    for impl, work in works.items():
        if _is_right(results[impl], case, work, inputs, expected):
            right[impl] = [functools.partial(work, *one) for one in sets]
    del expected
    try:
        _fill(results, gpu.measure(right, rounds=rounds))
    except RuntimeError as error:
        for impl in results.keys() & right.keys():
            results[impl].status = failure(error)
    torch._dynamo.reset()
    return list(results.values())


def _is_right(
    result: Timed, case: KernelCase, work: Callable[..., Any], inputs: Any, expected: Any
) -> bool:
    try:
        first, again = work(*_fresh(inputs)), work(*_fresh(inputs))
    except Exception as error:  # another formulation that does not run must not end the suite
        result.status = failure(error)
        return False
    result.max_err = difference(first, expected)
    # other formulations may round elsewhere, or break ties elsewhere
    allowed = case.tolerance if result.impl == OURS else max(case.tolerance, 1e-2)
    if not result.max_err <= allowed or (result.impl == OURS and difference(first, again) != 0):
        result.status = "wrong"
        return False
    return True


def _fill(results: dict[str, Timed], series: dict[str, gpu.Series]) -> None:
    copy = gpu.bandwidth(series[COPY])
    for impl, result in results.items():
        if impl not in series:
            continue
        times = series[impl].us
        result.us, result.mode = series[impl].percentiles(), series[impl].mode
        shares = [result.bytes / us / rate for us, rate in zip(times, copy, strict=True)]
        result.frac_of_copy = statistics.median(shares)
        if impl == OURS:
            result.ratio_to = {
                other: statistics.median(b / a for a, b in zip(times, s.us, strict=True))
                for other, s in series.items()
                if other not in (OURS, COPY)
            }


def _fresh(values: Any) -> Any:
    """Copies with the same strides: some operations work in place."""
    return tree_map_only(Tensor, lambda t: t.clone(memory_format=torch.preserve_format), values)


def difference(got: Any, expected: Any) -> float:
    """Largest error over the largest expected magnitude; for masks the share that differs.

    Infinite where shapes or types differ, or NaNs stand in different places.
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


def draw(result: dict[str, Any], path: Path) -> None:
    """Bars with goals as ticks: fraction of the copy; speed over the yardstick in other suites."""
    rows, label = result["cases"], "ideal bytes ÷ time ÷ bandwidth of a device copy"
    values = [row["frac_of_copy"] for row in rows]
    if result["suite"] != "kernels":
        values = [next(iter(row["ratio_to"].values()), None) for row in rows]
        label = f"times as fast as {', '.join({k for row in rows for k in row['ratio_to']})}"
    bars = [(row, value) for row, value in zip(rows, values, strict=True) if value is not None]
    if not bars:
        return
    with contextlib.suppress(ImportError):
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot

        figure, axes = pyplot.subplots(figsize=(9, 1 + 0.22 * len(bars)))
        for place, (row, value) in enumerate(bars):
            us = row["us"]
            shade = SHADES.get(row["impl"], "0.9")
            axes.barh(place, value, color=shade, edgecolor="black", linewidth=0.4)
            ends = [value * us["p50"] / us[p] for p in ("p90", "p10")]
            axes.plot(ends, [place, place], color="black", linewidth=0.8)
            if row["goal"] is not None:
                axes.plot([row["goal"]] * 2, [place - 0.45, place + 0.45], color="red")
        labels = [full_name(row["case"], row["shape"], row["impl"]) for row, _ in bars]
        axes.set_yticks(range(len(bars)), labels, fontsize=6)
        axes.invert_yaxis()
        axes.axvline(1.0, color="black", linewidth=0.8)
        axes.set_xlabel(f"{label} (line: p10–p90; tick: goal)")
        environment = result["environment"]
        device = environment["hardware"]["device"]
        torch_version = environment["packages"].get("torch")
        axes.set_title(f"{device}, torch {torch_version}, {environment['commit']}", fontsize=8)
        figure.tight_layout()
        figure.savefig(path, dpi=150)
        pyplot.close(figure)
