"""torch.compile of a run: of its blocks, of the whole model, or off."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple, cast

import torch
from torch import nn

from sparsepretrain.config.schema import Run

PHASES = 4
"""Phases of a method, at most, in which a block is compiled."""


COMPILED_FROM = 180.0
"""Estimated seconds of training from which ``auto`` compiles blocks. Compilation is expected to
take 20 to 40 s: three minutes win that back if compiled blocks save a fifth of the time."""


class Scope(NamedTuple):
    """Compiled parts of a run."""

    mode: str
    """``none``, ``blocks`` or ``model``."""
    loss: bool
    """True if the cross-entropy of training is compiled."""


def scope_of(run: Run, device: torch.device, seconds: float) -> Scope:
    """Return the parts of ``run`` that are compiled on ``device``.

    Args:
        run: the checked configuration.
        device: training device.
        seconds: estimated training time without compilation, which ``auto`` depends on; 0 if the
            session does not train.
    """
    mode: str = run.compile
    if mode == "auto":
        # compiled blocks run no hooks of probes
        able = device.type == "cuda" and not run.probe
        mode = "blocks" if able and seconds > COMPILED_FROM else "none"
    # Probes compare losses with and without gradients, and only the former would be compiled: their
    # difference would contain the rounding of other kernels.
    return Scope(mode, device.type == "cuda" and mode != "none" and not run.probe)


def compiled(model: nn.Module, mode: str, backend: Any = "inductor") -> nn.Module:
    """Return the module to train: ``model``, with blocks compiled in place, or a wrapper.

    Equal blocks share one graph per phase of the method.
    """
    if mode == "blocks":
        parts = list(blocks(model))
        # Blocks of one class share their code, whose graphs dynamo counts: without room for each
        # kind of block in each phase, the rest of the model would run uncompiled.
        config: Any = torch._dynamo.config
        config.recompile_limit = max(config.recompile_limit, PHASES * len(parts))
        for block in parts:
            block.compile(backend=backend)
    elif mode != "none":
        return cast("nn.Module", torch.compile(model, backend=backend))
    return model


@contextlib.contextmanager
def eager(mode: str) -> Iterator[None]:
    """Run compiled blocks eagerly: batches of evaluations differ in size."""
    with torch.compiler.set_stance("force_eager") if mode == "blocks" else contextlib.nullcontext():
        yield


def blocks(module: nn.Module) -> Iterator[nn.Module]:
    """Return the members of the outermost lists of modules, in the model's order."""
    for child in module.children():
        if isinstance(child, nn.ModuleList | nn.Sequential):
            yield from (m for m in child if next(m.parameters(), None) is not None)
        else:
            yield from blocks(child)
