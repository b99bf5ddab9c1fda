"""Modules on top of a backbone: masked-token output and fine-tuning heads."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.bert import modeling_bert

from sparsepretrain.models import Head, Headable


class BertForMaskedLM(modeling_bert.BertForMaskedLM):
    """BertForMaskedLM of transformers with optional output positions.

    The class name stays, since ``save_pretrained`` writes it into the config.
    """

    def forward(self, *args: Any, positions: Tensor | None = None, **kwargs: Any) -> Any:
        """Return transformers' output, or logits (n, vocab_size) at n flattened positions.

        Over all positions the output layer of BERT-base takes 21 % of the FLOPs, although with 15 %
        masked tokens the loss ignores most logits.
        """
        if positions is None:
            return super().forward(*args, **kwargs)
        hidden = self.bert(*args, **kwargs).last_hidden_state
        return self.cls(hidden.flatten(0, 1)[positions])


class Headed(nn.Module):
    """Backbone under its name in the language model, with a new head.

    Heads have transformers' names: ``score`` on the last token of a causal model, ``classifier`` on
    the pooled first token of others, ``qa_outputs`` on every token.
    """

    def __init__(self, recipe: type[Headable], options: Any, head: Head, outputs: int) -> None:
        super().__init__()
        name, backbone = next(recipe.build(options).named_children())
        self.add_module(name, backbone)
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
        """Return (batch, outputs) for labels, (batch, length, outputs) for spans."""
        # causal attention never sees the padding at the end
        hidden = self._recipe.encode(self, tokens, None if self._recipe.causal else mask)
        if hasattr(self, "qa_outputs"):
            return self.qa_outputs(hidden)
        if self._recipe.causal:
            return self.score(last_token(hidden, mask))
        return self.classifier(self.dropout(torch.tanh(self.pooler(hidden[:, 0]))))


def last_token(hidden: Tensor, mask: Tensor) -> Tensor:
    """Return the states (batch, width) of the last token before the padding."""
    rows = torch.arange(len(hidden), device=hidden.device)
    return hidden[rows, mask.sum(dim=1) - 1]


def _linear(width: int, outputs: int, *, bias: bool = True) -> nn.Linear:
    """Build a layer with weights N(0, 0.02), as in BERT and GPT-2."""
    layer = nn.Linear(width, outputs, bias=bias)
    nn.init.normal_(layer.weight, std=0.02)
    if bias:
        nn.init.zeros_(layer.bias)
    return layer
