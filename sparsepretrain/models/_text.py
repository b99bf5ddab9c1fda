"""Shared code of text recipes: option fields and settings of transformers' classes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from torch import Tensor, nn

from sparsepretrain.errors import Problems
from sparsepretrain.models._recipe import Headable

SIZES = ("vocab_size", "n_positions", "n_embd", "n_layer", "n_head")
"""Keys that :class:`TransformerOptions` shares with transformers' GPT2Config."""

Activation = Literal["gelu", "gelu_tanh", "relu", "relu2", "silu"]
"""Activation of an FFN; ``gelu`` is the exact one, ``relu2`` is relu(x)²."""


def transformers_name(activation: Activation) -> str:
    """Return transformers' name of an activation."""
    return "gelu_pytorch_tanh" if activation == "gelu_tanh" else activation


def attention_without_masks() -> str:
    """Register SDPA under a name for which transformers builds no masks, and return the name.

    The causal flag suffices for full sequences, a 4-D mask for padding. To build masks transformers
    looks for padding and packed sequences, which synchronizes with the GPU in every forward.
    """
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    AttentionInterface.register("causal_sdpa", sdpa_attention_forward)
    return "causal_sdpa"


def ffn_problems(full: int, factor: float) -> Problems:
    """Check that an FFN of width ``full`` · ``factor`` has a whole number of neurons."""
    width = full * factor
    if full > 0 and (width < 1 or width % 1):
        yield "ffn_factor", f"must give an FFN width that is an integer ≥ 1, got {width:g}"


@dataclass(slots=True, kw_only=True)
class TransformerOptions:
    """Architecture; names as in transformers' GPT2Config."""

    name: str
    family: str
    vocab_size: Annotated[int, "> 0"]
    n_positions: Annotated[int, "> 0"]
    n_embd: Annotated[int, "> 0"]
    n_layer: Annotated[int, "> 0"]
    n_head: Annotated[int, "> 0"]
    n_inner: Annotated[int | None, "> 0"]
    """Width of the FFN before ``ffn_factor``; None: 4 · n_embd."""
    ffn_factor: float
    dropout: Annotated[float, "[0, 1)"]

    @property
    def ffn_width(self) -> float:
        """Width of the FFN."""
        return self._full_ffn * self.ffn_factor

    @property
    def _full_ffn(self) -> int:
        return 4 * self.n_embd if self.n_inner is None else self.n_inner

    def problems(self) -> Problems:
        if self.n_head > 0 and self.n_embd % self.n_head:
            yield "n_head", f"must divide model.n_embd ({self.n_embd}), got {self.n_head}"
        yield from ffn_problems(self._full_ffn, self.ffn_factor)


@dataclass(slots=True, kw_only=True)
class EncoderOptions(TransformerOptions):
    """Architecture of an encoder; names as for GPT-2."""

    n_inner: Annotated[int, "> 0"]
    layer_norm_eps: Annotated[float, "> 0"]


class EncoderRecipe(Headable):
    """Recipe of models that predict masked tokens and take other heads."""

    tasks: ClassVar[frozenset[str]] = frozenset(
        {"masked_lm", "sequence_classification", "question_answering"}
    )

    @staticmethod
    def logits(  # type: ignore[override]
        model: nn.Module, tokens: Tensor, positions: Tensor
    ) -> Tensor:
        """Map tokens (batch, length) and n flattened positions to (n, vocab_size)."""
        return model(tokens, positions=positions)
