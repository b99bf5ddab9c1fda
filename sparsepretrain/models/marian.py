"""Transformer-base (Vaswani et al., 2017) on transformers' Marian, initialized as in fairseq."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from torch import Tensor, nn

from sparsepretrain.errors import Problems
from sparsepretrain.models import Recipe
from sparsepretrain.models._text import (
    Activation,
    attention_without_masks,
    ffn_problems,
    transformers_name,
)
from sparsepretrain.registry import register

SAME = (
    "vocab_size", "max_position_embeddings", "d_model", "encoder_layers", "decoder_layers",
    "dropout", "attention_dropout", "activation_dropout",
)  # fmt: skip
"""Keys that :class:`MarianOptions` shares with transformers' MarianConfig."""


@dataclass(slots=True, kw_only=True)
class MarianOptions:
    """Architecture; names as in transformers' MarianConfig where that has them."""

    name: str
    family: Literal["marian"]
    vocab_size: Annotated[int, "> 0"]
    max_position_embeddings: Annotated[int, "> 0"]
    d_model: Annotated[int, "> 0"]
    encoder_layers: Annotated[int, "> 0"]
    decoder_layers: Annotated[int, "> 0"]
    attention_heads: Annotated[int, "> 0"]
    ffn_dim: Annotated[int, "> 0"]
    ffn_factor: float
    activation: Activation
    dropout: Annotated[float, "[0, 1)"]
    attention_dropout: Annotated[float, "[0, 1)"]
    activation_dropout: Annotated[float, "[0, 1)"]

    @property
    def ffn_width(self) -> float:
        """Width of the FFN."""
        return self.ffn_dim * self.ffn_factor

    def problems(self) -> Problems:
        if self.attention_heads > 0 and self.d_model % self.attention_heads:
            known = f"model.d_model ({self.d_model})"
            yield "attention_heads", f"must divide {known}, got {self.attention_heads}"
        yield from ffn_problems(self.ffn_dim, self.ffn_factor)


@register("model", "marian")
class Marian(Recipe):
    """MarianMTModel of transformers."""

    Options = MarianOptions
    tasks = frozenset({"translation"})
    layers: ClassVar = {
        "ffn": ["*.fc1", "*.fc2"],
        "ffn_out": ["*.fc2"],
        "attention": ["*_attn.?_proj", "*_attn.out_proj"],
    }

    @staticmethod
    def build(options: MarianOptions) -> nn.Module:
        """Build a MarianMTModel with fairseq's initialization.

        Post-norm, sinusoidal positions, one embedding for source, target and output, scaled by
        √d_model at the input. Embeddings N(0, 1/d_model), linear layers Xavier-uniform (query, key
        and value with gain 1/√2), biases 0. Padding is masked; there is no padding token.
        """
        from transformers import MarianConfig, MarianMTModel

        config = MarianConfig(
            **{key: getattr(options, key) for key in SAME},
            encoder_attention_heads=options.attention_heads,
            decoder_attention_heads=options.attention_heads,
            encoder_ffn_dim=int(options.ffn_width),
            decoder_ffn_dim=int(options.ffn_width),
            activation_function=transformers_name(options.activation),
            scale_embedding=True,
            share_encoder_decoder_embeddings=True,
            tie_word_embeddings=True,
            # a padding token's embedding would stay zero
            pad_token_id=None,
            eos_token_id=None,
            forced_eos_token_id=None,
            decoder_start_token_id=0,  # the task chooses tokens
        )
        config._attn_implementation = attention_without_masks()
        model = MarianMTModel(config)
        nn.init.normal_(model.model.shared.weight, std=options.d_model**-0.5)
        for name, module in model.named_modules():
            if isinstance(module, nn.Linear) and name != "lm_head":  # tied to the embedding
                halved = name.endswith(("q_proj", "k_proj", "v_proj"))
                nn.init.xavier_uniform_(module.weight, gain=2**-0.5 if halved else 1.0)
                nn.init.zeros_(module.bias)
        for stack in (model.model.encoder, model.model.decoder):
            # the sinusoids are constants, not parameters
            weight = stack.embed_positions.weight.detach()
            del stack.embed_positions.weight
            stack.embed_positions.register_buffer("weight", weight)
        return model

    @staticmethod
    def logits(model: nn.Module, source: Tensor, mask: Tensor, previous: Tensor) -> Tensor:
        """Return logits of the next target token, (rows, target length, vocab_size).

        Args:
            source: (rows, source length) int64.
            mask: (rows, source length) bool, False at padding.
            previous: (rows, target length) int64: start token, then the target without its last
                token; padding at the end.
        """
        return model(
            input_ids=source,
            attention_mask=mask[:, None, None],
            decoder_input_ids=previous,
            use_cache=False,
        ).logits

    @staticmethod
    def generate(
        model: nn.Module,
        source: Tensor,
        mask: Tensor,
        *,
        end: int,
        length: int,
        beams: int,
        length_penalty: float,
    ) -> list[list[int]]:
        """Return the best hypothesis of each row without its end token.

        ``end`` starts and ends a sentence. Hypotheses have at most ``length`` tokens and are
        ranked by log-probability / length^length_penalty.
        """
        from transformers import GenerationConfig

        search: dict[str, Any] = {"length_penalty": length_penalty} if beams > 1 else {}
        settings = GenerationConfig(
            num_beams=beams,
            do_sample=False,
            max_length=length + 1,  # the start token counts
            decoder_start_token_id=end,
            eos_token_id=end,
            pad_token_id=end,
            use_cache=True,
            **search,
        )
        config: Any = model.config
        before = config._attn_implementation
        config._attn_implementation = "sdpa"  # generate takes 2-D masks only
        try:
            ids: Tensor = model.generate(  # type: ignore[operator]
                source, attention_mask=mask.long(), generation_config=settings
            )
        finally:
            config._attn_implementation = before
        rows = ids[:, 1:].tolist()  # without the start token
        return [row[: row.index(end)] if end in row else row for row in rows]
