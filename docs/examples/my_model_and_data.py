"""A model, a source of data and an optimizer of one's own, each with its YAML in my_configs/.

sparsepretrain train --config-dir docs/examples/my_configs \\
    plugins=[docs/examples/my_model_and_data.py] model=my_averages
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from sparsepretrain.data.source import Document, Shard, Source, TokenOptions
from sparsepretrain.models import Recipe
from sparsepretrain.registry import register


@dataclass(slots=True, kw_only=True)
class AveragesOptions:
    """The keys of configs/model/my_averages.yaml."""

    name: str
    family: str
    vocab_size: Annotated[int, "> 0"]
    n_positions: Annotated[int, "> 0"]
    """Longest sequence; the task checks its own length against it."""
    width: Annotated[int, "> 0"]


@register("model", "my_averages")
class Averages(Recipe):
    """Predicts a byte from itself and the mean of those before it."""

    Options = AveragesOptions
    tasks = frozenset({"causal_lm"})
    layers: ClassVar = {"ffn": ["up", "down"], "ffn_out": ["down"], "attention": []}

    @staticmethod
    def build(options: AveragesOptions) -> nn.Module:
        """An embedding, an FFN and an output layer."""
        return nn.ModuleDict(
            {
                "embedding": nn.Embedding(options.vocab_size, options.width),
                "up": nn.Linear(2 * options.width, 4 * options.width),
                "down": nn.Linear(4 * options.width, options.width),
                "output": nn.Linear(options.width, options.vocab_size),
            }
        )

    @staticmethod
    def logits(model: nn.Module, tokens: Tensor) -> Tensor:
        """(batch, length) int64 -> (batch, length, vocab_size)."""
        x = model.embedding(tokens)
        counts = torch.arange(1, x.shape[1] + 1, device=x.device).unsqueeze(-1)
        seen = torch.cat([x, x.cumsum(1) / counts], dim=-1)
        return model.output(x + model.down(torch.relu(model.up(seen))))


@dataclass(slots=True, kw_only=True)
class CountingOptions(TokenOptions):
    """The keys of configs/data/my_counting.yaml."""

    documents: Annotated[int, "≥ 2"]
    """Of the train split; one in ten more is held out."""


@register("source", "my_counting")
class Counting(Source):
    """Documents that count: ``7 8 9 …``."""

    Options = CountingOptions
    offline = True
    unit = "documents"

    def state(self) -> list[Any]:
        """Nothing is read, so nothing can change."""
        return []

    def shards(self) -> list[Shard]:
        """One shard per split."""
        n = self.options.documents
        held_out = max(1, n // 10)
        return [
            Shard("train", n, (0, n)),
            Shard("validation", held_out, (n, n + held_out)),
        ]

    def documents(self, shard: Shard) -> Iterator[Document]:
        """The documents of a shard."""
        for start in range(*shard.items):
            yield " ".join(str(start + i) for i in range(50)).encode(), True


@dataclass(slots=True, kw_only=True)
class SignOptions:
    """The keys of configs/optim/my_sign.yaml; every optimizer has name, lr and weight_decay."""

    name: str
    lr: Annotated[float, "> 0"]
    weight_decay: Annotated[float, "≥ 0"]
    momentum: Annotated[float, "[0, 1)"]


@register("optimizer", "my_sign")
class Sign:
    """Steps along the sign of the momentum."""

    Options = SignOptions

    @staticmethod
    def build(groups: list[dict[str, Any]], options: SignOptions) -> Optimizer:
        """The optimizer over parameter groups, each with its weight decay."""

        class SignSGD(torch.optim.SGD):
            def step(self, closure: Any = None) -> Any:
                for group in self.param_groups:
                    for p in group["params"]:
                        if p.grad is not None:
                            p.grad = p.grad.sign()
                return super().step(closure)

        return SignSGD(groups, lr=options.lr, momentum=options.momentum)
