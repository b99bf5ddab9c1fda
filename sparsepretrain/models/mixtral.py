"""Mixtral (arXiv:2401.04088) on transformers' classes: a Llama whose FFNs are experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from torch import nn

from sparsepretrain.errors import Problems
from sparsepretrain.models import Headable
from sparsepretrain.models._text import (
    Activation,
    TransformerOptions,
    attention_without_masks,
    transformers_name,
)
from sparsepretrain.registry import register


@dataclass(slots=True, kw_only=True)
class MixtralOptions(TransformerOptions):
    """Architecture; names as for GPT-2."""

    family: Literal["mixtral"]
    n_inner: Annotated[int, "> 0"]
    """Width of each expert before ``ffn_factor``."""
    experts: Annotated[int, "> 1"]
    """Experts of a block."""
    experts_per_token: Annotated[int, "> 0"]
    """Experts that a token is sent to."""
    router_loss: Annotated[float, "≥ 0"]
    """Factor of the load-balancing loss (arXiv:2101.03961, equations 4 to 6)."""
    activation: Activation
    rms_norm_eps: Annotated[float, "> 0"]

    def problems(self) -> Problems:
        yield from TransformerOptions.problems(self)
        if self.experts_per_token > self.experts:
            limit = f"must be at most model.experts ({self.experts})"
            yield "experts_per_token", f"{limit}, got {self.experts_per_token}"


@register("model", "mixtral")
class Mixtral(Headable):
    """MixtralForCausalLM of transformers, with untied embeddings and no grouped queries."""

    Options = MixtralOptions
    causal = True
    layers: ClassVar = {
        "ffn": ["*.experts.gate_up_proj", "*.experts.down_proj"],
        "ffn_out": ["*.experts.down_proj"],
        "attention": [f"*.self_attn.{name}_proj" for name in "qkvo"],
    }
    # the backbone of MixtralForQuestionAnswering alone is called transformer
    renamed: ClassVar = {"transformer.": "model."}

    @staticmethod
    def router_loss(options: Any, model: nn.Module) -> float:
        factor: float = options.router_loss
        return factor

    @staticmethod
    def build(options: MixtralOptions) -> nn.Module:
        """Build a MixtralForCausalLM with weights N(0, 0.02), transformers' default."""
        from transformers import MixtralConfig
        from transformers.models.mixtral.modeling_mixtral import MixtralForCausalLM

        config = MixtralConfig(
            vocab_size=options.vocab_size,
            hidden_size=options.n_embd,
            intermediate_size=int(options.ffn_width),
            num_hidden_layers=options.n_layer,
            num_attention_heads=options.n_head,
            num_key_value_heads=options.n_head,
            max_position_embeddings=options.n_positions,
            num_local_experts=options.experts,
            num_experts_per_tok=options.experts_per_token,
            router_aux_loss_coef=options.router_loss,
            hidden_act=transformers_name(options.activation),
            rms_norm_eps=options.rms_norm_eps,
            attention_dropout=options.dropout,
            sliding_window=None,
            tie_word_embeddings=False,
            use_cache=False,
            bos_token_id=None,
            eos_token_id=None,
        )
        config._attn_implementation = attention_without_masks()
        return MixtralForCausalLM(config)
