"""GPT-2 (Radford et al., 2019) on transformers' classes, with linear layers in place of Conv1D."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from sparsepretrain.models._recipe import TRANSFORMERS_NAMES, Activation, Headable
from sparsepretrain.registry import register

if TYPE_CHECKING:
    from torch import Tensor, nn


@dataclass(slots=True, kw_only=True)
class GPT2Options:
    """Architecture; names as in transformers' GPT2Config."""

    name: str
    family: Literal["gpt2"]
    vocab_size: int
    """Rows of the embedding, which is also the output layer; may exceed the tokenizer's size."""
    n_positions: int
    """Longest sequence."""
    n_embd: int
    """Width."""
    n_layer: int
    n_head: int
    n_inner: int | None
    """FFN width; null: 4·n_embd."""
    ffn_factor: float
    """Factor of the FFN width; 0.5 is the baseline "Half" of arXiv:2404.01847."""
    activation: Activation
    """Of the FFN; the papers' runs have the exact GELU, as nanoGPT has."""
    bias: bool
    """Biases in linear layers and norms; the papers' runs have none."""
    dropout: float
    activation_checkpointing: bool
    """Recompute each block in the backward: less memory, about a third more time."""

    @property
    def ffn_width(self) -> float:
        """What the FFN's width comes to."""
        full = 4 * self.n_embd if self.n_inner is None else self.n_inner
        return full * self.ffn_factor

    def problems(self) -> Iterator[tuple[str, str]]:
        """Range errors as (key, message)."""
        for key in ("vocab_size", "n_positions", "n_embd", "n_layer", "n_head"):
            if getattr(self, key) <= 0:
                yield key, f"must be > 0, got {getattr(self, key)}"
        if self.n_head > 0 and self.n_embd % self.n_head:
            yield "n_head", f"must divide model.n_embd ({self.n_embd}), got {self.n_head}"
        if self.n_inner is not None and self.n_inner <= 0:
            yield "n_inner", f"must be > 0 or null, got {self.n_inner}"
        elif self.n_embd > 0 and (self.ffn_width < 1 or self.ffn_width % 1):
            yield "ffn_factor", f"must make the FFN a whole width, got {self.ffn_width:g}"
        if not 0 <= self.dropout < 1:
            yield "dropout", f"must lie in [0, 1), got {self.dropout}"


@register("model", "gpt2")
class GPT2(Headable):
    """Builds the model and knows its layers by role."""

    Options = GPT2Options
    tasks: ClassVar[frozenset[str]] = frozenset(
        {"causal_lm", "sequence_classification", "question_answering"}
    )
    """Names of the tasks that it can be built for."""
    causal = True

    @staticmethod
    def roles(options: GPT2Options) -> dict[str, list[str]]:
        """Aliases of ``sparsity.targets``."""
        return {
            "ffn": ["*.mlp.c_fc", "*.mlp.c_proj"],
            "ffn_out": ["*.mlp.c_proj"],
            "attention": ["*.attn.c_attn", "*.attn.c_proj"],
            "all": ["*.mlp.c_fc", "*.mlp.c_proj", "*.attn.c_attn", "*.attn.c_proj"],
        }

    @staticmethod
    def build(options: GPT2Options) -> nn.Module:
        """A GPT2LMHeadModel with weights drawn from torch's global generator.

        N(0, 0.02), residual projections N(0, 0.02/√(2·layers)), as in nanoGPT. Under
        ``torch.device("meta")`` nothing is allocated.
        """
        from torch import nn
        from transformers import AttentionInterface, GPT2Config
        from transformers.integrations.sdpa_attention import sdpa_attention_forward
        from transformers.models.gpt2.modeling_gpt2 import GPT2LMHeadModel
        from transformers.pytorch_utils import Conv1D

        # Under a name of its own no mask is built: SDPA's causal flag is enough for full sequences,
        # and the search for packed ones would synchronise with the GPU in every forward
        AttentionInterface.register("causal_sdpa", sdpa_attention_forward)
        config = GPT2Config(
            vocab_size=options.vocab_size,
            n_positions=options.n_positions,
            n_embd=options.n_embd,
            n_layer=options.n_layer,
            n_head=options.n_head,
            n_inner=int(options.ffn_width),
            activation_function=TRANSFORMERS_NAMES.get(options.activation, options.activation),
            resid_pdrop=options.dropout,
            embd_pdrop=options.dropout,
            attn_pdrop=options.dropout,
            use_cache=False,
            bos_token_id=None,
            eos_token_id=None,
        )
        config._attn_implementation = "causal_sdpa"
        model = GPT2LMHeadModel(config)
        for parent in list(model.modules()):
            for name, child in list(parent.named_children()):
                if isinstance(child, Conv1D):
                    setattr(parent, name, _linear_from(child, options.bias))
                elif isinstance(child, nn.LayerNorm) and not options.bias:
                    child.register_parameter("bias", None)
        if options.activation_checkpointing:
            # the second name is the older one, which newer versions warn about
            enable = getattr(model, "activation_checkpointing_enable", None)
            (enable or model.gradient_checkpointing_enable)({"use_reentrant": False})
        return model

    @staticmethod
    def logits(model: nn.Module, tokens: Tensor) -> Tensor:
        """(batch, length) int64 -> (batch, length, vocab_size)."""
        logits: Tensor = model(input_ids=tokens, use_cache=False).logits
        return logits

    @staticmethod
    def encode(model: nn.Module, tokens: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Last hidden states (batch, length, n_embd); padding at the end needs no mask."""
        decoder: nn.Module = model.transformer  # type: ignore[assignment]
        hidden: Tensor = decoder(input_ids=tokens, use_cache=False).last_hidden_state
        return hidden


def _linear_from(conv: nn.Module, bias: bool) -> nn.Module:
    """nn.Linear with the weight of a Conv1D, which stores (in_features, out_features)."""
    import torch
    from torch import nn

    width_in, width_out = conv.weight.shape  # type: ignore[misc]
    with torch.device("meta"):
        linear = nn.Linear(width_in, width_out, bias=bias)
    linear.weight = nn.Parameter(conv.weight.detach().t().contiguous())  # type: ignore[operator]
    if bias:
        linear.bias = nn.Parameter(conv.bias.detach().clone())  # type: ignore[operator]
    return linear
