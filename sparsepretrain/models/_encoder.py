"""Options that every bidirectional encoder of this package has; torch-free."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from sparsepretrain.models._recipe import Headable

if TYPE_CHECKING:
    from torch import Tensor, nn


@dataclass(slots=True, kw_only=True)
class EncoderOptions:
    """Architecture; the same names as for GPT-2."""

    name: str
    family: str
    vocab_size: int
    """Rows of the embedding, which is also the output layer; may exceed the tokenizer's size."""
    n_positions: int
    """Longest sequence."""
    n_embd: int
    """Width."""
    n_layer: int
    n_head: int
    n_inner: int
    """FFN width: out_features of its first linear layer."""
    ffn_factor: float
    """Factor of the FFN width; 0.5 is the baseline "Half" of arXiv:2404.01847."""
    layer_norm_eps: float
    dropout: float
    """Probability, on embeddings, attention and residuals."""

    @property
    def ffn_width(self) -> float:
        """What the FFN's width comes to."""
        return self.n_inner * self.ffn_factor

    def problems(self) -> Iterator[tuple[str, str]]:
        """Range errors as (key, message)."""
        for key in ("vocab_size", "n_positions", "n_embd", "n_layer", "n_head", "n_inner"):
            if getattr(self, key) <= 0:
                yield key, f"must be > 0, got {getattr(self, key)}"
        if self.n_head > 0 and self.n_embd % self.n_head:
            yield "n_head", f"must divide model.n_embd ({self.n_embd}), got {self.n_head}"
        if self.n_inner > 0 and (self.ffn_width < 1 or self.ffn_width % 1):
            yield "ffn_factor", f"must make the FFN a whole width, got {self.ffn_width:g}"
        if self.layer_norm_eps <= 0:
            yield "layer_norm_eps", f"must be > 0, got {self.layer_norm_eps}"
        if not 0 <= self.dropout < 1:
            yield "dropout", f"must lie in [0, 1), got {self.dropout}"


class Encoder(Headable):
    """A recipe whose models predict masked tokens, and can carry another head."""

    tasks: ClassVar[frozenset[str]] = frozenset(
        {"masked_lm", "sequence_classification", "question_answering"}
    )
    """Names of the tasks that it can be built for."""

    @staticmethod
    def logits(model: nn.Module, tokens: Tensor, positions: Tensor) -> Tensor:
        """(batch, length) int64, (n) int64 places in it flattened -> (n, vocab_size)."""
        logits: Tensor = model(tokens, positions=positions)
        return logits
