"""What tasks on windows of one token stream share."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from sparsepretrain.tasks import Task

if TYPE_CHECKING:
    from sparsepretrain.data import TokenData


class WindowTask(Task):
    """A sample is a window of ``options.sequence_length`` tokens; documents are packed."""

    kind = "text"
    complete: ClassVar[bool]
    """Whether a full evaluation also takes the shorter windows at the ends of a split."""

    def __init__(self, options: Any, model: Any, data: Any, seed: int) -> None:
        super().__init__(options, model, data, seed)
        self._windows: dict[str, Any] = {}

    def open_data(
        self, splits: Sequence[str], on_progress: Callable[[Any], None] | None = None
    ) -> None:
        """Open the prepared tokens; offline sources are prepared when missing."""
        from sparsepretrain.data import load, windows

        tokens = load(self.data_options, on_progress=on_progress)
        self._windows = {
            split: windows(
                tokens,
                split,
                self.options.sequence_length,
                self.order_seed(split),
                shuffled=True,
                replacement=self.replacement and split == "train",
                complete=self.complete and split != "train",
            )
            for split in splits
        }
        self.fingerprint = tokens.fingerprint
        self.tokenizer_file = tokens.tokenizer_file
        self.opened(tokens)

    @property
    def replacement(self) -> bool:
        """Whether each training window is drawn for itself, from anywhere in the text."""
        return False

    def opened(self, tokens: TokenData) -> None:
        """Hook: look at the data."""

    def order_seed(self, split: str) -> int:
        """Held-out windows are scattered over the split, the same ones for every seed of a run."""
        return self.seed if split == "train" else 0

    def samples(self, split: str) -> int:
        """Windows in one pass."""
        return int(self._windows[split].count)


def perplexity(loss: float) -> float:
    """Exp of a mean negative log likelihood in nats; infinite where that overflows."""
    return math.exp(loss) if loss < 700 else math.inf
