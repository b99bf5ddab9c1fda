"""What recipes of token models share; free of torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal

if TYPE_CHECKING:
    from torch import Tensor, nn

Activation = Literal["gelu", "gelu_tanh", "relu", "relu2", "silu"]
"""What stands between the two layers of an FFN; ``gelu`` is the exact one, ``relu2`` relu(x)²."""

TRANSFORMERS_NAMES: dict[str, str] = {"gelu_tanh": "gelu_pytorch_tanh"}
"""Those of :data:`Activation` that transformers calls by another name."""

Head = Literal["labels", "spans"]
"""What is predicted from hidden states: classes of a sequence, or start and end at each token."""


class Headable:
    """A recipe whose models can carry a new head for fine-tuning.

    The first child of what ``build`` returns is the backbone; ``encode(model, tokens, mask)`` gives
    its hidden states, whatever else is in ``model``; the width is ``options.n_embd``.
    """

    causal: ClassVar[bool] = False
    """Whether a token sees only those before it: the last token then stands for the sequence."""

    @classmethod
    def build_headed(cls, options: Any, head: Head, outputs: int) -> nn.Module:
        """The backbone of ``build`` with a new head of ``outputs`` numbers.

        Args:
            options: of the model.
            head: what is predicted.
            outputs: classes, or 2 for spans.
        """
        from sparsepretrain.models._heads import Headed

        return Headed(cls, options, head, outputs)

    @staticmethod
    def vocabulary(options: Any) -> int:
        """Rows of the embedding."""
        return int(options.vocab_size)

    @staticmethod
    def label_scores(model: nn.Module, tokens: Tensor, mask: Tensor, second: Tensor) -> Tensor:
        """(batch, outputs) of a model with the head ``labels``.

        Args:
            model: of :meth:`build_headed`.
            tokens: (batch, length) int64, padded at the end.
            mask: (batch, length) bool, False at padding.
            second: (batch, length) bool, True at the second of two texts.
        """
        scores: Tensor = model(tokens, mask)
        return scores

    @staticmethod
    def span_scores(model: nn.Module, tokens: Tensor, mask: Tensor, second: Tensor) -> Tensor:
        """(batch, length, 2) of a model with the head ``spans``; see :meth:`label_scores`."""
        scores: Tensor = model(tokens, mask)
        return scores
