"""BERT (Devlin et al., arXiv:1810.04805), built from transformers' classes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import nn

from sparsepretrain.models._text import Activation, EncoderOptions, EncoderRecipe, transformers_name
from sparsepretrain.registry import register


@dataclass(slots=True, kw_only=True)
class BertOptions(EncoderOptions):
    """Architecture of BERT: post-LayerNorm, learned positions, biases."""

    family: Literal["bert"]
    activation: Activation


@register("model", "bert")
class Bert(EncoderRecipe):
    """BertForMaskedLM of transformers."""

    Options = BertOptions
    layers: ClassVar = {
        # the digit tells the FFN's output from layer.0.attention.output.dense
        "ffn": ["*.intermediate.dense", "*[0-9].output.dense"],
        "ffn_out": ["*[0-9].output.dense"],
        "attention": ["*.attention.self.*", "*.attention.output.dense"],
    }
    renamed: ClassVar = {"bert.pooler.dense.": "pooler."}

    @staticmethod
    def build(options: BertOptions) -> nn.Module:
        """Build a BertForMaskedLM with weights N(0, 0.02)."""
        from transformers import BertConfig

        from sparsepretrain.models._bert_masked import BertForMaskedLM

        config = BertConfig(
            vocab_size=options.vocab_size,
            max_position_embeddings=options.n_positions,
            hidden_size=options.n_embd,
            num_hidden_layers=options.n_layer,
            num_attention_heads=options.n_head,
            intermediate_size=int(options.ffn_width),
            hidden_act=transformers_name(options.activation),
            layer_norm_eps=options.layer_norm_eps,
            hidden_dropout_prob=options.dropout,
            attention_probs_dropout_prob=options.dropout,
            # packed text has no padding; a padding token's embedding would not be trained
            pad_token_id=None,
        )
        config._attn_implementation = "sdpa"
        return BertForMaskedLM(config)
