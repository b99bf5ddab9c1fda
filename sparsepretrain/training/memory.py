"""What training keeps in memory per entry of a weight, read off one small layer that trains."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from sparsepretrain.config.schema import Run
from sparsepretrain.errors import SparsePretrainWarning
from sparsepretrain.sparsity import Window
from sparsepretrain.training.build import attach_optimizer, sparsify_model
from sparsepretrain.training.precision import autocast

SPARSE = {"window": Window(), "at": 0.0, "until": 0.0, "clipping": (0.0, 0.0), "dense_tail": 0.0}
"""Options of methods with which a run is sparse from its first step on."""


class BytesPerEntry(NamedTuple):
    """Of one weight."""

    master: float
    gradient: float
    moments: float
    """The optimiser's state."""
    operands: float = 0.0
    """A and B as products read them, and what else is kept between two steps."""
    state: float = 0.0
    """Masks and scales in the state dict."""

    def __str__(self) -> str:
        return ", ".join(f"{v:.3g} {k}" for k, v in self._asdict().items())


def bytes_per_entry(run: Run) -> tuple[BytesPerEntry, BytesPerEntry]:
    """Of a weight while it is sparse, and of one that is not.

    Trains two small layers for a step with the method, optimiser and precision of ``run``, and
    counts what is there afterwards.
    """
    options = run.sparsity
    phases = {key: value for key, value in SPARSE.items() if hasattr(options, key)}
    first = dataclasses.replace(options, targets="ffn", **phases)
    run = dataclasses.replace(run, sparsity=first)
    size = 4 * options.m * -(-128 // options.m)  # what is one per layer or row hardly counts
    model = nn.Sequential(*(nn.Linear(size, size, bias=False) for _ in range(2)))
    task = cast(Any, SimpleNamespace(roles={"ffn": ["0"]}))
    with warnings.catch_warnings():  # about the course of training, of which this is none
        warnings.simplefilter("ignore", SparsePretrainWarning)
        optimizer = attach_optimizer(run, model, sparsify_model(run, task, model))
        for step in range(2):
            with autocast(run.precision, torch.device("cpu")):
                loss = model(torch.ones(8, size)).float().sum()
            loss.backward()
            if not step:  # then the operands of the next one are there as well
                optimizer.step()
                optimizer.zero_grad()
    sparse, other = (_count(layer, optimizer) for layer in model)
    return sparse, other


def _count(layer: Any, optimizer: Optimizer) -> BytesPerEntry:
    weight = layer.weight
    saved = {t.untyped_storage()._cdata for t in layer.state_dict().values()}
    shared = {id(layer.sparsity.model)} if hasattr(layer, "sparsity") else set()
    kept = [t for t in tensors(layer, shared) if t is not weight]
    found = [
        [weight],
        [weight.grad],
        [*tensors(optimizer.state[weight])],
        [t for t in kept if t.untyped_storage()._cdata not in saved],
        [t for t in kept if t.untyped_storage()._cdata in saved],
    ]
    return BytesPerEntry(*(_bytes(part) / weight.numel() for part in found))


def tensors(value: Any, _seen: set[int] | None = None) -> Iterator[Tensor]:
    """Tensors that ``value`` holds: in containers, modules and objects of this package."""
    seen = set() if _seen is None else _seen
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, Tensor):
        yield value
        return
    inner: Any = ()
    if isinstance(value, dict):
        inner = value.values()
    elif isinstance(value, list | tuple):
        inner = value
    elif type(value).__module__.partition(".")[0] in ("sparsepretrain", "torch"):
        slots = getattr(type(value), "__slots__", ())
        inner = [*getattr(value, "__dict__", {}).values(), *(getattr(value, s, 0) for s in slots)]
    for part in inner:
        yield from tensors(part, seen)


def _bytes(found: list[Tensor]) -> int:
    """Of all storages, each counted once."""
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in found}.values())
