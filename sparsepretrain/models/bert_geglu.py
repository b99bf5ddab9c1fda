"""The 16-layer gated BERT of Cramming (arXiv:2212.14034), which arXiv:2404.01847 pre-trains."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from sparsepretrain.errors import Problems
from sparsepretrain.models._text import EncoderOptions, EncoderRecipe
from sparsepretrain.registry import register

if TYPE_CHECKING:
    from torch import nn


@dataclass(slots=True, kw_only=True)
class BertGEGLUOptions(EncoderOptions):
    """Architecture c5: pre-LayerNorm, scaled sinusoids, GEGLU, no biases in linear layers.

    ``n_inner`` counts value and gate: the second FFN layer has ``n_inner / 2`` in_features.
    """

    family: Literal["bert_geglu"]

    def problems(self) -> Problems:
        yield from EncoderOptions.problems(self)
        if self.ffn_width % 1 == 0 and self.ffn_width % 2:
            width = f"{self.ffn_width:g}"
            yield "n_inner", f"must split into value and gate, got an FFN width of {width}"
        if self.n_embd % 2:
            yield "n_embd", f"must be even (sines and cosines), got {self.n_embd}"


@register("model", "bert_geglu")
class BertGEGLU(EncoderRecipe):
    """Encoder of this package, see ``models._geglu_encoder``."""

    Options = BertGEGLUOptions
    layers: ClassVar = {
        "ffn": ["*.ffn.dense_in", "*.ffn.dense_out"],
        "ffn_out": ["*.ffn.dense_out"],
        "attention": ["*.attention.qkv", "*.attention.proj"],
    }

    @staticmethod
    def build(options: BertGEGLUOptions) -> nn.Module:
        """Build the model with weights N(0, 0.02)."""
        from sparsepretrain.models._geglu_encoder import GEGLUForMaskedLM

        return GEGLUForMaskedLM(options)
