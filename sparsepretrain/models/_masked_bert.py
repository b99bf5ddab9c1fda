"""transformers' BERT with an output layer that can be asked for some positions only."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.models.bert import modeling_bert


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
