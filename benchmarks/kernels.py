"""Time kernels against the reference, other formulations and a device copy.

Implementations are compared with the reference first; wrong ones are not timed. Inputs rotate over
three times the L2 cache. Without a GPU only references run, on small inputs.
"""

from __future__ import annotations

import functools
import math
import statistics
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from harness import (
    CPU,
    CUDA,
    Case,
    Options,
    Work,
    difference,
    fresh,
    interleave,
    main,
    reason,
    timed,
)
from kernel_cases import TINY, KernelCase, Shape, kernel_cases
from sparsepretrain.kernels.timing import Calls, measure

OURS, REFERENCE, COMPILED, COPY = "triton", "reference", "compiled reference", "device copy"
ROUNDS = 25
COLD = 3
"""Size of all sets of inputs, in L2 caches."""
COPY_BYTES = 1 << 30
ROUNDING = 1e-2
"""Largest error of other formulations, which may round or break ties differently."""
Runs = dict[str, Callable[..., Any]]


def works(options: Options) -> dict[str, Work]:
    """Return a work per case and shape, small shapes last; without a GPU for a tiny shape."""
    if not torch.cuda.is_available():
        return {case.name: functools.partial(on_cpu, case) for case in kernel_cases()}
    rounds = 5 if options.quick else ROUNDS
    pairs = [
        (case, shape)
        for case in kernel_cases()
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
    runs: Runs = {REFERENCE: functools.partial(case.run, REFERENCE), **case.others}
    wrong, errors = check(case, name, runs, inputs)
    right = {impl: functools.partial(runs[impl], *inputs) for impl in errors}
    series = interleave(right, 3, warmup=1)
    found = [timed(f"{name}, {k}", each, {}, max_err=errors[k]) for k, each in series.items()]
    return [*found, *wrong]


def on_gpu(case: KernelCase, shape: Shape, rounds: int, device: torch.device = CUDA) -> list[Case]:
    """Check all implementations, then time the right ones in interleaved rounds."""
    name, inputs = title(case, shape), case.make(shape, device)
    reference = functools.partial(case.run, REFERENCE)
    runs: Runs = {OURS: functools.partial(case.run, OURS), REFERENCE: reference}
    if case.goal is not None:  # compiling takes seconds
        runs[COMPILED] = torch.compile(lambda *args: reference(*args), dynamic=False)
    runs |= case.others
    wrong, errors = check(case, name, runs, inputs)
    copies = copies_for(size_of(inputs))
    sets = [inputs, *(fresh(inputs) for _ in range(copies - 1))]
    calls: dict[str, Calls] = {COPY: device_copy(device)}
    for impl in errors:
        calls[impl] = [functools.partial(runs[impl], *one) for one in sets]
    series = measure(calls, rounds=rounds)
    torch._dynamo.reset()
    ideal, copy, found = case.bytes * math.prod(shape), series.pop(COPY).us, []
    for impl, each in series.items():
        others = {k: other for k, other in series.items() if impl == OURS != k}
        shares = [ideal / a / (2 * COPY_BYTES / b) for a, b in zip(each.us, copy, strict=True)]
        detail = {"max_err": errors[impl], "of_copy": statistics.median(shares)}
        found.append(timed(f"{name}, {impl}", each, others, **detail))
        if impl == OURS and case.goal is not None:
            goal = Case(name=f"{name}, bandwidth over a device copy's", unit="×")
            goal.value, goal.at_least = detail["of_copy"], case.goal
            found.append(goal)
    return [*found, *wrong]


def check(
    case: KernelCase, name: str, runs: Runs, inputs: Any
) -> tuple[list[Case], dict[str, float]]:
    """Return the wrong and failed implementations, and the errors of the right ones."""
    expected = case.run(REFERENCE, *fresh(inputs))
    wrong, errors = [], {}
    for impl, run in runs.items():
        try:
            first, again = run(*fresh(inputs)), run(*fresh(inputs))
        except Exception as raised:  # other formulations must not end the case
            wrong.append(Case(name=f"{name}, {impl}", status=f"failed: {reason(raised)}"))
            continue
        error = difference(first, expected)
        status = ""
        if not error <= (case.tolerance if impl == OURS else max(case.tolerance, ROUNDING)):
            status = f"wrong: differs from the reference by {error:.3g}"
        elif impl == OURS and difference(first, again) != 0:
            status = "wrong: another result in a second call"
        if status:
            wrong.append(Case(name=f"{name}, {impl}", status=status))
        else:
            errors[impl] = error
    return wrong, errors


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
