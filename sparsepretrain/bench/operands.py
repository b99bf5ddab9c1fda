"""What pure forwards cost: a training step that projects in every forward, over stored operands.

``sparsify`` alone projects in every forward; the trainer owns its weights and stores operands once
per optimiser step. Measured eager and compiled, with one and several micro-batches per step, for
the cheapest projection and a dearer one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from unittest.mock import patch

from sparsepretrain.bench.cpu import training
from sparsepretrain.bench.progress import Phase
from sparsepretrain.bench.timing import Case, interleaved, ratio
from sparsepretrain.config import compose
from sparsepretrain.sparsity import Sparsifier
from sparsepretrain.training.loop import train_step

METHODS = ("ste", "sste")
MICRO_BATCHES = (1, 8)


def cases(quick: bool) -> list[Case]:
    """One ratio per method, number of micro-batches, and mode."""
    rounds = 2 if quick else 40
    return [
        case
        for compiled in (False, True)
        for count in MICRO_BATCHES
        for case in _ratios(compiled, count, rounds)
    ]


def _ratios(compiled: bool, count: int, rounds: int) -> list[Case]:
    """All methods side by side, so that steps of all are interleaved."""
    setting = f"{'compiled' if compiled else 'eager'}, {count} micro-batch{'es' * (count > 1)}"
    micro = compose([])["batch"]["size"] // count
    works: dict[str, Callable[[], object]] = {}
    for method in METHODS:
        overrides = [f"sparsity={method}", f"batch.micro={micro}", f"compile={compiled}"]
        stored = training(overrides)
        with patch.object(Sparsifier, "store_operands", lambda *_: None):
            pure = training(overrides)
        works[f"{method}, pure"] = functools.partial(train_step, pure)
        works[f"{method}, stored"] = functools.partial(train_step, stored)
    seconds = interleaved(works, rounds=rounds, on_round=Phase(setting, rounds, "rounds"))
    return [
        ratio(
            f"pure over stored operands, {method}, {setting}",
            seconds[f"{method}, pure"],
            seconds[f"{method}, stored"],
        )
        for method in METHODS
    ]
