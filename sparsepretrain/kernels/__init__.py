# ruff: noqa: F401 (what type checkers find here)
"""The shared operations of all methods: tensors in, tensors out, no modules, no state.

Most take ``backend=None | "reference" | "cpu" | "triton"``; see :func:`dispatch.choose_backend`.
The public functions of this folder's files are found here by name. Importing this package does not
import torch; the first use of a function does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # what type checkers know; at run time nothing needs to be listed
    from sparsepretrain.kernels.bimask24 import bimask_masks, bimask_ones, bimask_prune
    from sparsepretrain.kernels.common import packed_shape, widen
    from sparsepretrain.kernels.fp8 import (
        dequantize_fp8,
        matmul_fp8,
        no_fp8_products,
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
        unpack_24,
        unpack_rows,
        unpacked,
    )
    from sparsepretrain.kernels.mvue24 import mvue
    from sparsepretrain.kernels.nm import nm_mask, nm_prune
    from sparsepretrain.kernels.noise import uniform_like, uniform_noise
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


def __getattr__(name: str) -> Any:
    if not name.startswith("_"):
        from sparsepretrain.kernels.common import functions_of

        functions = functions_of(__name__, __path__)
        if name in functions:
            globals()[name] = functions[name]
            return functions[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
