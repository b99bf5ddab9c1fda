"""Sparse training of anybody's model: swap layers, attach to the optimizer, read metrics.

Importing this package does not import torch; the first use of a function does.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from sparsepretrain import registry
from sparsepretrain.sparsity.method import Method, MethodOptions, Projection
from sparsepretrain.sparsity.operand_table import Operand, Row
from sparsepretrain.sparsity.schedule import Phase, Window

if TYPE_CHECKING:
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
    "sparsifier_of",
    "sparsify",
    "sparsify_with",
]


def list_methods() -> list[str]:
    """Names of all registered methods, plugins included, sorted."""
    return registry.names("method")


def __getattr__(name: str) -> Any:
    if name in ("Sparsifier", "densify", "sparsifier_of", "sparsify", "sparsify_with"):
        return getattr(import_module(f"{__name__}.surgery"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
