"""One-shot pruning to N:M with calibration data: masks without training."""

from __future__ import annotations

from sparsepretrain.pruning.inputs import InputSums
from sparsepretrain.pruning.method import Pruned, PruningMethod, PruningOptions, ScoreMethod

__all__ = ["InputSums", "Pruned", "PruningMethod", "PruningOptions", "ScoreMethod"]
