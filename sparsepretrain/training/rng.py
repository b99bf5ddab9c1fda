"""The global random generators, which a run never relies on beyond one forward and backward."""

from __future__ import annotations

import random

import numpy as np
import torch


def seed_all(seed: int) -> None:
    """Seed Python's, NumPy's and torch's generators; NumPy's takes 32 bits of ``seed``."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def seed_draws(seed: int, step: int, micro: int) -> None:
    """Make dropout and the like in one micro-batch a function of these three.

    So there is no generator state to save, and an evaluation in between changes nothing.
    """
    seed_all(int(np.random.SeedSequence([seed, step, micro]).generate_state(1, np.uint64)[0]))
