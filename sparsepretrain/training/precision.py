"""The dtype of a run's matrix products, from the group ``precision``."""

from __future__ import annotations

import torch

from sparsepretrain.config.groups import Precision, ScaledPrecision, SimulatedFP8

_DTYPES = {
    "fp32": torch.float32,
    "fp64": torch.float64,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
Options = Precision | ScaledPrecision | SimulatedFP8


def compute_dtype(options: Options) -> torch.dtype:
    """Dtype of the matrix products; under simulated fp8, of those in all other layers."""
    return _DTYPES[options.dtype if isinstance(options, SimulatedFP8) else options.name]


def describe(options: Options) -> str:
    """The precision in a few words."""
    if isinstance(options, SimulatedFP8):
        return f"{options.name} {options.recipe}, {options.dtype} elsewhere"
    return options.name


def autocast(options: Options, device: torch.device) -> torch.autocast:
    """Context of the forward: matrix products in the configured dtype."""
    dtype = compute_dtype(options)
    enabled = dtype not in (torch.float32, torch.float64)
    return torch.autocast(device.type, dtype=dtype if enabled else None, enabled=enabled)
