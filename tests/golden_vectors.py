"""The published functions' inputs and outputs, as tensors."""

from pathlib import Path

import numpy as np
import torch

FOLDER = Path(__file__).parent / "golden"


def load(name: str) -> dict[str, torch.Tensor]:
    """All arrays of one file."""
    with np.load(FOLDER / f"{name}.npz") as arrays:
        return {k: torch.from_numpy(np.asarray(v)) for k, v in arrays.items()}
