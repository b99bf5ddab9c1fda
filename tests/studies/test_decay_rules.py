"""What a decay search runs and chooses, on made-up flip ratios; nothing is trained."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from tiny_runs import Tiny

from sparsepretrain.errors import ConfigError
from sparsepretrain.studies.decay import (
    DEFAULT,
    INTERVAL,
    Search,
    choose,
    log_grid,
    why_none,
    with_default,
)

SEGMENT = ("schedule.warmup=6", "steps=12", "sparsity=tsrste", "sparsity.refresh=2")


def plan(tiny: Tiny, *more: str, steps: int = 6) -> Search:
    run = tiny.load(*SEGMENT, *more)
    return Search(run, log_grid(1e-3, 1.0, 3), INTERVAL, steps)


def test_the_grid_is_even_in_the_logarithm_and_can_be_typed() -> None:
    grid = log_grid(6e-6, 1e-3, 5)
    assert grid == (6e-6, 2.16e-5, 7.75e-5, 2.78e-4, 1e-3)
    steps = [math.log(b / a) for a, b in pairwise(grid)]
    assert max(steps) - min(steps) < 0.01


def test_of_several_feasible_the_middle_one_then_the_smaller() -> None:
    found = {1e-5: 0.94, 2e-5: 0.80, 4e-5: 0.70, 8e-5: 0.61, 1.6e-4: 0.3}
    assert choose(found, INTERVAL) == 2e-5
    assert choose({1e-5: 0.875, 2e-5: 0.675}, (0.5, 1.05)) == 1e-5
    assert choose({1e-5: 0.60, 2e-5: 0.59}, INTERVAL) == 1e-5, "the bounds are feasible"
    assert choose({1e-5: 0.96, 2e-5: 0.59}, INTERVAL) is None


@pytest.mark.parametrize(
    ("found", "words"),
    [
        ({1e-5: 1.4, 1e-3: 1.1}, ["μ falls to 1.100 only", "raise the end of --grid"]),
        ({1e-5: 0.5, 1e-3: 0.1}, ["μ rises to 0.500 only", "lower the start of --grid"]),
        ({1e-5: 1.0, 1e-3: 1.0}, ["exactly like the dense run"]),
        ({1e-5: 1.3, 3e-5: 1.0, 1e-4: 0.2, 1e-3: 0.1}, ["--grid 3e-05,0.0001"]),
    ],
)
def test_the_message_without_a_feasible_decay_names_the_grid_to_try(
    found: dict[float, float], words: list[str]
) -> None:
    line = why_none(found, INTERVAL)
    assert "no λ from 1e-05 to 0.001 has μ in [0.6, 0.95]" in line
    assert all(word in line for word in words)


def test_a_run_that_diverged_above_all_others_counts_as_too_strong() -> None:
    assert "--grid 1e-05,0.0001" in why_none({1e-5: 1.2}, INTERVAL, [1e-4])
    assert "raise the end of --grid" in why_none({1e-5: 1.2}, INTERVAL, [1e-6])


@pytest.mark.parametrize(
    ("overrides", "default"),
    [
        ([], True),
        (["sparsity.refresh=5", "seed=1"], True),
        (["sparsity=srste"], False),
        (["++sparsity=srste"], False),
        (["experiment=smoke"], False),
    ],
)
def test_the_default_method(overrides: list[str], default: bool) -> None:
    assert with_default(overrides) == ([DEFAULT] if default else []) + overrides


def test_segments_are_the_run_itself_cut_short(tiny: Tiny) -> None:
    search = plan(tiny, "sparsity.mvue=none", "clip=0.5")
    segment = search.sparse(0.01)
    assert segment.run.steps == 12 and segment.run.schedule.warmup == 6, "not a run of 6 steps"
    assert segment.run.plain["sparsity"] == search.run.plain["sparsity"] | {"decay": 0.01}
    kept = ("seed", "batch", "clip", "model", "task", "data", "optim", "schedule", "runs_dir")
    assert all(segment.run.plain[key] == search.run.plain[key] for key in kept)
    assert segment.run.plain["name"] == "tune_gpt2_nano" and segment.run.plain["log"]["every"] == 1
    others = [search.sparse(0.02), search.reference()]
    assert len({s.directory for s in (segment, *others)}) == 3
    assert search.run.plain["name"] == "gpt2_nano", "what was given stays as it was"


@pytest.mark.parametrize(
    ("method", "rule", "refresh"),
    [("tsrste", "transposable", 2), ("srste", "magnitude", 1), ("bimask", "magnitude", 1)],
)
def test_the_reference_logs_the_flips_of_the_same_masks(
    tiny: Tiny, method: str, rule: str, refresh: int
) -> None:
    run = tiny.load(
        *SEGMENT[:2],
        f"sparsity={method}",
        "sparsity.window.start=0.1",
        *(["sparsity.refresh=2"] if refresh > 1 else []),
    )
    dense = Search(run, (1e-4,), INTERVAL, 6).reference().run.plain["sparsity"]
    assert dense["name"] == "dense" and dense["window"] == run.plain["sparsity"]["window"]
    assert (dense["flip_rule"], dense["refresh"]) == (rule, refresh)
    assert dense["targets"] == run.plain["sparsity"]["targets"]


def test_results_of_one_search_lie_in_one_place(tiny: Tiny) -> None:
    assert plan(tiny).out == plan(tiny, "sparsity.decay=1e-3").out
    assert (
        len({plan(tiny, *more).out for more in ((), ("seed=1",), ("sparsity.n=2", "clip=2"))}) == 3
    )


@pytest.mark.parametrize(
    ("overrides", "steps", "words"),
    [
        (["sparsity=ste"], 6, ["sparsity=ste has no decay", "tsrste or srste"]),
        ([*SEGMENT, "resume=runs/x"], 6, ["resume=runs/x", "auto or never"]),
        (SEGMENT, 0, ["schedule.warmup=0", "--steps"]),
        (SEGMENT, 13, ["--steps 13", "steps=12"]),
        ([*SEGMENT, "sparsity.refresh=7"], 6, ["no masks are compared in 6 steps", "refresh (7)"]),
        ([*SEGMENT, "sparsity.window.start=0.6"], 6, ["from step 7 to 10", "sparsity.window"]),
        ([*SEGMENT, "sparsity.window.stop=0.4"], 6, ["from step 0 to 5", "sparsity.window"]),
    ],
)
def test_what_cannot_be_searched(
    tiny: Tiny, overrides: list[str], steps: int, words: list[str]
) -> None:
    run = tiny.load(*overrides)
    with pytest.raises(ConfigError) as error:
        Search(run, (1e-4,), INTERVAL, steps)
    assert len(error.value.messages) == 1
    assert all(word in str(error.value) for word in words), str(error.value)


def test_a_mask_rule_of_its_own_is_refused(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    from sparsepretrain.sparsity.methods.srste import SRSTE

    monkeypatch.setattr(SRSTE, "mask", lambda own, weight, dim: weight > 0)
    run = tiny.load("sparsity=srste")
    with pytest.raises(ConfigError, match="sparsity=srste chooses masks by a rule of its own"):
        Search(run, (1e-4,), INTERVAL, 2)
