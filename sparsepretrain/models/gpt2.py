"""GPT-2 (Radford et al., 2019) on transformers' classes, with linear layers in place of Conv1D."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from torch import nn

from sparsepretrain.models import Headable
from sparsepretrain.models._text import (
    SIZES,
    Activation,
    TransformerOptions,
    attention_without_masks,
    transformers_name,
)
from sparsepretrain.registry import register


@dataclass(slots=True, kw_only=True)
class GPT2Options(TransformerOptions):
    """Architecture; names as in transformers' GPT2Config."""

    family: Literal["gpt2"]
    activation: Activation
    bias: bool


@register("model", "gpt2")
class GPT2(Headable):
    """GPT2LMHeadModel of transformers."""

    Options = GPT2Options
    causal = True
    layers: ClassVar = {
        "ffn": ["*.mlp.c_fc", "*.mlp.c_proj"],
        "ffn_out": ["*.mlp.c_proj"],
        "attention": ["*.attn.c_attn", "*.attn.c_proj"],
    }

    @staticmethod
    def build(options: GPT2Options) -> nn.Module:
        """Build a GPT2LMHeadModel with nanoGPT's initialization.

        Weights N(0, 0.02), residual projections N(0, 0.02/√(2·layers)).
        """
        from transformers import GPT2Config
        from transformers.models.gpt2.modeling_gpt2 import GPT2LMHeadModel
        from transformers.pytorch_utils import Conv1D

        config = GPT2Config(
            **{key: getattr(options, key) for key in SIZES},
            n_inner=int(options.ffn_width),
            activation_function=transformers_name(options.activation),
            resid_pdrop=options.dropout,
            embd_pdrop=options.dropout,
            attn_pdrop=options.dropout,
            use_cache=False,
            bos_token_id=None,
            eos_token_id=None,
        )
        config._attn_implementation = attention_without_masks()
        model = GPT2LMHeadModel(config)
        for parent in list(model.modules()):
            for name, child in list(parent.named_children()):
                if isinstance(child, Conv1D):
                    setattr(parent, name, linear_from(child, bias=options.bias))
                elif isinstance(child, nn.LayerNorm) and not options.bias:
                    child.register_parameter("bias", None)
        return model


def linear_from(conv: Any, *, bias: bool = True) -> nn.Linear:
    """Return nn.Linear with a copy of a Conv1D, which stores (in_features, out_features)."""
    width_in, width_out = conv.weight.shape
    linear = nn.Linear(width_in, width_out, bias=bias, device="meta")
    linear.weight = nn.Parameter(conv.weight.detach().t().contiguous())
    if bias:
        linear.bias = nn.Parameter(conv.bias.detach().clone())
    return linear
