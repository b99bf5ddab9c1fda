"""Data: text becomes token files once, and training reads them as memory maps.

    data = load(options)                        # prepares offline sources on first use
    train = windows(data, "train", length=128, seed=0)
    batch = train.batch(step, range(16), 16)    # (16, 129) int64

Importing this package imports neither numpy nor torch; the first use of a function imports numpy.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sparsepretrain.data.formats import Pairs, amounts, pairs
    from sparsepretrain.data.order import Buckets, Windows, windows
    from sparsepretrain.data.preparation import Progress, load, prepare
    from sparsepretrain.data.tokens import TokenData

__all__ = [
    "Buckets",
    "Pairs",
    "Progress",
    "TokenData",
    "Windows",
    "amounts",
    "load",
    "pairs",
    "prepare",
    "windows",
]


def __getattr__(name: str) -> Any:
    for module in ("tokens", "formats", "order", "preparation") if name in __all__ else ():
        if hasattr(home := import_module(f"sparsepretrain.data.{module}"), name):
            return getattr(home, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
