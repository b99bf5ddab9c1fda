"""BERT whose output layer sees the masked positions only."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.models.bert import modeling_bert


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
