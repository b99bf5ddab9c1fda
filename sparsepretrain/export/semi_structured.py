"""Exported weights as torch's semi-structured sparse tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparsepretrain.errors import CheckpointError, ConfigError
from sparsepretrain.export.about import ABOUT, layers_by_pattern
from sparsepretrain.files import read_json
from sparsepretrain.kernels.cusparselt.packed24 import allowed_error, fault_of, version
from sparsepretrain.kernels.packed24 import TYPES
from sparsepretrain.models.gpt2 import linear_from

ROWS = 64
COLUMNS = 64
"""out_features and in_features must be multiples of these in fp16 and bf16: cuSPARSELt limits rows,
CUTLASS columns."""
CHECKED = 128
"""Tokens of the matmul that is compared with the dense one."""


def load_semi_structured(
    directory: str | Path, device: str = "cuda", dtype: torch.dtype = torch.bfloat16
) -> nn.Module:
    """Load an exported transformers model with semi-structured sparse layers, for inference.

    GPT-2's sparse Conv1D layers become nn.Linear. Layers with other patterns than 2:4 stay as they
    are.

    Args:
        directory: output of ``sparsepretrain export``.
        device: a CUDA device of compute capability 8.0 or later.
        dtype: fp16 or bf16.

    Raises:
        ConfigError: unsupported device, pattern, dtype or size of a layer, or a wrong matmul.
        CheckpointError: ``directory`` is not an export of a transformers model.
    """
    import transformers

    directory = Path(directory)
    try:
        about = read_json(directory / ABOUT)
        (name,) = read_json(directory / "config.json")["architectures"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{directory} is not an export of a transformers model") from error
    layers = layers_by_pattern(about).get("2:4", [])
    if not layers:
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
    if why := mismatch(model, layers):
        raise ConfigError(f"semi-structured tensors: {why}: load {directory} with transformers")
    compress(model.to(device).eval(), layers)
    return model


def mismatch(model: nn.Module, layers: list[str]) -> str:
    """Return the first layer that no semi-structured tensor can hold, in words; "": all fit."""
    banks = {name for name, _ in model.named_parameters()}
    for name in layers:
        if name in banks:
            return f"{name} is a bank of experts, which is no linear layer"
        rows, columns = _as_linear(model.get_submodule(name)).weight.shape
        if rows % ROWS or columns % COLUMNS:
            return f"{name} is {rows} × {columns}, not multiples of {ROWS} × {COLUMNS}"
    return ""


@torch.no_grad()
def compress(model: nn.Module, layers: list[str]) -> None:
    """Replace the weights of ``layers`` by semi-structured tensors, in place.

    One matmul of each size is compared with the dense one, because torch multiplies with the
    library's default algorithm, which is wrong in some versions (pytorch#155333).

    Raises:
        ConfigError: a matmul is wrong.
    """
    checked = set()
    for name in layers:
        parent, _, child = name.rpartition(".")
        linear = _as_linear(model.get_submodule(name))
        weight = linear.weight.detach()
        bias = linear.bias
        packed = torch.sparse.to_sparse_semi_structured(weight)
        case = weight.shape, weight.dtype, bias is None
        if case not in checked and (why := wrong(packed, weight, bias)):
            rows, columns = weight.shape
            dtype = str(weight.dtype).removeprefix("torch.")
            libraries = f"torch {torch.__version__} and cuSPARSELt {version()}"
            raise ConfigError(
                f"semi-structured tensors: {name} ({rows} × {columns} in {dtype}): {why} with "
                f"{libraries}: load the export with transformers"
            )
        checked.add(case)
        linear.weight = nn.Parameter(packed, requires_grad=False)
        setattr(model.get_submodule(parent), child, linear)


def wrong(packed: Tensor, weight: Tensor, bias: Tensor | None) -> str:
    """Return why a matmul with ``packed`` is not the one with the dense ``weight``, or "".

    Args:
        packed: semi-structured tensor of ``weight``.
        weight: (out_features, in_features), fp16 or bf16.
        bias: (out_features,), or None.
    """
    random = torch.Generator(weight.device).manual_seed(0)
    size = CHECKED, weight.shape[1]
    x = torch.randn(size, generator=random, device=weight.device).to(weight.dtype)
    expected = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    magnitudes = F.linear(x.double().abs(), weight.double().abs())
    slack = allowed_error(expected, magnitudes, weight.dtype)

    def is_right(product: Tensor) -> bool:
        return bool(((product - expected).abs() <= slack).all())

    return fault_of(lambda: F.linear(x, packed, bias), is_right, weight.device)


def _as_linear(layer: Any) -> nn.Linear:
    """Return ``layer``, or convert a Conv1D to nn.Linear."""
    if isinstance(layer, nn.Linear):
        return layer
    if type(layer).__name__ != "Conv1D":
        raise ConfigError(f"semi-structured tensors are matrices, not {type(layer).__name__}")
    return linear_from(layer)
