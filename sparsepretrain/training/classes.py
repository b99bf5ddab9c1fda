"""Names of the classes of a trained head, in the order of the data."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from sparsepretrain.console import Console
from sparsepretrain.tasks import Task

GENERIC = re.compile(r"LABEL_\d+")
"""Names that transformers gives to classes without a name."""


def class_names(task: Task) -> list[str]:
    """Return the names of the classes in the order of the head's rows; empty: no classes."""
    named = getattr(task, "head", None) == "labels"
    return list(getattr(task.data_options, "labels", ())) if named else []


def named_classes(config: Any) -> list[str]:
    """Return the names in a transformers configuration; empty if one of them is generic."""
    names = [str(config.id2label[row]) for row in sorted(config.id2label)]
    return [] if any(map(GENERIC.fullmatch, names)) else names


def is_reordered(before: Sequence[str], now: Sequence[str]) -> bool:
    """Return True for the same names in another order; case, spaces and _ do not count."""
    old, new = list(map(_plain, before)), list(map(_plain, now))
    return old != new and sorted(old) == sorted(new) and len(set(new)) == len(new)


@torch.no_grad()
def order_classes(
    model: nn.Module, task: Task, before: Sequence[str], new: Sequence[str], console: Console
) -> None:
    """Put the rows of a head that came with a checkpoint in the order of the data's classes.

    Args:
        model: has the weights of the checkpoint and is not sparse yet.
        task: its data name the classes.
        before: names of the classes in the checkpoint.
        new: names of the weights that did not come with the checkpoint.
        console: shows which names the head had, if they are others.
    """
    now = class_names(task)
    rows = _class_weights(task, len(now)) if now and len(before) == len(now) else []
    if not rows or set(rows) & set(new) or list(map(_plain, before)) == list(map(_plain, now)):
        return
    if not is_reordered(before, now):
        console.info(
            f"the head of the checkpoint was trained for {', '.join(before)}; its rows go on as "
            f"{', '.join(now)}"
        )
        return
    old = list(map(_plain, before))
    order = [old.index(_plain(name)) for name in now]
    for name, tensor in model.state_dict().items():
        if name in rows:
            tensor.copy_(tensor[order])
    console.info(
        f"the head of the checkpoint predicts {', '.join(before)}: its rows were put in the order "
        f"of data.labels, {', '.join(now)}"
    )


def _plain(name: str) -> str:
    return name.strip().casefold().replace("_", " ")


def _class_weights(task: Task, count: int) -> list[str]:
    """Return the names of the weights with a row per class: those that grow with a class more."""
    with torch.device("meta"):
        models = [
            task.recipe.build_headed(task.model_options, "labels", rows)
            for rows in (count, count + 1)
        ]
    shapes, more = ({k: v.shape for k, v in model.state_dict().items()} for model in models)
    return [name for name, shape in shapes.items() if shape != more[name]]
