"""Cost of a run: parameters, and FLOPs with sparse matmuls at half the price."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from sparsepretrain.config.schema import Run
from sparsepretrain.errors import ConfigError
from sparsepretrain.sparsity.method import Method, enter
from sparsepretrain.tasks import build_task
from sparsepretrain.training.assembly import META, build_model, layer_inputs, sparsify_model
from sparsepretrain.training.plan import step_cost
from sparsepretrain.training.precision import compute_dtype
from sparsepretrain.training.speedup import matmul_flops


class Cost(NamedTuple):
    """Cost of a whole run."""

    sparse_matmuls: float  # per sparse layer, of three; 2:4 or fewer nonzeros, mean over the steps
    flops: float  # if each of these matmuls costs half a dense one
    parameters: int
    entries: int  # parameters without embeddings
    nonzero: int  # of the entries, at the end


def run_cost(run: Run, lines: Sequence[Mapping[str, Any]] | None = None) -> Cost:
    """Return the cost of a run.

    Args:
        run: its number of steps is known.
        lines: record of the finished run, whose training lines say which steps were sparse; None:
            the method's schedule says it.

    Raises:
        ConfigError: ``lines`` is None, and the optimizer decides when training is sparse.
    """
    task = build_task(run)
    model = build_model(task, META)
    flops, _, _ = step_cost(run, task, model)
    inputs = layer_inputs(run, task, model)
    sparsifier = sparsify_model(run, task, model)
    method, dtype = sparsifier.method, compute_dtype(run.precision)
    micro_batches = run.batch.size // run.batch.micro
    layers = matmul_flops(sparsifier, inputs, micro_batches, dtype, flops).layers
    known = _planned(run, method) if lines is None else lines
    logged = [line for line in known if line.get("sparse") is not None]
    # A line tells the phase of the steps up to the next line; changes of phase have lines.
    bounds = [0, *(line["step"] for line in logged[1:]), run.steps]
    count = saved = 0.0
    for line, (begin, end) in zip(logged, pairwise(bounds), strict=True):
        enter(method, line["step"])
        # an optimizer may decide the phase: the record knows, a new method does not
        row = method.sparse_row if method.scalars else method.phase.row
        halved = row.halved if line["sparse"] else []
        count += (end - begin) * len(halved)
        saved += (end - begin) * sum(layers[name] for name in halved) / 2
    enter(method, run.steps)
    ends_sparse = bool(logged[-1]["sparse"]) if method.scalars else method.phase.evaluation
    coverage = sparsifier.coverage()
    total = coverage.total_parameters
    entries = total - sum(math.prod(shape) for shape in coverage.embeddings.values())
    kept, of = method.sparse_row.A.pattern or (1, 1)
    zeros = coverage.sparse_parameters * (of - kept) // of if ends_sparse else 0
    return Cost(count / run.steps, run.steps * flops - saved, total, entries, entries - zeros)


def _planned(run: Run, method: Method) -> list[dict[str, Any]]:
    """Return a line for the first step and for each change of phase."""
    if method.scalars:
        raise ConfigError(
            f"sparsity: the optimizer decides when {method.options.name} is sparse, so its cost is "
            "known after the run only"
        )
    lines: list[dict[str, Any]] = []
    before = None
    for step in range(run.steps):
        enter(method, step)
        phase = method.phase
        if (phase.training, phase.row) != before:
            lines.append({"step": step, "sparse": phase.training})
            before = phase.training, phase.row
    return lines
