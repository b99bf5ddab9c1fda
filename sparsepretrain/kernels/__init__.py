"""The shared operations of all methods: tensors in, tensors out, no modules, no state.

Most take ``backend=None | "reference" | "cpu" | "triton"``; see :func:`dispatch.choose_backend`.
"""

from __future__ import annotations

from sparsepretrain.kernels.bimask import bimask_masks, bimask_ones, bimask_prune
from sparsepretrain.kernels.common import widen
from sparsepretrain.kernels.fp8 import (
    dequantize_fp8,
    matmul_fp8,
    no_fp8_matmuls,
    quantize_fp8,
    unscaled,
)
from sparsepretrain.kernels.glu import geglu, swiglu
from sparsepretrain.kernels.keys import AnyKey, ClockKey, NoiseKey, key_words, noise_key
from sparsepretrain.kernels.masks import (
    apply_mask,
    flip_count,
    masked_decay_,
    pack_24,
    pack_rows,
    packed_flip_count,
    packed_flip_counts,
    unpack_24,
    unpack_rows,
    unpacked,
)
from sparsepretrain.kernels.mvue24 import mvue
from sparsepretrain.kernels.nm import nm_mask, nm_prune, nonzeros_per_group
from sparsepretrain.kernels.noise import gumbel_like, normal_like, uniform_like, uniform_noise
from sparsepretrain.kernels.packed24 import compress_24, matmul_24
from sparsepretrain.kernels.sdgp import prune_gradient
from sparsepretrain.kernels.soft import (
    boundary_magnitudes,
    l1_scale,
    optimal_scale,
    soft_prune,
    soft_threshold,
)
from sparsepretrain.kernels.transposable import transposable_mask

__all__ = [
    "AnyKey",
    "ClockKey",
    "NoiseKey",
    "apply_mask",
    "bimask_masks",
    "bimask_ones",
    "bimask_prune",
    "boundary_magnitudes",
    "compress_24",
    "dequantize_fp8",
    "flip_count",
    "geglu",
    "gumbel_like",
    "key_words",
    "l1_scale",
    "masked_decay_",
    "matmul_24",
    "matmul_fp8",
    "mvue",
    "nm_mask",
    "nm_prune",
    "no_fp8_matmuls",
    "noise_key",
    "nonzeros_per_group",
    "normal_like",
    "optimal_scale",
    "pack_24",
    "pack_rows",
    "packed_flip_count",
    "packed_flip_counts",
    "prune_gradient",
    "quantize_fp8",
    "soft_prune",
    "soft_threshold",
    "swiglu",
    "transposable_mask",
    "uniform_like",
    "uniform_noise",
    "unpack_24",
    "unpack_rows",
    "unpacked",
    "unscaled",
    "widen",
]
