"""Numerics of a run from the group ``precision``."""

from __future__ import annotations

import os
import warnings
from typing import Any

import torch
from torch import nn

from sparsepretrain.config.groups import Precision, ScaledPrecision, SimulatedFP8, SinglePrecision
from sparsepretrain.sparsity.matmuls.fp8 import FP8Precision

_DTYPES = {
    "fp32": torch.float32,
    "fp64": torch.float64,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
Options = Precision | SinglePrecision | ScaledPrecision | SimulatedFP8


def compute_dtype(options: Options) -> torch.dtype:
    """Dtype of the matmuls; under fp8, of those in all other layers."""
    return _DTYPES[options.dtype if isinstance(options, SimulatedFP8) else options.name]


def fp8_formats(options: Options) -> FP8Precision | None:
    """Return the fp8 formats of sparse layers; None: they follow autocast."""
    if not isinstance(options, SimulatedFP8):
        return None
    return FP8Precision(name=options.name, recipe=options.recipe)


def set_numerics(options: Options, *, deterministic: bool) -> None:
    """Set TF32 and determinism of this process, which an earlier run may have changed.

    Inductor's advice about TF32 is silenced.

    Args:
        options: TF32 is used where they say so; by default torch uses it in convolutions.
        deterministic: only algorithms that repeat bit for bit; torch raises where it has none.
    """
    tf32 = getattr(options, "tf32", False)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = tf32
    # torch 2.11 warns from inductor and names a function of torch; tf32_note names the option
    warnings.filterwarnings("ignore", "TensorFloat32 tensor cores for float32 matrix mult")
    torch.use_deterministic_algorithms(deterministic)
    if deterministic:
        aids: Any = torch.utils.deterministic
        aids.fill_uninitialized_memory = False  # for debugging; it costs time
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS starts


def set_dtype(model: nn.Module, options: Options) -> None:
    """Make Parameters and buffers of a model double precision, if ``options`` are fp64."""
    if compute_dtype(options) != torch.float64:
        return
    model.double()
    # transformers multiplies experts with torch's grouped matmul, which has no fp64
    if choose := getattr(model, "set_experts_implementation", None):
        choose("eager")


def tf32_note(options: Options, device: torch.device) -> str | None:
    """Return a line about fp32 matmuls that leave the tensor cores of ``device`` idle, or None."""
    exact = compute_dtype(options) == torch.float32 and not getattr(options, "tf32", False)
    if not exact or device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 0):
        return None
    return (
        f"precision={options.name} multiplies in IEEE fp32 without tensor cores: "
        "precision.tf32=true is faster and rounds operands to three digits"
    )


def describe(options: Options) -> str:
    """Describe the precision in a few words."""
    if isinstance(options, SimulatedFP8):
        return f"{options.name} {options.recipe}, {options.dtype} elsewhere"
    return options.name


def autocast(options: Options, device: torch.device) -> torch.autocast:
    """Context of the forward: matmuls in the configured dtype."""
    dtype = compute_dtype(options)
    enabled = dtype not in (torch.float32, torch.float64)
    return torch.autocast(device.type, dtype=dtype if enabled else None, enabled=enabled)
