"""Model recipes: one module per family, see :class:`Recipe`. They know nothing of sparsity."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from sparsepretrain.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor, nn

Head = Literal["labels", "spans"]
"""What is predicted from hidden states: classes of a sequence, or start and end at each token."""


class Recipe(ABC):
    """How the models of a family are built, and what their layers are for.

    The functions belong to the class, which is registered as a model and never instantiated. Its
    module is imported whenever a configuration is checked, so it imports torch in functions only.

    Besides what is below, a recipe has the function that each of its tasks calls:

    - ``causal_lm``: ``logits(model, tokens)``, (batch, length) int64 -> (batch, length, vocab_size)
    - ``masked_lm``: ``logits(model, tokens, positions)``, see ``models._text.Encoder``
    - ``image_classification``: ``logits(model, images)``, see ``models.timm_image``
    - ``regression``: ``predict(model, inputs)``, (batch, inputs) fp32 -> (batch, outputs)
    - ``translation``: ``logits`` and ``generate``, see ``models.marian``
    - ``sequence_classification`` and ``question_answering``: those of :class:`Headable`
    """

    Options: ClassVar[type]
    """Dataclass of the group ``model``: ``name``, ``family`` (that of the registry), and its own.

    ``problems()`` of it may yield (key, message) of values that are out of range.
    """
    tasks: ClassVar[frozenset[str]]
    """Names of the tasks that it can be built for."""
    layers: ClassVar[dict[str, list[str]]]
    """``ffn`` (what ``sparsity.targets`` is by default), ``ffn_out`` (the layer behind the
    activation) and ``attention`` -> globs of module names."""

    @classmethod
    def roles(cls, options: Any) -> dict[str, list[str]]:
        """Aliases of ``sparsity.targets`` -> globs; ``all`` is the FFN and the attention."""
        return {**cls.layers, "all": [*cls.layers["ffn"], *cls.layers["attention"]]}

    @staticmethod
    @abstractmethod
    def build(options: Any) -> nn.Module:
        """A model with weights drawn from torch's global generator; see the recipe for the rule.

        Under ``torch.device("meta")`` nothing is allocated.

        Raises:
            ConfigError: a package is missing, or there is no such model.
        """

    @classmethod
    def stock(cls, model: nn.Module, options: Any, head: Head | None) -> nn.Module:
        """The same function as a model of transformers or timm, for export.

        Args:
            model: of :meth:`build` or, with a head, ``build_headed``; dense, in eval mode.
            options: of the model.
            head: that of the model.

        Raises:
            ConfigError: no class of theirs has this architecture.
        """
        raise ConfigError(
            f"models of family {options.family} have no class in transformers or timm"
        )


class Headable(Recipe):
    """A recipe whose models can carry a new head for fine-tuning.

    The first child of what ``build`` returns is the backbone; ``backbone(tokens, attention_mask=)``
    gives hidden states, or an object with ``last_hidden_state``; their width is ``options.n_embd``.
    """

    causal: ClassVar[bool] = False
    """Whether a token sees only those before it: the last token then stands for the sequence."""

    @classmethod
    def build_headed(cls, options: Any, head: Head, outputs: int) -> nn.Module:
        """The backbone of ``build`` with a new head of ``outputs`` numbers.

        They are classes (1: a real number), or 2 for spans.
        """
        from sparsepretrain.models._heads import Headed

        return Headed(cls, options, head, outputs)

    @staticmethod
    def vocabulary(options: Any) -> int:
        """Rows of the embedding."""
        return int(options.vocab_size)

    @staticmethod
    def encode(model: nn.Module, tokens: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Last hidden states (batch, length, n_embd); the mask is 0 at padding, which none sees."""
        found = next(model.children())(tokens, attention_mask=attention_mask)
        return getattr(found, "last_hidden_state", found)

    @staticmethod
    def scores(model: nn.Module, tokens: Tensor, mask: Tensor, second: Tensor) -> Tensor:
        """(batch, outputs) of the head ``labels``, (batch, length, 2) of the head ``spans``.

        All inputs are (batch, length): ``tokens`` int64, padded at the end; ``mask`` bool, False at
        padding; ``second`` bool, True at the second of two texts.
        """
        return model(tokens, mask)
