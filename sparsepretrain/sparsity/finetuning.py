"""Rules for fine-tuning the checkpoints of a method."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple


class FineTuning(NamedTuple):
    """Rules for fine-tuning checkpoints of a method."""

    method: str | None = None
    """Method to fine-tune with; None: the same one."""
    options: Mapping[str, Any] = MappingProxyType({})
    """Options that change when a checkpoint is fine-tuned with this method."""
    same: tuple[str, ...] = ()
    """Options, in addition to pattern and targets, that change the function computed from stored
    weights."""
    zero: str | None = None
    """Option that must be 0 in the new run; dots separate nested options."""
