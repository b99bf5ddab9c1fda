"""The modules of ``bert_geglu``: architecture c5 of Cramming, written anew.

What the architecture file of Cramming says: LayerNorm (with bias) before each sublayer, after the
embedding and at the end; sinusoidal positions times one learned scale that starts at 1/√width;
no biases in linear layers, no transform before the output layer, which is the embedding.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparsepretrain.kernels import geglu


class Attention(nn.Module):
    """Multi-head self-attention over all positions, by SDPA."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.proj = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """(B, T, width) -> the same; ``mask`` broadcasts to (B, heads, T, T), True: visible."""
        query, key, value = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.qkv(x).chunk(3, dim=-1)
        )
        drop = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, dropout_p=drop)
        out: Tensor = self.proj(mixed.transpose(1, 2).flatten(2))
        return out


class FeedForward(nn.Module):
    """GEGLU: value half first, gate half second."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.dense_in = nn.Linear(width, inner, bias=False)
        self.dense_out = nn.Linear(inner // 2, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, width) -> the same."""
        out: Tensor = self.dense_out(geglu(self.dense_in(x)))
        return out


class Block(nn.Module):
    """Attention and FFN, each after a norm and around a residual."""

    def __init__(self, width: int, heads: int, inner: int, eps: float, dropout: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, eps)
        self.attention = Attention(width, heads, dropout)
        self.norm2 = nn.LayerNorm(width, eps)
        self.ffn = FeedForward(width, inner)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """(B, T, width) -> the same."""
        x = x + self.dropout(self.attention(self.norm1(x), mask))
        out: Tensor = x + self.dropout(self.ffn(self.norm2(x)))
        return out


class Embedding(nn.Module):
    """Tokens, plus sinusoids times a learned scale, normalised."""

    sinusoids: Tensor

    def __init__(self, vocab_size: int, positions: int, width: int, eps: float) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab_size, width)
        self.scale = nn.Parameter(torch.full((1,), width**-0.5))
        self.register_buffer("sinusoids", _sinusoids(positions, width), persistent=False)
        self.norm = nn.LayerNorm(width, eps)

    def forward(self, tokens: Tensor) -> Tensor:
        """(B, T) int64 -> (B, T, width)."""
        x: Tensor = self.norm(self.tokens(tokens) + self.scale * self.sinusoids[: tokens.shape[1]])
        return x


class Encoder(nn.Module):
    """Embedding, blocks, final norm."""

    def __init__(
        self,
        vocab_size: int,
        positions: int,
        width: int,
        layers: int,
        heads: int,
        inner: int,
        eps: float,
        dropout: float,
    ) -> None:
        super().__init__()
        self.embedding = Embedding(vocab_size, positions, width, eps)
        self.dropout = nn.Dropout(dropout)
        self.layers = nn.ModuleList(Block(width, heads, inner, eps, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width, eps)

    def forward(self, tokens: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """(B, T) int64 -> hidden states (B, T, width).

        Args:
            tokens: T is at most the number of positions.
            attention_mask: (B, T), 0 at padding, which no position then attends to.
        """
        mask = None if attention_mask is None else attention_mask.bool()[:, None, None, :]
        x = self.dropout(self.embedding(tokens))
        for layer in self.layers:
            x = layer(x, mask)
        out: Tensor = self.norm(x)
        return out


class GEGLUForMaskedLM(nn.Module):
    """The encoder with its embedding as output layer."""

    def __init__(self, *, vocab_size: int, width: int, **options: int | float) -> None:
        super().__init__()
        self.encoder = Encoder(vocab_size, width=width, **options)  # type: ignore[arg-type]
        self.decoder = nn.Linear(width, vocab_size, bias=False)
        self.decoder.weight = self.encoder.embedding.tokens.weight
        for module in self.encoder.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

    def forward(
        self,
        tokens: Tensor,
        attention_mask: Tensor | None = None,
        positions: Tensor | None = None,
    ) -> Tensor:
        """Logits (B, T, vocab_size), or (n, vocab_size) at n places of the flattened (B, T)."""
        hidden: Tensor = self.encoder(tokens, attention_mask)
        if positions is not None:
            hidden = hidden.flatten(0, 1)[positions]
        logits: Tensor = self.decoder(hidden)
        return logits


def _sinusoids(positions: int, width: int) -> Tensor:
    """(positions, width) fp32: sines at even, cosines at odd places (arXiv:1706.03762)."""
    place = torch.arange(positions, dtype=torch.float64)[:, None]
    rate = torch.exp(torch.arange(0, width, 2, dtype=torch.float64) * (-math.log(1e4) / width))
    return torch.stack([(place * rate).sin(), (place * rate).cos()], -1).flatten(1).float()
