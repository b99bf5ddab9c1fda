"""Rules of a decay search on synthetic flip ratios; nothing is trained."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from tiny_runs import Tiny

from sparsepretrain.errors import ConfigError
from sparsepretrain.studies.decay import (
    DEFAULT,
    INTERVAL,
    DecaySearch,
    choose,
    log_grid,
    why_none,
    with_default,
)

SEGMENT = ("schedule.warmup=6", "steps=12", "sparsity=tsrste", "sparsity.refresh=2")


def plan(tiny: Tiny, *more: str) -> DecaySearch:
    return DecaySearch(tiny.load(*SEGMENT, *more), log_grid(1e-3, 1.0, 3), INTERVAL, 6)


def test_grid_is_even_in_the_logarithm_with_three_digits() -> None:
    grid = log_grid(6e-6, 1e-3, 5)
    assert grid == (6e-6, 2.16e-5, 7.75e-5, 2.78e-4, 1e-3)
    steps = [math.log(b / a) for a, b in pairwise(grid)]
    assert max(steps) - min(steps) < 0.01


def test_feasible_decay_nearest_to_the_middle_is_chosen() -> None:
    found = {1e-5: 0.94, 2e-5: 0.80, 4e-5: 0.70, 8e-5: 0.61, 1.6e-4: 0.3}
    assert choose(found, INTERVAL) == 2e-5
    assert choose({1e-5: 0.875, 2e-5: 0.675}, (0.5, 1.05)) == 1e-5
    assert choose({1e-5: 0.60, 2e-5: 0.59}, INTERVAL) == 1e-5, "the bounds are feasible"
    assert choose({1e-5: 0.96, 2e-5: 0.59}, INTERVAL) is None


@pytest.mark.parametrize(
    ("found", "failed", "words"),
    [
        ({1e-5: 1.4, 1e-3: 1.1}, [], "μ falls to 1.100 only; raise the end of --grid"),
        ({1e-5: 0.5, 1e-3: 0.1}, [], "μ rises to 0.500 only; lower the start of --grid"),
        ({1e-5: 1.3, 3e-5: 1.0, 1e-4: 0.2, 1e-3: 0.1}, [], "--grid 3e-05,0.0001"),
        ({1e-5: 1.2}, [1e-4], "--grid 1e-05,0.0001"),  # diverged: too strong
        ({1e-5: 1.2}, [1e-6], "raise the end of --grid"),
    ],
)
def test_message_without_a_feasible_decay_names_the_grid_to_try(
    found: dict[float, float], failed: list[float], words: str
) -> None:
    assert words in why_none(found, INTERVAL, failed)


@pytest.mark.parametrize(
    ("overrides", "default"),
    [(["seed=1"], True), (["++sparsity=srste"], False), (["experiment=smoke"], False)],
)
def test_default_method_is_tsrste(overrides: list[str], default: bool) -> None:
    assert with_default(overrides) == ([DEFAULT] if default else []) + overrides


def test_segment_has_the_settings_of_the_run(tiny: Tiny) -> None:
    search = plan(tiny, "sparsity.mvue=none", "clip=0.5")
    dense, segment, other, _ = search.cells
    assert segment.run.steps == 12 and segment.run.schedule.warmup == 6, "not a run of 6 steps"
    assert segment.run.plain["sparsity"] == search.run.plain["sparsity"] | {"decay": 1e-3}
    kept = ("seed", "batch", "clip", "model", "task", "data", "optim", "schedule", "runs_dir")
    assert all(segment.run.plain[key] == search.run.plain[key] for key in kept)
    assert len({s.directory for s in (dense, segment, other)}) == 3
    assert plan(tiny).out == plan(tiny, "sparsity.decay=1e-3").out
    assert len({plan(tiny, *more).out for more in ((), ("seed=1",), ("clip=2",))}) == 3


@pytest.mark.parametrize(
    ("method", "rule", "refresh"),
    [("tsrste", "transposable", 2), ("srste", "magnitude", 1), ("bimask", "magnitude", 1)],
)
def test_dense_reference_has_the_mask_rule_of_the_method(
    tiny: Tiny, method: str, rule: str, refresh: int
) -> None:
    words = [*SEGMENT[:2], f"sparsity={method}", "sparsity.window.start=0.1"]
    run = tiny.load(*words, *(["sparsity.refresh=2"] if refresh > 1 else []))
    dense = DecaySearch(run, (1e-4,), INTERVAL, 6).cells[0].run.plain["sparsity"]
    assert (dense["flip_rule"], dense["refresh"]) == (rule, refresh)
    own = run.plain["sparsity"]
    assert all(dense[key] == own[key] for key in ("window", "targets", "n", "m"))


@pytest.mark.parametrize(
    ("overrides", "steps", "word"),
    [
        (["sparsity=ste"], 6, "sparsity=ste has no decay"),
        ([*SEGMENT, "resume=runs/x"], 6, "resume=runs/x"),
        (SEGMENT, 0, "--steps must be from 1"),
        (SEGMENT, 13, "--steps must be from 1"),
        ([*SEGMENT, "sparsity.refresh=7"], 6, "no masks are compared in 6 steps"),
        ([*SEGMENT, "sparsity.window.start=0.6"], 6, "from step 7 to 10"),
        ([*SEGMENT, "sparsity.window.stop=0.4"], 6, "from step 0 to 5"),
        (["sparsity=srste"], 2, "has its own mask rule"),
    ],
)
def test_unsuitable_runs_are_refused(
    tiny: Tiny, overrides: list[str], steps: int, word: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sparsepretrain.sparsity.methods.srste import SRSTE

    monkeypatch.setattr(SRSTE, "mask", lambda own, weight, dim: weight > 0)
    run = tiny.load(*overrides)
    with pytest.raises(ConfigError, match=word):
        DecaySearch(run, (1e-4,), INTERVAL, steps)
