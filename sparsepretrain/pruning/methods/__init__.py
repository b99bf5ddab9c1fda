"""Pruning methods, one module each."""
