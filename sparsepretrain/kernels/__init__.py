"""The shared operations of all methods: tensors in, tensors out, no modules, no state.

Most take ``backend=None | "reference" | "cpu" | "triton"``; see :func:`choose_backend`.
Importing this package does not import torch; the first use of a function does.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sparsepretrain.kernels.bimask24 import bimask_masks, bimask_ones, bimask_prune
    from sparsepretrain.kernels.decay import masked_decay_
    from sparsepretrain.kernels.flips import flip_count, pack_24, packed_flip_count, unpack_24
    from sparsepretrain.kernels.fp8 import dequantize_fp8, quantize_fp8
    from sparsepretrain.kernels.glu import geglu, swiglu
    from sparsepretrain.kernels.groups import apply_mask
    from sparsepretrain.kernels.mvue24 import mvue
    from sparsepretrain.kernels.nm import nm_mask, nm_prune
    from sparsepretrain.kernels.noise import NoiseKey, noise_key, uniform_like, uniform_noise
    from sparsepretrain.kernels.sdgp import prune_gradient
    from sparsepretrain.kernels.soft import (
        boundary_magnitudes,
        l1_scale,
        optimal_scale,
        scale_sums,
        soft_threshold,
    )
    from sparsepretrain.kernels.transposable import transposable_mask

_NAMES = {
    "bimask24": ["bimask_masks", "bimask_ones", "bimask_prune"],
    "decay": ["masked_decay_"],
    "flips": ["flip_count", "pack_24", "packed_flip_count", "unpack_24"],
    "fp8": ["dequantize_fp8", "quantize_fp8"],
    "glu": ["geglu", "swiglu"],
    "groups": ["apply_mask"],
    "mvue24": ["mvue"],
    "nm": ["nm_mask", "nm_prune"],
    "noise": ["NoiseKey", "noise_key", "uniform_like", "uniform_noise"],
    "sdgp": ["prune_gradient"],
    "soft": ["boundary_magnitudes", "l1_scale", "optimal_scale", "scale_sums", "soft_threshold"],
    "transposable": ["transposable_mask"],
}
_HOME = {name: module for module, names in _NAMES.items() for name in names}
__all__ = [
    "NoiseKey",
    "apply_mask",
    "bimask_masks",
    "bimask_ones",
    "bimask_prune",
    "boundary_magnitudes",
    "dequantize_fp8",
    "flip_count",
    "geglu",
    "l1_scale",
    "masked_decay_",
    "mvue",
    "nm_mask",
    "nm_prune",
    "noise_key",
    "optimal_scale",
    "pack_24",
    "packed_flip_count",
    "prune_gradient",
    "quantize_fp8",
    "scale_sums",
    "soft_threshold",
    "swiglu",
    "transposable_mask",
    "uniform_like",
    "uniform_noise",
    "unpack_24",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        value: Any = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
