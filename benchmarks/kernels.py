"""Time kernels against the reference, other formulations and a device copy.

An implementation is compared with the reference before it is timed: a wrong one gets no time.
Inputs rotate over three times the L2 cache. Without a GPU the Triton kernels are skipped, and the
references run on small inputs.
"""

from __future__ import annotations

import functools
import math
import statistics
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from harness import (
    CPU,
    CUDA,
    NEEDS_GPU,
    Case,
    Options,
    Work,
    difference,
    failure,
    fresh,
    interleave,
    main,
    timed,
)
from kernel_cases import TINY, KernelCase, Shape, kernel_cases
from sparsepretrain.kernels.timing import Calls, Series, measure

OURS, REFERENCE, COMPILED, COPY = "triton", "reference", "compiled reference", "device copy"
ROUNDS = 25
COLD = 3
"""Size of all sets of inputs, in L2 caches."""
COPY_BYTES = 1 << 30
ROUNDING = 1e-2
"""Largest error of other formulations, which may round or break ties elsewhere."""


def works(options: Options) -> dict[str, Work]:
    """Name every case on every shape, small shapes last; without a GPU on a tiny one."""
    timed_cases = kernel_cases()
    if not torch.cuda.is_available():
        return {case.name: functools.partial(on_cpu, case) for case in timed_cases}
    rounds = 5 if options.quick else ROUNDS
    pairs = [
        (case, shape)
        for case in timed_cases
        for shape in list(case.shapes.values())[: 1 if options.quick else None]
    ]
    pairs.sort(key=lambda pair: -math.prod(pair[1]))
    return {title(*pair): functools.partial(on_gpu, *pair, rounds) for pair in pairs}


def title(case: KernelCase, shape: Shape) -> str:
    """Return the name of a case on one shape."""
    return f"{case.name}, {'×'.join(map(str, shape))}"


def on_cpu(case: KernelCase) -> list[Case]:
    """Time the reference and other formulations on a small input."""
    name, inputs = title(case, TINY), case.make(TINY, CPU)
    expected = case.run("reference", *fresh(inputs))
    runs: dict[str, Callable[..., Any]] = {REFERENCE: functools.partial(case.run, REFERENCE)}
    runs |= case.others
    checked = {impl: check(case, impl, run, inputs, expected) for impl, run in runs.items()}
    right = {i: functools.partial(runs[i], *inputs) for i, (_, why) in checked.items() if not why}
    series = interleave(right, 3, warmup=1)
    skipped = Case(name=f"{name}, {OURS}", status=NEEDS_GPU)
    return [skipped, *report(case, name, checked, series)]


def on_gpu(case: KernelCase, shape: Shape, rounds: int, device: torch.device = CUDA) -> list[Case]:
    """Check every implementation, then time the right ones in interleaved rounds."""
    inputs = case.make(shape, device)
    expected = case.run("reference", *fresh(inputs))
    reference = functools.partial(case.run, REFERENCE)
    runs: dict[str, Callable[..., Any]] = {
        OURS: functools.partial(case.run, OURS),
        REFERENCE: reference,
    }
    if case.goal is not None:  # compiling takes seconds
        runs[COMPILED] = torch.compile(lambda *args: reference(*args), dynamic=False)
    runs |= case.others
    checked = {impl: check(case, impl, run, inputs, expected) for impl, run in runs.items()}
    del expected
    copies = copies_for(size_of(inputs))
    sets = [inputs, *(fresh(inputs) for _ in range(copies - 1))]
    right: dict[str, Calls] = {COPY: device_copy(device)}
    for impl, (_, why) in checked.items():
        if not why:
            right[impl] = [functools.partial(runs[impl], *one) for one in sets]
    series = measure(right, rounds=rounds)
    torch._dynamo.reset()
    ideal = case.bytes * shape[0] * shape[1]
    return report(case, title(case, shape), checked, series, ideal)


def check(
    case: KernelCase, impl: str, run: Callable[..., Any], inputs: Any, expected: Any
) -> tuple[float | None, str]:
    """Return the error against the reference, and why the implementation gets no time, or ""."""
    try:
        first, again = run(*fresh(inputs)), run(*fresh(inputs))
    except Exception as raised:  # other formulations must not end the case
        return None, failure(raised)
    error = difference(first, expected)
    allowed = case.tolerance if impl == OURS else max(case.tolerance, ROUNDING)
    if not error <= allowed:
        return error, f"wrong: differs from the reference by {error:.3g}"
    if impl == OURS and difference(first, again) != 0:
        return error, "wrong: another result in a second call"
    return error, ""


def report(
    case: KernelCase,
    name: str,
    checked: Mapping[str, tuple[float | None, str]],
    series: Mapping[str, Series],
    ideal: float | None = None,
) -> list[Case]:
    """Return a case per implementation, and one for the goal as a fraction of a copy.

    Args:
        case: has the goals.
        name: of the case on its shape.
        checked: see `check`.
        series: times of those that are right, and of a device copy.
        ideal: bytes that an ideal kernel moves; None: nothing was copied.
    """
    found = []
    for impl, (error, why) in checked.items():
        if why:
            status = Case(name=f"{name}, {impl}", status=why, detail={"max_err": error})
            found.append(status)
            continue
        detail: dict[str, Any] = {"max_err": error}
        if ideal is not None:
            times = zip(series[COPY].us, series[impl].us, strict=True)
            shares = [ideal / us / (2 * COPY_BYTES / copy) for copy, us in times]
            detail |= {"bytes": ideal, "of_copy": statistics.median(shares)}
        others = {k: s for k, s in series.items() if impl == OURS and k not in (OURS, COPY)}
        found.append(timed(f"{name}, {impl}", series[impl], others, **detail))
        if impl == OURS and case.goal is not None:
            goal, share = f"{name}, bandwidth over a device copy's", detail["of_copy"]
            found.append(Case(name=goal, value=share, unit="×", at_least=case.goal))
    return found


def copies_for(size: int) -> int:
    """Return how many sets of inputs of `size` bytes evict each other from the L2 cache."""
    cache = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
    return max(1, -(-COLD * cache // max(size, 1)))


def size_of(values: Any) -> int:
    """Return the bytes of all tensors in nested lists and tuples."""
    return sum(t.nbytes for t in tree_leaves(values) if isinstance(t, Tensor))


def device_copy(device: torch.device) -> Calls:
    """Return a large copy, the ceiling of everything that streams."""
    source = torch.randn(COPY_BYTES // 4, device=device)
    target = torch.empty_like(source)
    return [lambda: target.copy_(source)]


if __name__ == "__main__":
    sys.exit(main("kernels", works))
