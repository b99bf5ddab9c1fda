"""The operations as Triton kernels, registered as torch operators: ``backend="triton"``."""
