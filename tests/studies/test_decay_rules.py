"""What a decay search runs and chooses, on made-up flip ratios; nothing is trained."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise

import pytest
from tiny_runs import Tiny

from sparsepretrain.errors import ConfigError
from sparsepretrain.studies.decay import (
    BISECTIONS,
    DEFAULT,
    INTERVAL,
    Search,
    choose,
    in_order,
    log_grid,
    search,
    why_none,
    with_default,
)

SEGMENT = ("schedule.warmup=6", "steps=12", "sparsity=tsrste", "sparsity.refresh=2")


def falling(centre: float, steepness: float) -> Callable[[float], float]:
    """μ from 1.2 to 0.1 around ``centre``, ever steeper; the λ asked for are remembered."""
    asked: list[float] = []

    def ratio(decay: float) -> float:
        asked.append(decay)
        return 0.1 + 1.1 / (1 + (decay / centre) ** steepness)

    ratio.asked = asked  # type: ignore[attr-defined]
    return ratio


def plan(tiny: Tiny, *more: str, steps: int = 6) -> Search:
    run = tiny.load(*SEGMENT, *more)
    return Search(run, log_grid(1e-3, 1.0, 3), INTERVAL, steps)


def test_the_grid_is_even_in_the_logarithm_and_can_be_typed() -> None:
    grid = log_grid(6e-6, 1e-3, 5)
    assert grid == (6e-6, 2.16e-5, 7.75e-5, 2.78e-4, 1e-3)
    steps = [math.log(b / a) for a, b in pairwise(grid)]
    assert max(steps) - min(steps) < 0.01


def test_a_grid_that_hits_costs_no_more_than_itself() -> None:
    ratio, grid = falling(1e-4, 1.0), log_grid(6e-6, 1e-3, 5)
    found = search(ratio, grid, INTERVAL)
    assert ratio.asked == list(grid) == list(found)  # type: ignore[attr-defined]
    # 0.719 and 0.391: one is inside
    assert choose(found, INTERVAL) == 7.75e-5


def test_a_jump_over_the_interval_is_bisected_in_the_logarithm() -> None:
    ratio, grid = falling(5e-5, 8.0), log_grid(6e-6, 1e-3, 5)
    found = search(ratio, grid, INTERVAL)
    extra = ratio.asked[5:]  # type: ignore[attr-defined]
    assert extra[0] == pytest.approx(math.sqrt(2.16e-5 * 7.75e-5), rel=1e-2)
    assert 1 <= len(extra) <= BISECTIONS and list(found) == sorted(found)
    chosen = choose(found, INTERVAL)
    assert chosen == extra[-1] and INTERVAL[0] <= found[chosen] <= INTERVAL[1]


def test_bisections_are_bounded_and_a_cliff_is_reported() -> None:
    asked = []

    def cliff(decay: float) -> float:
        asked.append(decay)
        return 1.3 if decay < 5e-5 else 0.2

    found = search(cliff, (1e-5, 1e-4), INTERVAL)
    assert len(asked) == 2 + BISECTIONS and choose(found, INTERVAL) is None
    assert "jumps from 1.300 at" in why_none(found, INTERVAL)
    below, above = [d for d in found if d < 5e-5], [d for d in found if d > 5e-5]
    assert above[0] / below[-1] < 10 ** (1 / 2**BISECTIONS) * 1.02


def test_a_rising_jump_is_bisected_as_well_and_called_out_of_order() -> None:
    found = search(lambda decay: 0.3 if decay < 2e-5 else 1.2, (1e-5, 1e-4), INTERVAL)
    assert len(found) > 2 and choose(found, INTERVAL) is None
    assert not in_order(found, INTERVAL)


def test_a_failure_is_left_out_or_counts_as_too_large() -> None:
    """Of all λ the largest diverge; one that failed among others says nothing."""

    def ratio(decay: float) -> float:
        return math.nan if decay > 3e-4 else 1.3 - 2e3 * decay

    found = search(ratio, (1e-5, 1e-3), INTERVAL)
    assert choose(found, INTERVAL) is not None and math.isnan(found[1e-3])
    assert in_order(found, INTERVAL)
    found = search(lambda decay: math.nan if decay < 5e-5 else 1.2, (1e-5, 1e-4, 1e-3), INTERVAL)
    assert len(found) == 3 and "μ falls to 1.200 only" in why_none(found, INTERVAL)
    found = search(lambda decay: 1.2 if decay < 2e-5 else math.nan, (1e-5, 1e-4), INTERVAL)
    assert len(found) == 2 + BISECTIONS
    assert "jumps from 1.200 at" in why_none(found, INTERVAL)
    assert "to failure at" in why_none(found, INTERVAL)


def test_of_several_feasible_the_middle_one_then_the_smaller() -> None:
    found = {1e-5: 0.94, 2e-5: 0.80, 4e-5: 0.70, 8e-5: 0.61, 1.6e-4: 0.3}
    assert choose(found, INTERVAL) == 2e-5
    assert choose({1e-5: 0.875, 2e-5: 0.675}, (0.5, 1.05)) == 1e-5
    assert choose({1e-5: 0.60, 2e-5: 0.59}, INTERVAL) == 1e-5, "the bounds are feasible"
    assert choose({1e-5: 0.96, 2e-5: 0.59}, INTERVAL) is None


def test_the_order_of_verdicts_matters_and_not_every_wiggle() -> None:
    assert in_order({1e-5: 1.01, 2e-5: 1.03, 4e-5: 0.8, 8e-5: 0.82}, INTERVAL)
    assert not in_order({1e-5: 0.9, 2e-5: 0.97, 4e-5: 0.8}, INTERVAL)


@pytest.mark.parametrize(
    ("found", "words"),
    [
        ({1e-5: 1.4, 1e-3: 1.1}, ["μ falls to 1.100 only", "raise the end of --grid"]),
        ({1e-5: 0.5, 1e-3: 0.1}, ["μ rises to 0.500 only", "lower the start of --grid"]),
        ({1e-5: 1.0, 1e-3: 1.0}, ["exactly like the dense run"]),
    ],
)
def test_why_none(found: dict[float, float], words: list[str]) -> None:
    line = why_none(found, INTERVAL)
    assert "no λ from 1e-05 to 0.001 has μ in [0.6, 0.95]" in line
    assert all(word in line for word in words)


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

    monkeypatch.setattr(SRSTE, "flip_rule", None)
    run = tiny.load("sparsity=srste")
    with pytest.raises(ConfigError, match="sparsity=srste chooses masks by a rule of its own"):
        Search(run, (1e-4,), INTERVAL, 2)
