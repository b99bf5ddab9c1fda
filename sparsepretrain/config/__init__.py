"""Composing, checking and freezing a run's configuration. Never imports torch."""

from sparsepretrain.config.compose import compose
from sparsepretrain.config.validate import load, validate

__all__ = ["compose", "load", "validate"]
