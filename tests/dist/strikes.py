"""What happens to a process in the middle of a run: signals, hanging, numbers that are not finite."""

from __future__ import annotations

import importlib
import itertools
import os
import signal
import time
from typing import Any

import safetensors.torch
import torch

from sparsepretrain.runs import checkpoint
from sparsepretrain.tasks.causal_lm import CausalLM
from sparsepretrain.training import assembly, gradients
from sparsepretrain.training.guard import Guard
from sparsepretrain.training.session import Session

MOMENTS: dict[str, tuple[Any, str]] = {
    "start-up": (assembly, "build_model"),
    "micro-batch": (gradients.Loss, "forward"),
    "before the step": (Guard, "accepts"),
    "optimiser": (importlib.import_module("torch.optim.adam"), "adam"),
    "evaluation": (CausalLM, "observe"),
    "collecting a checkpoint": (Session, "state_dict"),
    "writing a checkpoint": (safetensors.torch, "save_file"),
    "moving a file": (os, "replace"),
    "removing a checkpoint": (checkpoint, "_prune"),
}
"""Name -> what is called then; from the third last on the first process only."""

HANGS = 40
"""Seconds."""


def strike(kind: str, moment: str, number: int) -> None:
    """Let ``kind`` happen in this process, in call ``number`` of ``moment``, from 1."""
    owner, name = MOMENTS[moment]
    original, calls = getattr(owner, name), itertools.count(1)

    def struck(*args: Any, **options: Any) -> Any:
        if next(calls) != number:
            return original(*args, **options)
        if kind == "hang":
            time.sleep(HANGS)
        elif kind.startswith("SIG"):
            os.kill(os.getpid(), getattr(signal, kind))
        result = original(*args, **options)
        if kind == "nan loss":
            return result * torch.nan
        return NaNGradient.apply(result) if kind == "nan gradient" else result

    setattr(owner, name, struck)


class NaNGradient(torch.autograd.Function):
    """The identity; its gradient is NaN."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return grad * torch.nan
