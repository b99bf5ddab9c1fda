"""What a checkpoint costs the training loop, written at once and in the background, and its size.

One run is trained; in every round it takes as many steps without a save, after a synchronous one
and after one in the background. They are enough for the latter to be written meanwhile.
"""

from __future__ import annotations

import functools
import math
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from sparsepretrain.bench.cpu import training
from sparsepretrain.bench.progress import Phase
from sparsepretrain.bench.timing import Case, interleaved, ratio
from sparsepretrain.config import freeze
from sparsepretrain.runs.checkpoint import Retention
from sparsepretrain.runs.writer import Writer
from sparsepretrain.training.loop import train_step
from sparsepretrain.training.session import Session

SIZES = ["model.n_embd=384", "model.n_layer=4", "model.n_head=6", "batch.size=2", "batch.micro=2"]
QUICK = ["model.n_embd=64", "model.n_layer=1", "batch.size=2", "batch.micro=2"]
STALL_LIMIT = 0.33
"""Of the time that the loop stands still, background over synchronous."""


class Saves:
    """One way of saving ``t``; each save is followed by the same number of steps."""

    def __init__(self, t: Session, place: Path, *, background: bool) -> None:
        self._t, self._writer = t, Writer(place, background=background)
        self._config = freeze.to_yaml(t.run.plain)
        self.stalls: list[float] = []
        """Seconds from the call of a save to the next step."""

    def round(self, steps: int) -> None:
        """A save, and the steps after it; returns when everything is on the disk."""
        started = time.perf_counter()
        state = self._t.state_dict()
        self._writer.save(self._t.step, state, config=self._config, keep=lambda: Retention(1))
        self.stalls.append(time.perf_counter() - started)
        take(self._t, steps)
        self._writer.join()

    def bytes(self) -> int:
        """Of the files of a checkpoint."""
        return sum(file.stat().st_size for file in self._writer.directory.glob("step_*/*"))


def take(t: Session, steps: int) -> None:
    """Train so many steps."""
    for _ in range(steps):
        train_step(t)


def cases(quick: bool) -> list[Case]:
    """The stall, what a save costs in all, and bytes."""
    rounds = 2 if quick else 8
    t = training(QUICK if quick else SIZES)
    take(t, 1)
    with tempfile.TemporaryDirectory() as place:
        ways = {
            name: Saves(t, Path(place, name), background=name == "background")
            for name in ("synchronous", "background")
        }
        steps = _enough(t, ways["synchronous"])
        works: dict[str, Callable[[], object]] = {"none": lambda: take(t, steps)}
        works |= {name: functools.partial(way.round, steps) for name, way in ways.items()}
        shown = Phase("saves", rounds, "rounds")
        seconds = interleaved(works, rounds=rounds, warmup=1, on_round=shown)
        size = ways["background"].bytes()
    stalls = {name: way.stalls[-rounds:] for name, way in ways.items()}
    found = [
        ratio(
            "stall of the loop per save, background over synchronous",
            stalls["background"],
            stalls["synchronous"],
            at_most=STALL_LIMIT,
        )
    ]
    for name in ways:
        found.append(ratio(f"{steps} steps, {name} save over none", seconds[name], seconds["none"]))
    parameters = sum(p.numel() for p in t.model.parameters())
    sizes = {"bytes": size, "parameters": parameters}
    found.append(
        Case(name="bytes of a save", value=size / parameters, unit="per parameter", detail=sizes)
    )
    return found


def _enough(t: Session, saves: Saves) -> int:
    """Steps that last about twice as long as a save."""
    started = time.perf_counter()
    take(t, 3)
    step = (time.perf_counter() - started) / 3
    for _ in range(2):
        saves.round(1)
    return math.ceil(2 * statistics.median(saves.stalls) / step)
