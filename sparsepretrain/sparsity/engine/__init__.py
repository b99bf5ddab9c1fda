"""Sparse layers, their operands, and the hooks around the optimizer step."""
