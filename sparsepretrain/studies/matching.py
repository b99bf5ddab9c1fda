"""Find the changes that give a row of a table the cost of another row."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from sparsepretrain.config.schema import Run
from sparsepretrain.config.validate import load
from sparsepretrain.errors import ConfigError
from sparsepretrain.studies.cells import Selection, cell_overrides
from sparsepretrain.studies.tables import Match, Scale, Table, cell_name
from sparsepretrain.tasks import build_task
from sparsepretrain.training.assembly import META, build_model
from sparsepretrain.training.cost import Cost, run_cost
from sparsepretrain.training.schedules import resolve_steps

TOLERANCE = 0.005
"""Largest relative difference between parameters that count as equal."""


def matched(
    name: str, table: Table, scale: Scale, asked: Selection
) -> dict[tuple[str, str], list[str]]:
    """Return (row, column) -> overrides that give it the cost of another row in this column.

    For all rows of ``table.match``. A tuned option of the other row is at its default.

    Raises:
        ConfigError: nothing gives the row this cost.
    """
    words = cell_overrides(name, table, scale, dataclasses.replace(asked, only="*"))
    costs: dict[tuple[str, str], tuple[Run, Cost]] = {}
    matches = {}
    for (row, column), own in words.items():
        match = table.match.get(row)
        if match is None:
            continue
        try:
            at = match.to, column
            if at not in words:
                raise ConfigError(f"match.to: {cell_name(*at)!r} does not run at scale {scale}")
            if at not in costs:
                other = resolve_steps(load(words[at], asked.config_dirs))
                costs[at] = other, run_cost(other)
            matches[row, column] = _equal(match, *costs[at], own, asked.config_dirs)
        except ConfigError as error:
            cell = cell_name(row, column)
            raise ConfigError([f"{cell}: {message}" for message in error.messages]) from error
    return matches


def _equal(
    match: Match, other: Run, cost: Cost, words: Sequence[str], config_dirs: Sequence[Path]
) -> list[str]:
    run = resolve_steps(load(words, config_dirs))
    if match.equal == "parameters":
        return _width(match, cost, run, words, config_dirs)
    samples = other.steps * other.batch.size
    steps = samples / run.batch.size
    if match.equal == "flops":
        this = run_cost(run)
        steps = cost.flops / this.flops * run.steps
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

    wanted = match.factor * (cost.parameters - cost.entries + cost.nonzero)
    narrowest = parameters(1)
    per_neuron = parameters(2) - parameters(1)
    width = 1 + round((wanted - narrowest) / per_neuron)
    if width < 1 or abs(parameters(width) - wanted) > TOLERANCE * wanted:
        closest = parameters(max(width, 1))
        raise ConfigError(
            f"model.n_inner: expected {wanted:,.0f} parameters, the nonzero ones of {match.to}; an "
            f"FFN of width {max(width, 1)} gives {closest:,}. No width is closer: match flops or "
            "tokens, or use a larger model"
        )
    return changed(width)
