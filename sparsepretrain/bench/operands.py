"""What pure forwards cost: a training step that projects in every forward, over stored operands.

``sparsify`` alone projects in every forward; the trainer owns its weights and stores operands once
per optimiser step. Measured eager and compiled, with one and several micro-batches per step, for
the cheapest projection and a dearer one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from unittest.mock import patch

import torch

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
        _case(method, compiled, count, rounds)
        for compiled in (False, True)
        for count in MICRO_BATCHES
        for method in METHODS
    ]


def _case(method: str, compiled: bool, count: int, rounds: int) -> Case:
    mode = "compiled" if compiled else "eager"
    setting = f"{method}, {mode}, {count} micro-batch{'es' * (count > 1)}"
    micro = compose([])["batch"]["size"] // count
    overrides = [f"sparsity={method}", f"batch.micro={micro}", f"compile={compiled}"]
    torch.compiler.reset()  # few models may share compiled code: more would run eagerly
    stored = training(overrides)
    with patch.object(Sparsifier, "store_operands", lambda *_: None):
        pure = training(overrides)
    works: dict[str, Callable[[], object]] = {
        "pure": functools.partial(train_step, pure),
        "stored": functools.partial(train_step, stored),
    }
    seconds = interleaved(works, rounds=rounds, on_round=Phase(setting, rounds, "rounds"))
    return ratio(f"pure over stored operands, {setting}", seconds["pure"], seconds["stored"])
