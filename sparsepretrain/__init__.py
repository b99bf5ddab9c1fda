"""Pre-training of 2:4 and N:M sparse networks.

    import sparsepretrain as sp
    sparsifier = sp.sparsify(model, "sste", targets=["*.mlp.*"])
    sparsifier.attach(optimizer)

Importing this package does not import torch; the first use of a function does.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sparsepretrain.export.library import save_pretrained
    from sparsepretrain.sparsity import (
        Sparsifier,
        densify,
        list_methods,
        mask_adapters,
        sparsifier_of,
        sparsify,
    )

__version__ = "0.1.0"
__all__ = [
    "Sparsifier",
    "__version__",
    "densify",
    "list_methods",
    "mask_adapters",
    "save_pretrained",
    "sparsifier_of",
    "sparsify",
]


def __getattr__(name: str) -> Any:
    if name == "save_pretrained":
        return getattr(import_module("sparsepretrain.export.library"), name)
    if name in __all__:
        return getattr(import_module("sparsepretrain.sparsity"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
