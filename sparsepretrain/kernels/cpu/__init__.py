"""The operations as loops over a tensor in memory, compiled by Numba: ``backend="cpu"``."""
