"""Attaching when a host starts to train, which it may do several times with the same model."""

from __future__ import annotations

from typing import Any

from sparsepretrain.sparsity import Sparsifier
from sparsepretrain.sparsity.engine.attachments import torch_optimizers


def reattach(sparsifier: Sparsifier, *optimizers: Any) -> None:
    """Attach to the optimizers of a host; detach from that of an earlier training first.

    Raises:
        ConfigError: see :meth:`Sparsifier.attach`.
    """
    present = [each for optimizer in optimizers for each in torch_optimizers(optimizer)]
    if sparsifier.optimizer is not None and sparsifier.optimizer not in present:
        sparsifier.detach()
    sparsifier.attach(*optimizers)
