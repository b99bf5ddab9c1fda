"""Layers that can be pruned, and the blocks of a model that they belong to."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from sparsepretrain.errors import ConfigError
from sparsepretrain.sparsity.engine.layer_classes import replacement_of
from sparsepretrain.sparsity.engine.own_forwards import layer_family

BLOCK = re.compile(r"^(?:.*?\.)??\d+(?=\.)")
"""Name of the block of a layer: up to the first number."""


def linear_layers(module: nn.Module) -> dict[str, nn.Module]:
    """Return name -> layer of all nn.Linear and Conv1D, and their subclasses."""
    return {
        name: layer
        for name, layer in module.named_modules()
        if layer_family(type(layer)) not in (None, nn.Conv2d)
    }


def matrix_of(layer: nn.Module) -> Tensor:
    """Return the weight as (out_features, in_features), which shares its memory."""
    weight: Any = layer.weight
    data: Tensor = weight.data
    return data if replacement_of(layer).in_dim == 1 else data.t()


def require_layers(model: nn.Module, layers: Mapping[str, int]) -> None:
    """Refuse layers of other classes, and widths that are not a multiple of M (name -> M).

    Raises:
        ConfigError: one line per problem, with the first layer that has it.
    """
    known = linear_layers(model)
    problems: dict[str, list[str]] = {}
    for name, m in layers.items():
        if name not in known:
            kind = type(model.get_submodule(name)).__name__
            problems.setdefault(f"{kind} is no nn.Linear or Conv1D", []).append(name)
        elif (width := matrix_of(known[name]).shape[1]) % m:
            text = f"in_features {width} is not a multiple of {m}"
            problems.setdefault(text, []).append(name)
    if problems:
        raise ConfigError(
            [
                f"{first}{f' and {len(more)} more layers' if more else ''}: {text}: leave "
                f"{'them' if more else 'it'} out"
                for text, (first, *more) in problems.items()
            ]
        )


def blocks_of(model: nn.Module, names: Sequence[str]) -> dict[str, nn.Module]:
    """Return name -> block, of the lists of blocks that the layers are in.

    Blocks without any of the layers are among them: hidden states pass through them too.

    Raises:
        ConfigError: a layer is in no block, such as the head.
    """
    lists = []
    for name in names:
        block = BLOCK.match(name)
        if block is None:
            raise ConfigError(
                f"{name} is in no repeated block: calibration goes block by block; leave it out"
            )
        lists.append(block[0].rpartition(".")[0])
    return {
        f"{parent}.{child}" if parent else child: module
        for parent in dict.fromkeys(lists)
        for child, module in model.get_submodule(parent).named_children()
        if child.isdigit()
    }
