"""Hashes of initial weights and data order, which compared runs must share."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from sparsepretrain.errors import ConfigError
from sparsepretrain.runs.checkpoint import Checkpoint
from sparsepretrain.runs.directory import RunDirectory
from sparsepretrain.tasks import Task
from sparsepretrain.training.batches import Request, split_requests
from sparsepretrain.training.session import Session

STEPS = 2
SAMPLES = 8
"""Number of first steps, and of samples of each step and of an evaluation, that are hashed:
the order is a function of the seed, so another one differs in these as well."""


def weights_hash(model: nn.Module) -> str:
    """Hash parameters and buffers with names, shapes and dtypes; 16 hexadecimal digits.

    0.4 s for 124 M parameters with SHA instructions.
    """
    return _hash(model.state_dict().items())


def run_hashes(session: Session, source: Checkpoint | None) -> dict[str, Any]:
    """``hashes``: ``initial_weights``, ``data_order`` and ``evaluation`` (None without one).

    Equal for all methods of a seed with the same model, data, batch and evaluation.

    Args:
        session: not trained yet.
        source: the checkpoint that it continues: the hashes are those that its run has recorded,
            and none if it has recorded none.
    """
    if source is not None:
        begun = RunDirectory.of_checkpoint(source.path)
        with contextlib.suppress(ConfigError):  # a file that cannot be read stops no run
            environment = {} if begun is None else begun.environment()
            return {key: environment[key] for key in ("hashes",) if key in environment}
        return {}
    run = session.run
    task = session.task
    size = run.batch.size
    evaluation = None
    order = [Request("train", step, range(size), size) for step in range(min(STEPS, run.steps))]
    if run.eval.batches != 0:
        samples = task.samples("validation")
        asked = split_requests("validation", samples, run.batch.micro, run.eval.batches)
        count = sum(len(request.positions) for request in asked)
        evaluation = _data_hash(task, [Request("validation", 0, range(count), samples)])
    hashes = {
        "initial_weights": session.setup.initial_weights,
        "data_order": _data_hash(task, order),
        "evaluation": evaluation,
    }
    return {"hashes": hashes}


def _data_hash(task: Task, requests: list[Request]) -> str:
    """Hash the fingerprint, the numbers of samples, and some of the samples."""
    parts: list[tuple[str, Any]] = [("fingerprint", task.fingerprint)]
    for split, step, positions, size in requests:
        count = len(positions)
        some = sorted({int(i) for i in np.linspace(0, count - 1, min(SAMPLES, count))})
        batch = task.batch(split, step, some, size)
        parts += [(f"{step}/{key}", batch[key]) for key in sorted(batch)]
        parts.append((f"{step}/samples", count))
    return _hash(parts)


def _hash(parts: Iterable[tuple[str, Any]]) -> str:
    digest = hashlib.sha256()
    for name, value in parts:
        if isinstance(value, Tensor):
            about: Any = [str(value.dtype), list(value.shape)]
            digest.update(json.dumps([name, about]).encode())
            flat = value.detach().cpu().contiguous().flatten()
            digest.update(flat.view(torch.uint8).numpy().data)
        elif isinstance(value, str | int):
            digest.update(json.dumps([name, value]).encode())
    return digest.hexdigest()[:16]
