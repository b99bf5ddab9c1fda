"""Llama (arXiv:2302.13971) on transformers' classes: RMSNorm, rotary positions, gated FFN."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from torch import nn

from sparsepretrain.models import Headable
from sparsepretrain.models._text import (
    Activation,
    TransformerOptions,
    attention_without_masks,
    transformers_name,
)
from sparsepretrain.registry import register


@dataclass(slots=True, kw_only=True)
class LlamaOptions(TransformerOptions):
    """Architecture; names as for GPT-2."""

    family: Literal["llama"]
    n_inner: Annotated[int, "> 0"]
    activation: Activation
    rms_norm_eps: Annotated[float, "> 0"]


@register("model", "llama")
class Llama(Headable):
    """LlamaForCausalLM of transformers, with untied embeddings and no grouped queries."""

    Options = LlamaOptions
    causal = True
    layers: ClassVar = {
        "ffn": ["*.mlp.gate_proj", "*.mlp.up_proj", "*.mlp.down_proj"],
        "ffn_out": ["*.mlp.down_proj"],
        "attention": [f"*.self_attn.{name}_proj" for name in "qkvo"],
    }
    # the backbone of LlamaForQuestionAnswering alone is called transformer
    renamed: ClassVar = {"transformer.": "model."}

    @staticmethod
    def build(options: LlamaOptions) -> nn.Module:
        """Build a LlamaForCausalLM with weights N(0, 0.02), transformers' default.

        The FFN is ``down_proj(act(gate_proj(x)) · up_proj(x))``. ``kernels.swiglu`` is not used: it
        takes gate and up as one tensor, and joining them would copy both.
        """
        from transformers import LlamaConfig
        from transformers.models.llama.modeling_llama import LlamaForCausalLM

        config = LlamaConfig(
            vocab_size=options.vocab_size,
            hidden_size=options.n_embd,
            intermediate_size=int(options.ffn_width),
            num_hidden_layers=options.n_layer,
            num_attention_heads=options.n_head,
            max_position_embeddings=options.n_positions,
            hidden_act=transformers_name(options.activation),
            rms_norm_eps=options.rms_norm_eps,
            attention_dropout=options.dropout,
            tie_word_embeddings=False,
            use_cache=False,
            bos_token_id=None,
            eos_token_id=None,
        )
        config._attn_implementation = attention_without_masks()
        return LlamaForCausalLM(config)
