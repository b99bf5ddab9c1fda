"""Cost of a run, and the changes that give another run the same cost."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from sparsepretrain.config.cells import cell_overrides
from sparsepretrain.config.schema import Run
from sparsepretrain.config.tables import Match, Scale, Table
from sparsepretrain.config.validate import load
from sparsepretrain.errors import ConfigError
from sparsepretrain.sparsity.method import Method, enter
from sparsepretrain.tasks import build_task
from sparsepretrain.training.assembly import META, build_model, layer_inputs, sparsify_model
from sparsepretrain.training.plan import step_cost
from sparsepretrain.training.precision import compute_dtype
from sparsepretrain.training.schedules import resolve_steps
from sparsepretrain.training.speedup import matmul_flops

TOLERANCE = 0.005
"""Largest relative difference between parameters that count as equal."""


class Cost(NamedTuple):
    """Cost of a whole run."""

    sparse_matmuls: float  # per sparse layer, of three; 2:4 or fewer nonzeros, mean over the steps
    flops: float  # if each of these matmuls costs half a dense one
    parameters: int
    entries: int  # parameters without embeddings
    nonzero: int  # of the entries, at the end

    @property
    def nonzero_parameters(self) -> int:
        """Nonzero parameters at the end, with embeddings."""
        return self.parameters - self.entries + self.nonzero


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


def matched(
    name: str,
    table: Table,
    scale: Scale,
    overrides: Sequence[str] = (),
    config_dirs: Sequence[Path] = (),
) -> dict[str, list[str]]:
    """Return row -> overrides that give it the cost of another row, for all of ``table.match``.

    The arguments are those of :func:`cells.cells`. A tuned option of the other row is at its
    default.

    Raises:
        ConfigError: nothing gives the row this cost.
    """
    words = cell_overrides(name, table, scale, "*", overrides)
    costs: dict[str, tuple[Run, Cost]] = {}
    found = {}
    for row, match in table.match.items():
        if (row, "") not in words:
            continue
        try:
            if (match.to, "") not in words:
                raise ConfigError(f"match.to: {match.to!r} does not run at scale {scale}")
            if match.to not in costs:
                other = resolve_steps(load(words[match.to, ""], config_dirs))
                costs[match.to] = other, run_cost(other)
            found[row] = _equal(match, *costs[match.to], words[row, ""], config_dirs)
        except ConfigError as error:
            raise ConfigError([f"{row}: {message}" for message in error.messages]) from error
    return found


def _equal(
    match: Match, other: Run, cost: Cost, words: Sequence[str], config_dirs: Sequence[Path]
) -> list[str]:
    run = resolve_steps(load(words, config_dirs))
    if match.equal == "parameters":
        return _width(match, cost, run, words, config_dirs)
    samples = other.steps * other.batch.size
    steps = samples / run.batch.size
    if match.equal == "flops":
        own = run_cost(run)
        steps = cost.flops / own.flops * run.steps
    if (whole := round(match.factor * steps)) < 1:
        raise ConfigError(f"steps: expected at least one step with the {match.equal} of {match.to}")
    return [f"steps={whole}"]


def _width(
    match: Match, cost: Cost, run: Run, words: Sequence[str], config_dirs: Sequence[Path]
) -> list[str]:
    """Return the FFN width whose parameters are closest to the nonzero ones of the other run."""
    if not hasattr(run.model, "n_inner"):
        raise ConfigError(
            f"model: expected a model with n_inner, whose FFN can be narrower, got {run.model.name}"
        )

    def changed(width: int) -> list[str]:
        return [f"model.n_inner={width}", "model.ffn_factor=1"]

    def parameters(width: int) -> int:
        model = build_model(build_task(load([*words, *changed(width)], config_dirs)), META)
        return sum(p.numel() for p in model.parameters())

    wanted = match.factor * cost.nonzero_parameters
    narrowest, per_neuron = parameters(1), parameters(2) - parameters(1)
    width = 1 + round((wanted - narrowest) / per_neuron)
    if width < 1 or abs(parameters(width) - wanted) > TOLERANCE * wanted:
        closest = parameters(max(width, 1))
        raise ConfigError(
            f"model.n_inner: expected {wanted:,.0f} parameters, the nonzero ones of {match.to}; an "
            f"FFN of width {max(width, 1)} gives {closest:,}. No width is closer: match flops or "
            "tokens, or use a larger model"
        )
    return changed(width)
