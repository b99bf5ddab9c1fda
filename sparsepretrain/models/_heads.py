"""Modules on top of a backbone: an output layer for masked tokens, and heads for fine-tuning."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.bert import modeling_bert

from sparsepretrain.models import Head, Headable


class BertForMaskedLM(modeling_bert.BertForMaskedLM):
    """The class of the same name, which is what ``save_pretrained`` writes into the config.

    Names and shapes of parameters are those of transformers.
    """

    def forward(self, *args: Any, positions: Tensor | None = None, **kwargs: Any) -> Any:
        """As transformers', or logits (n, vocab_size) at n places of the flattened (B, T).

        With 15 % of the tokens masked, the output layer of BERT-base is 21 % of the products
        otherwise, most of them for logits that no loss reads.
        """
        if positions is None:
            return super().forward(*args, **kwargs)
        hidden = self.bert(*args, **kwargs).last_hidden_state
        return self.cls(hidden.flatten(0, 1)[positions])


class Headed(nn.Module):
    """A backbone under the name that it has in the language model, and a new head.

    Heads have the names of transformers' classes: ``score`` on the last token of a causal model,
    ``classifier`` on the pooled first token of others, ``qa_outputs`` on every token. The output
    layer of the language model is left out.
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
        """(batch, outputs) for labels, (batch, length, outputs) for spans; see Headable."""
        # the padding at the end is seen by no token of a causal model
        hidden = self._recipe.encode(self, tokens, None if self._recipe.causal else mask)
        if hasattr(self, "qa_outputs"):
            return self.qa_outputs(hidden)
        if self._recipe.causal:
            return self.score(last_token(hidden, mask))
        return self.classifier(self.dropout(torch.tanh(self.pooler(hidden[:, 0]))))


def last_token(hidden: Tensor, mask: Tensor) -> Tensor:
    """(batch, width): the states of the last token that is not padding."""
    rows = torch.arange(len(hidden), device=hidden.device)
    return hidden[rows, mask.sum(dim=1) - 1]


def _linear(width: int, outputs: int, *, bias: bool = True) -> nn.Linear:
    """N(0, 0.02), as in BERT and GPT-2."""
    layer = nn.Linear(width, outputs, bias=bias)
    nn.init.normal_(layer.weight, std=0.02)
    if bias:
        nn.init.zeros_(layer.bias)
    return layer
