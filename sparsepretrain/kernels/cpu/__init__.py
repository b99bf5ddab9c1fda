"""The operations as loops over a tensor in memory, compiled by Numba: ``backend="cpu"``."""

from sparsepretrain.kernels.common import functions_of

KERNELS = functions_of(__name__, __path__)
