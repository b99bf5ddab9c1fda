"""Sparse training of anybody's model: swap layers, attach to the optimizer, read metrics."""

from __future__ import annotations

from sparsepretrain import registry
from sparsepretrain.sparsity.adapters import mask_adapters
from sparsepretrain.sparsity.method import Method, MethodOptions, Projection
from sparsepretrain.sparsity.operand_table import Operand, Row
from sparsepretrain.sparsity.schedule import Phase, Window
from sparsepretrain.sparsity.sparsifier import Sparsifier
from sparsepretrain.sparsity.surgery import densify, sparsifier_of, sparsify, sparsify_with

__all__ = [
    "Method",
    "MethodOptions",
    "Operand",
    "Phase",
    "Projection",
    "Row",
    "Sparsifier",
    "Window",
    "densify",
    "list_methods",
    "mask_adapters",
    "sparsifier_of",
    "sparsify",
    "sparsify_with",
]


def list_methods() -> list[str]:
    """Names of all registered methods, plugins included, sorted."""
    return registry.names("method")
