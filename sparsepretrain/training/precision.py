"""Compute dtype and loss scaling."""

from __future__ import annotations

import torch

from sparsepretrain.config.schema import LossScaling, Precision, ScaledPrecision, SimulatedFP8

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
Options = Precision | ScaledPrecision | SimulatedFP8


def compute_dtype(options: Options) -> torch.dtype:
    """Dtype of the matrix products; under simulated fp8, of those in all other layers."""
    return _DTYPES[options.dtype if isinstance(options, SimulatedFP8) else options.name]


def fp8_recipe(options: Options) -> dict[str, str] | None:
    """What ``sparsify`` takes as its ``precision``."""
    if not isinstance(options, SimulatedFP8):
        return None
    return {"name": options.name, "recipe": options.recipe}


def describe(options: Options) -> str:
    """The precision in a few words."""
    if isinstance(options, SimulatedFP8):
        return f"{options.name} {options.recipe}, {options.dtype} elsewhere"
    return options.name


def autocast(options: Options, device: torch.device) -> torch.autocast:
    """Context of the forward: matrix products in the configured dtype."""
    dtype = compute_dtype(options)
    enabled = dtype != torch.float32
    return torch.autocast(device.type, dtype=dtype if enabled else None, enabled=enabled)


def grad_scaler(options: Options, device: torch.device) -> torch.amp.GradScaler:
    """Dynamic loss scaling for fp16, a scaler that does nothing otherwise."""
    if isinstance(options, LossScaling) and compute_dtype(options) == torch.float16:
        return torch.amp.GradScaler(
            device.type, init_scale=options.init_scale, growth_interval=options.growth_interval
        )
    return torch.amp.GradScaler(device.type, enabled=False)
