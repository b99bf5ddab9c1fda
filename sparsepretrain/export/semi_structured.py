"""Exported weights as torch's semi-structured sparse tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from sparsepretrain.errors import CheckpointError, ConfigError
from sparsepretrain.files import read_json
from sparsepretrain.kernels.packed24 import TYPES
from sparsepretrain.models.gpt2 import linear_from

ABOUT = "sparsity.json"
"""File that describes the exported weights."""
ROWS, COLUMNS = 64, 64
"""out_features and in_features must be multiples of these in fp16 and bf16: cuSPARSELt limits rows,
CUTLASS columns."""


def load_semi_structured(
    directory: str | Path, device: str = "cuda", dtype: torch.dtype = torch.bfloat16
) -> nn.Module:
    """Load an exported transformers model with semi-structured sparse layers, for inference.

    GPT-2's sparse Conv1D layers become nn.Linear.

    Args:
        directory: output of ``sparsepretrain export``.
        device: a CUDA device of compute capability 8.0 or later.
        dtype: fp16 or bf16.

    Raises:
        ConfigError: unsupported device, pattern, dtype or size of a layer.
        CheckpointError: ``directory`` is not an export of a transformers model.
    """
    import transformers

    directory = Path(directory)
    try:
        about = read_json(directory / ABOUT)
        (name,) = read_json(directory / "config.json")["architectures"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{directory} is not an export of a transformers model") from error
    if about["pattern"] != "2:4":
        raise ConfigError(
            f"semi-structured tensors are 2:4, those in {directory} are {about['weights']}: load "
            "it with transformers"
        )
    if dtype not in TYPES:
        raise ConfigError(f"semi-structured matmuls exist for fp16 and bf16, not for {dtype}")
    if torch.device(device).type != "cuda" or not torch.cuda.is_available():
        raise ConfigError(f"semi-structured matmuls need a CUDA device, got device={device!r}")
    if (capability := torch.cuda.get_device_capability(device)) < (8, 0):
        raise ConfigError(
            "semi-structured matmuls need compute capability 8.0 or later, this device has "
            "{}.{}".format(*capability)
        )
    model: Any = getattr(transformers, name).from_pretrained(directory, dtype=dtype)
    if why := misfit(model, about["layers"]):
        raise ConfigError(f"semi-structured tensors: {why}: load {directory} with transformers")
    compress(model.to(device).eval(), about["layers"])
    return model


def misfit(model: nn.Module, layers: list[str]) -> str:
    """Return the first layer that no semi-structured tensor can hold, in words; "": all fit."""
    for name in layers:
        rows, columns = _as_linear(model.get_submodule(name)).weight.shape
        if rows % ROWS or columns % COLUMNS:
            return f"{name} is {rows} × {columns}, not multiples of {ROWS} × {COLUMNS}"
    return ""


def compress(model: nn.Module, layers: list[str]) -> None:
    """Replace the weights of ``layers`` by semi-structured tensors, in place."""
    from torch.sparse import to_sparse_semi_structured

    for name in layers:
        parent, _, child = name.rpartition(".")
        linear = _as_linear(model.get_submodule(name))
        packed = to_sparse_semi_structured(linear.weight.detach())
        linear.weight = nn.Parameter(packed, requires_grad=False)
        setattr(model.get_submodule(parent), child, linear)


def _as_linear(layer: Any) -> nn.Linear:
    """Return ``layer``, or convert a Conv1D to nn.Linear."""
    if isinstance(layer, nn.Linear):
        return layer
    if type(layer).__name__ != "Conv1D":
        raise ConfigError(f"semi-structured tensors are matrices, not {type(layer).__name__}")
    return linear_from(layer)
