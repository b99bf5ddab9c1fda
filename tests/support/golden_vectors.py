"""The published functions' inputs and outputs, as tensors."""

import numpy as np
import torch

from support import TESTS

FOLDER = TESTS / "golden"


def load(name: str) -> dict[str, torch.Tensor]:
    """All arrays of one file."""
    with np.load(FOLDER / f"{name}.npz") as arrays:
        return {k: torch.from_numpy(np.asarray(v)) for k, v in arrays.items()}
