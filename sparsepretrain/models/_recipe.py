"""Base classes of model recipes, and the models with a head for fine-tuning."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from sparsepretrain.errors import ConfigError

Head = Literal["labels", "spans"]
"""Prediction from hidden states: classes of a sequence, or start and end at each token."""


HEADED = {"labels": "ForSequenceClassification", "spans": "ForQuestionAnswering"}
"""Ends of the names of transformers' classes with a head."""


class Recipe(ABC):
    """Construction of a family's models, and the roles of their layers.

    A recipe is a registered class that is never instantiated. Configuration checks import its
    module, so it imports transformers and timm in functions only: they take seconds.
    Each of its tasks calls these functions:

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
    guesses_roles: ClassVar[bool] = False
    """True if :meth:`roles` recognizes layers of any model by their names. An alias is then refused
    if layers of the same blocks have no role."""
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
    def stock(cls, model: Any, options: Any, head: Head | None) -> nn.Module:
        """Convert a dense model in eval mode to a class of transformers or timm, for export.

        The first child of ``model`` is transformers' backbone. Linear layers are transposed for
        Conv1D, which stores (in, out); missing biases become zeros.

        Raises:
            ConfigError: neither library has this architecture.
        """
        import transformers

        backbone = next(model.children())
        family = type(backbone).__name__.removesuffix("Model")
        class_name = type(model).__name__ if head is None else family + HEADED[head]
        if not hasattr(transformers, class_name):
            raise ConfigError(
                f"models of family {options.family} have no class in transformers or timm"
            )
        config = copy.deepcopy(backbone.config)
        config.use_cache = True
        config._attn_implementation = "sdpa"
        if last := getattr(model, "score", getattr(model, "classifier", None)):
            config.num_labels = last.out_features
        stock = getattr(transformers, class_name)(config).eval()
        transposed = {k for k, m in stock.named_modules() if type(m).__name__ == "Conv1D"}
        source_state = model.state_dict()
        with torch.no_grad():
            for name, tensor in stock.state_dict().items():
                for new, old in cls.renamed.items():
                    name = old + name.removeprefix(new) if name.startswith(new) else name
                layer, _, kind = name.rpartition(".")
                if kind == "bias" and name not in source_state:
                    tensor.zero_()
                else:
                    source = source_state[name]
                    tensor.copy_(source.t() if kind == "weight" and layer in transposed else source)
        return stock

    @staticmethod
    def router_loss(options: Any, model: nn.Module) -> float:
        """Return the factor of the load-balancing loss of routers; 0: none."""
        return 0.0

    @staticmethod
    def positions(options: Any) -> int | None:
        """Return the longest sequence, if the options do not say it."""
        return None


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
        return Headed(cls, options, head, outputs)

    @staticmethod
    def vocabulary(options: Any) -> int:
        """Return the number of rows of the embedding."""
        return int(options.vocab_size)

    @staticmethod
    def encode(model: nn.Module, tokens: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Return hidden states (batch, length, n_embd); the mask is 0 at padding."""
        output = next(model.children())(tokens, attention_mask=attention_mask)
        return getattr(output, "last_hidden_state", output)

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
