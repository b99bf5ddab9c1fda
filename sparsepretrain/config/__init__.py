"""Compose, check and freeze the configuration of a run; never imports torch."""

from sparsepretrain.config.compose import compose
from sparsepretrain.config.validate import load, validate

__all__ = ["compose", "load", "validate"]
