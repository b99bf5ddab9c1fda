"""Packed products by NVIDIA's cuSPARSELt, as torch binds it; only CUDA tensors."""

from sparsepretrain.kernels.common import functions_of

KERNELS = functions_of(__name__, __path__)
