"""Heads for fine-tuning on any backbone."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from sparsepretrain.models._recipe import Head

DEVIATION = 0.02
"""Of the initial weights, as in BERT and GPT-2."""


class Headed(nn.Module):
    """A backbone under the name that it has in the language model, and a new head.

    Heads have the names of transformers' classes: ``score`` on the last token of a causal model,
    ``classifier`` on the pooled first token of others, ``qa_outputs`` on every token. The output
    layer of the language model is left out.
    """

    def __init__(self, recipe: Any, options: Any, head: Head, outputs: int) -> None:
        super().__init__()
        name, backbone = next(recipe.build(options).named_children())
        self.add_module(name, backbone)
        self.head = head
        self._recipe = recipe
        if head == "spans":
            self.qa_outputs = _linear(options.n_embd, outputs)
        elif recipe.causal:
            self.score = _linear(options.n_embd, outputs, bias=False)
        else:
            self.pooler = _linear(options.n_embd, options.n_embd)
            self.dropout = nn.Dropout(options.dropout)
            self.classifier = _linear(options.n_embd, outputs)

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        """(batch, outputs) for labels, (batch, length, outputs) for spans; see Headable."""
        # the padding at the end is seen by no token of a causal model
        hidden = self._recipe.encode(self, tokens, None if self._recipe.causal else mask)
        scores: Tensor
        if self.head == "spans":
            scores = self.qa_outputs(hidden)
        elif self._recipe.causal:
            scores = self.score(last_token(hidden, mask))
        else:
            pooled = torch.tanh(self.pooler(hidden[:, 0]))
            scores = self.classifier(self.dropout(pooled))
        return scores


def last_token(hidden: Tensor, mask: Tensor) -> Tensor:
    """(batch, width): the states of the last token that is not padding."""
    rows = torch.arange(len(hidden), device=hidden.device)
    return hidden[rows, mask.sum(dim=1) - 1]


def _linear(width: int, outputs: int, *, bias: bool = True) -> nn.Linear:
    layer = nn.Linear(width, outputs, bias=bias)
    nn.init.normal_(layer.weight, std=DEVIATION)
    if bias:
        nn.init.zeros_(layer.bias)
    return layer
