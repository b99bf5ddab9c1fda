"""The operations as Triton kernels, registered as torch operators: ``backend="triton"``."""

from sparsepretrain.kernels.common import functions_of

KERNELS = functions_of(__name__, __path__)
