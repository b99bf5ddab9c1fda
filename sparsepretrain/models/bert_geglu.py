"""The 16-layer gated BERT of Cramming (arXiv:2212.14034), which arXiv:2404.01847 pre-trains."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from sparsepretrain.models._encoder import Encoder, EncoderOptions
from sparsepretrain.registry import register

if TYPE_CHECKING:
    from torch import Tensor, nn


@dataclass(slots=True, kw_only=True)
class BertGEGLUOptions(EncoderOptions):
    """Architecture c5: pre-LayerNorm, scaled sinusoids, GEGLU, no biases in linear layers.

    ``n_inner`` counts value and gate: the second FFN layer has ``n_inner / 2`` in_features.
    """

    family: Literal["bert_geglu"]

    def problems(self) -> Iterator[tuple[str, str]]:
        """Range errors as (key, message)."""
        yield from EncoderOptions.problems(self)
        if self.ffn_width % 1 == 0 and self.ffn_width % 2:
            width = f"{self.ffn_width:g}"
            yield "n_inner", f"must split into value and gate, got an FFN width of {width}"
        if self.n_embd % 2:
            yield "n_embd", f"must be even (sines and cosines), got {self.n_embd}"


@register("model", "bert_geglu")
class BertGEGLU(Encoder):
    """Builds the model and knows its layers by role."""

    Options = BertGEGLUOptions

    @staticmethod
    def roles(options: BertGEGLUOptions) -> dict[str, list[str]]:
        """Aliases of ``sparsity.targets``."""
        return {
            "ffn": ["*.ffn.dense_in", "*.ffn.dense_out"],
            "ffn_out": ["*.ffn.dense_out"],
            "attention": ["*.attention.qkv", "*.attention.proj"],
            "all": ["*.ffn.dense_in", "*.ffn.dense_out", "*.attention.qkv", "*.attention.proj"],
        }

    @staticmethod
    def build(options: BertGEGLUOptions) -> nn.Module:
        """The model with weights drawn from torch's global generator: N(0, 0.02).

        Under ``torch.device("meta")`` nothing is allocated.
        """
        from sparsepretrain.models._geglu_encoder import GEGLUForMaskedLM

        return GEGLUForMaskedLM(
            vocab_size=options.vocab_size,
            positions=options.n_positions,
            width=options.n_embd,
            layers=options.n_layer,
            heads=options.n_head,
            inner=int(options.ffn_width),
            eps=options.layer_norm_eps,
            dropout=options.dropout,
        )

    @staticmethod
    def encode(model: nn.Module, tokens: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Last hidden states (batch, length, n_embd); the mask has 0 where there is padding."""
        encoder: nn.Module = model.encoder  # type: ignore[assignment]
        hidden: Tensor = encoder(tokens, attention_mask)
        return hidden
