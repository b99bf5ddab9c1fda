"""Dense model recipes, one module per family; see :class:`Recipe`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar, Literal

if TYPE_CHECKING:
    from torch import Tensor, nn

Head = Literal["labels", "spans"]
"""Prediction from hidden states: classes of a sequence, or start and end at each token."""


class Recipe(ABC):
    """Construction of a family's models, and the roles of their layers.

    A recipe is a registered class that is never instantiated. Configuration checks import its
    module, so it imports torch in functions only. Each of its tasks calls these functions:

    - ``causal_lm``: ``logits(model, tokens)``, (batch, length) int64 -> (batch, length, vocab_size)
    - ``masked_lm``: ``logits(model, tokens, positions)``, see ``models._text.EncoderRecipe``
    - ``image_classification``: ``logits(model, images)``, see ``models.timm_image``
    - ``regression``: ``predict(model, inputs)``, (batch, inputs) fp32 -> (batch, outputs)
    - ``translation``: ``logits`` and ``generate``, see ``models.marian``
    - ``sequence_classification`` and ``question_answering``: see :class:`Headable`
    """

    Options: ClassVar[type]
    """Dataclass of the group ``model`` with ``name``, ``family`` and own keys; may define
    ``problems()``, which yields (key, message)."""
    tasks: ClassVar[frozenset[str]]
    """Names of the supported tasks."""
    layers: ClassVar[dict[str, list[str]]]
    """``ffn`` (default of ``sparsity.targets``), ``ffn_out`` (the layer behind the activation) and
    ``attention`` -> globs of module names."""
    renamed: ClassVar[dict[str, str]] = {}
    """Prefix of a parameter name in the class of transformers -> prefix in the built model."""

    @classmethod
    def roles(cls, options: Any) -> dict[str, list[str]]:
        """Return aliases of ``sparsity.targets`` -> globs; ``all`` is FFN and attention."""
        return {**cls.layers, "all": [*cls.layers["ffn"], *cls.layers["attention"]]}

    @staticmethod
    @abstractmethod
    def build(options: Any) -> nn.Module:
        """Build a model with initial weights from torch's global generator.

        Must work under ``torch.device("meta")``. Raises ConfigError for a missing package or model.
        """

    @classmethod
    def stock(cls, model: nn.Module, options: Any, head: Head | None) -> nn.Module:
        """Convert a dense model in eval mode to a class of transformers or timm, for export.

        Raises:
            ConfigError: neither library has this architecture.
        """
        from sparsepretrain.models._text import as_stock

        return as_stock(model, options, head, cls.renamed)


class Headable(Recipe):
    """Recipe whose models take a new head for fine-tuning.

    The first child of the built model is the backbone. ``backbone(tokens, attention_mask=)``
    returns hidden states of width ``options.n_embd``, or an object with ``last_hidden_state``.
    """

    tasks = frozenset({"causal_lm", "sequence_classification", "question_answering"})
    causal: ClassVar[bool] = False
    """True if attention is causal; the last token then represents the sequence."""

    @classmethod
    def build_headed(cls, options: Any, head: Head, outputs: int) -> nn.Module:
        """Build the backbone with a new head: classes (1: a real number), or 2 for spans."""
        from sparsepretrain.models._heads import Headed

        return Headed(cls, options, head, outputs)

    @staticmethod
    def vocabulary(options: Any) -> int:
        """Return the number of rows of the embedding."""
        return int(options.vocab_size)

    @staticmethod
    def encode(model: nn.Module, tokens: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Return hidden states (batch, length, n_embd); the mask is 0 at padding."""
        found = next(model.children())(tokens, attention_mask=attention_mask)
        return getattr(found, "last_hidden_state", found)

    @staticmethod
    def logits(model: nn.Module, tokens: Tensor) -> Tensor:
        """Map (batch, length) int64 to (batch, length, vocab_size)."""
        return model(input_ids=tokens, use_cache=False).logits

    @staticmethod
    def scores(model: nn.Module, tokens: Tensor, mask: Tensor, second: Tensor) -> Tensor:
        """Return (batch, outputs) for the head ``labels``, (batch, length, 2) for ``spans``.

        Inputs are (batch, length): ``tokens`` int64, padded at the end; ``mask`` bool, False at
        padding; ``second`` bool, True at the second of two texts.
        """
        return model(tokens, mask)
