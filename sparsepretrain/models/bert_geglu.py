"""The 16-layer gated BERT of Cramming (arXiv:2212.14034), which arXiv:2404.01847 pre-trains.

A reimplementation of Cramming's architecture c5: LayerNorm (with bias) before each sublayer, after
the embedding and at the end; sinusoidal positions times one learned scale, initially 1/√width; no
biases in linear layers; the output layer is the embedding without a transform.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparsepretrain.errors import Problems
from sparsepretrain.kernels import geglu
from sparsepretrain.models._text import EncoderOptions, EncoderRecipe
from sparsepretrain.registry import register


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
    """Encoder of this package; see :class:`GEGLUForMaskedLM`."""

    Options = BertGEGLUOptions
    layers: ClassVar = {
        "ffn": ["*.ffn.dense_in", "*.ffn.dense_out"],
        "ffn_out": ["*.ffn.dense_out"],
        "attention": ["*.attention.qkv", "*.attention.proj"],
    }

    @staticmethod
    def build(options: BertGEGLUOptions) -> nn.Module:
        """Build the model with weights N(0, 0.02)."""
        return GEGLUForMaskedLM(options)


class Attention(nn.Module):
    """Multi-head self-attention over all positions, by SDPA."""

    def __init__(self, options: EncoderOptions) -> None:
        super().__init__()
        width = options.n_embd
        self.heads = options.n_head
        self.dropout = options.dropout
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.proj = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """Map (B, T, width) to (B, T, width); ``mask`` broadcasts to (B, heads, T, T)."""
        query, key, value = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.qkv(x).chunk(3, dim=-1)
        )
        drop = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, dropout_p=drop)
        return self.proj(mixed.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """GEGLU: value half first, gate half second."""

    def __init__(self, options: EncoderOptions) -> None:
        super().__init__()
        inner = int(options.ffn_width)
        self.dense_in = nn.Linear(options.n_embd, inner, bias=False)
        self.dense_out = nn.Linear(inner // 2, options.n_embd, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.dense_out(geglu(self.dense_in(x)))


class Block(nn.Module):
    """Pre-norm attention and FFN with residuals."""

    def __init__(self, options: EncoderOptions) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(options.n_embd, options.layer_norm_eps)
        self.attention = Attention(options)
        self.norm2 = nn.LayerNorm(options.n_embd, options.layer_norm_eps)
        self.ffn = FeedForward(options)
        self.dropout = nn.Dropout(options.dropout)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        x = x + self.dropout(self.attention(self.norm1(x), mask))
        return x + self.dropout(self.ffn(self.norm2(x)))


class Embedding(nn.Module):
    """Token embedding plus scaled sinusoids, normalized."""

    sinusoids: Tensor

    def __init__(self, options: EncoderOptions) -> None:
        super().__init__()
        width = options.n_embd
        self.tokens = nn.Embedding(options.vocab_size, width)
        self.scale = nn.Parameter(torch.full((1,), width**-0.5))
        # sines at even, cosines at odd positions (arXiv:1706.03762)
        place = torch.arange(options.n_positions, dtype=torch.float64)[:, None]
        rate = torch.exp(torch.arange(0, width, 2, dtype=torch.float64) * (-math.log(1e4) / width))
        waves = torch.stack([(place * rate).sin(), (place * rate).cos()], -1).flatten(1).float()
        self.register_buffer("sinusoids", waves, persistent=False)
        self.norm = nn.LayerNorm(width, options.layer_norm_eps)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.norm(self.tokens(tokens) + self.scale * self.sinusoids[: tokens.shape[1]])


class Encoder(nn.Module):
    """Embedding, blocks, final norm."""

    def __init__(self, options: EncoderOptions) -> None:
        super().__init__()
        self.embedding = Embedding(options)
        self.dropout = nn.Dropout(options.dropout)
        self.layers = nn.ModuleList(Block(options) for _ in range(options.n_layer))
        self.norm = nn.LayerNorm(options.n_embd, options.layer_norm_eps)

    def forward(self, tokens: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Map (B, T) int64 to hidden states (B, T, width); the mask (B, T) is 0 at padding."""
        mask = None if attention_mask is None else attention_mask.bool()[:, None, None, :]
        x = self.dropout(self.embedding(tokens))
        for layer in self.layers:
            x = layer(x, mask)
        return self.norm(x)


class GEGLUForMaskedLM(nn.Module):
    """The encoder with its embedding as output layer."""

    def __init__(self, options: EncoderOptions) -> None:
        super().__init__()
        self.encoder = Encoder(options)
        self.decoder = nn.Linear(options.n_embd, options.vocab_size, bias=False)
        self.decoder.weight = self.encoder.embedding.tokens.weight
        for module in self.encoder.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Return logits (n, vocab_size) at n flattened positions."""
        return self.decoder(self.encoder(tokens).flatten(0, 1)[positions])
