"""Prepared data in memory."""

from pathlib import Path

import numpy as np

from sparsepretrain.data.tokens import TokenData


def token_data(splits, end=None, directory=Path("/prepared"), vocab_size=1 << 30):
    """Prepared data with the tokens of each split; ``end`` follows every document."""
    tokens = {split: np.asarray(ids) for split, ids in splits.items()}
    bounds = {
        split: np.unique([0, *np.flatnonzero(ids == end) + 1, len(ids)])
        for split, ids in tokens.items()
    }
    return TokenData("mine", directory, "f", vocab_size, tokens, None, end, bounds)
