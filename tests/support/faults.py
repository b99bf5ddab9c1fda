"""Faults of a rank in the middle of a run: signals, hanging, numbers that are not finite."""

import importlib
import itertools
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import safetensors.torch
import torch

from sparsepretrain.runs import checkpoint
from sparsepretrain.tasks.causal_lm import CausalLM
from sparsepretrain.training import assembly, gradients, session_state
from sparsepretrain.training.guard import Guard

MOMENTS: dict[str, tuple[Any, str]] = {
    "start-up": (assembly, "build_model"),
    "micro-batch": (gradients.Loss, "forward"),
    "before the step": (Guard, "accepts"),
    "optimizer": (importlib.import_module("torch.optim.adam"), "adam"),
    "evaluation": (CausalLM, "observe"),
    "collecting a checkpoint": (session_state, "state_dict"),
    "writing a checkpoint": (safetensors.torch, "save_file"),
    "moving a file": (os, "replace"),
    "removing a checkpoint": (checkpoint, "_prune"),
}
"""Name -> what is called then; from the third last on the first process only."""

SAVING: dict[str, tuple[Any, str]] = {
    "writing tensors": (safetensors.torch, "save_file"),
    "writing numbers": (checkpoint, "_write_json"),
    "flushing": (checkpoint, "sync"),
    "summing": (checkpoint, "_sum"),
    "moving": (os, "replace"),
    "removing": (checkpoint, "_prune"),
}
"""The same within a save, whose number counts; the first process alone does this."""

HANGS = 120
"""Seconds; twice the ``parallel.timeout`` of tests that wait for it."""


def inject(kind: str, moment: str, number: int) -> None:
    """Let ``kind`` happen in this process, in call ``number`` of ``moment``, from 1.

    A kind that ends with `` late`` happens when the call is over.
    """
    if moment in SAVING:
        _change(checkpoint, "save", number, lambda: inject_at(kind, *SAVING[moment], 1))
    else:
        inject_at(kind, *MOMENTS[moment], number)


def inject_at(kind: str, owner: Any, name: str, number: int) -> None:
    """See :func:`inject`; ``owner.name`` is what is called."""
    name_of_signal = kind.removesuffix(" late")

    def happen() -> None:
        if kind == "hang":
            time.sleep(HANGS)
        elif kind.startswith("SIG"):
            os.kill(os.getpid(), getattr(signal, name_of_signal))

    def result(value: Any) -> Any:
        if kind.endswith(" late"):
            happen()
        if kind not in CHANGES:
            return value
        loss, *terms = value
        return CHANGES[kind](loss), *terms

    _change(owner, name, number, (lambda: None) if kind.endswith(" late") else happen, result)


def _change(
    owner: Any,
    name: str,
    number: int,
    before: Callable[[], None],
    result: Callable[[Any], Any] = lambda value: value,
) -> None:
    original, calls = getattr(owner, name), itertools.count(1)

    def changed(*args: Any, **options: Any) -> Any:
        if next(calls) != number:
            return original(*args, **options)
        before()
        return result(original(*args, **options))

    setattr(owner, name, changed)


class NaNGradient(torch.autograd.Function):
    """The identity; its gradient is NaN."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return grad * torch.nan


CHANGES: dict[str, Callable[[torch.Tensor], Any]] = {
    "nan loss": lambda loss: loss * torch.nan,
    "jump": lambda loss: loss * 1e3,
    "nan gradient": NaNGradient.apply,
}
"""Kind -> what becomes of the loss of a micro-batch."""
