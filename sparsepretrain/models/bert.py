"""BERT (Devlin et al., arXiv:1810.04805) on transformers' classes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from sparsepretrain.models._encoder import Encoder, EncoderOptions
from sparsepretrain.models._recipe import TRANSFORMERS_NAMES, Activation
from sparsepretrain.registry import register

if TYPE_CHECKING:
    from torch import Tensor, nn


@dataclass(slots=True, kw_only=True)
class BertOptions(EncoderOptions):
    """As transformers' BertConfig: post-LayerNorm, learned positions, biases."""

    family: Literal["bert"]
    activation: Activation
    """Of the FFN and of the head that predicts tokens; BERT's is the exact GELU."""


@register("model", "bert")
class Bert(Encoder):
    """Builds the model and knows its layers by role."""

    Options = BertOptions

    @staticmethod
    def roles(options: BertOptions) -> dict[str, list[str]]:
        """Aliases of ``sparsity.targets``."""
        return {
            # the digit tells the FFN's output from layer.0.attention.output.dense
            "ffn": ["*.intermediate.dense", "*[0-9].output.dense"],
            "ffn_out": ["*[0-9].output.dense"],
            "attention": [
                "*.attention.self.query",
                "*.attention.self.key",
                "*.attention.self.value",
                "*.attention.output.dense",
            ],
            "all": ["*.encoder.layer.*.dense", "*.attention.self.*"],
        }

    @staticmethod
    def build(options: BertOptions) -> nn.Module:
        """A BertForMaskedLM with weights drawn from torch's global generator: N(0, 0.02).

        Under ``torch.device("meta")`` nothing is allocated.
        """
        from transformers import BertConfig

        from sparsepretrain.models._masked_bert import BertForMaskedLM

        config = BertConfig(
            vocab_size=options.vocab_size,
            max_position_embeddings=options.n_positions,
            hidden_size=options.n_embd,
            num_hidden_layers=options.n_layer,
            num_attention_heads=options.n_head,
            intermediate_size=int(options.ffn_width),
            hidden_act=TRANSFORMERS_NAMES.get(options.activation, options.activation),
            layer_norm_eps=options.layer_norm_eps,
            hidden_dropout_prob=options.dropout,
            attention_probs_dropout_prob=options.dropout,
            # packed text has no padding; with an index, that token's embedding would not learn
            pad_token_id=None,
        )
        config._attn_implementation = "sdpa"
        return BertForMaskedLM(config)

    @staticmethod
    def encode(model: nn.Module, tokens: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Last hidden states (batch, length, n_embd); the mask has 0 where there is padding."""
        encoder: nn.Module = model.bert  # type: ignore[assignment]
        hidden: Tensor = encoder(tokens, attention_mask=attention_mask).last_hidden_state
        return hidden
