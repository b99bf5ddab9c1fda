"""Compute dtype and loss scaling."""

from __future__ import annotations

import torch

from sparsepretrain.config.schema import Precision, ScaledPrecision

_DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


def autocast(options: Precision | ScaledPrecision, device: torch.device) -> torch.autocast:
    """Context of the forward: matrix products in the configured dtype."""
    dtype = _DTYPES[options.name]
    return torch.autocast(device.type, dtype=dtype, enabled=dtype is not None)


def grad_scaler(options: Precision | ScaledPrecision, device: torch.device) -> torch.amp.GradScaler:
    """Dynamic loss scaling for fp16, a scaler that does nothing otherwise."""
    if isinstance(options, ScaledPrecision):
        return torch.amp.GradScaler(
            device.type, init_scale=options.init_scale, growth_interval=options.growth_interval
        )
    return torch.amp.GradScaler(device.type, enabled=False)
