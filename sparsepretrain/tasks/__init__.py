"""Tasks: model, data, loss and metrics, one module each; see :class:`Task`."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from sparsepretrain import registry
from sparsepretrain.config.schema import Run
from sparsepretrain.data.order import padded_length
from sparsepretrain.errors import Problems

Batch = dict[str, Any]
"""Name -> tensor of one micro-batch."""

Progress = Callable[[Any], None] | None
"""Callback for the progress of data preparation."""

LOGITS_AT_ONCE = 2**24
"""Maximum logits of one uncompiled cross-entropy call: 64 MiB in fp32."""

Observation = dict[str, Any]
"""Contribution of an evaluated micro-batch to the metrics; ``(sum, count)`` pairs are averaged.

A sum may be a 0-d tensor on the device; other tensors become lists. The loop copies the tensors of
all micro-batches to the host at once.
"""


class Task(ABC):
    """Base of the tasks.

    A *sample* is the unit of ``batch.size``: a sequence, an image, or a bucket of sentence pairs.
    An *item* is the unit of the loss: a target token, an image, an example.

    Everything random about a batch is a function of (seed, split, step, positions), never of a
    global generator, so that resuming and prefetching change nothing.
    """

    Options: ClassVar[type]
    """Dataclass of the group ``task``: ``name`` and own keys; may define ``problems()``."""
    kind: ClassVar[str]
    """Kind of data, see ``data.sources``: text, pairs, images, labeled texts,
    questions or vectors."""
    unit: ClassVar[str] = "tokens"
    """Name of an item in the plural."""
    sample: ClassVar[str] = "samples"
    """Name of a sample in the plural."""
    loss_name: ClassVar[str] = "cross-entropy, nats"
    """Name of the loss of an item."""
    metric: ClassVar[str] = "loss"
    """Main metric among those of :meth:`metrics`."""
    compiles_loss: bool = False
    """True if the cross-entropy of training is compiled; set by the trainer."""

    def __init__(self, options: Any, model: Any, data: Any, seed: int) -> None:
        """Take the checked options of the groups task, model and data; touch no data.

        Raises:
            ConfigError: incompatible options that :meth:`conflicts` does not cover.
        """
        self.options = options
        self.model_options = model
        self.data_options = data
        self.seed = seed
        self.recipe: Any = registry.get("model", model.family)
        self.fingerprint: str | None = None
        """Fingerprint of the prepared data; None before :meth:`open_data`."""
        self.tokenizer_file: Path | None = None
        """tokenizer.json of the model's input, set by :meth:`open_data`; None: bytes."""

    @property
    def roles(self) -> dict[str, list[str]]:
        """Alias of ``sparsity.targets`` -> globs of module names."""
        return self.recipe.roles(self.model_options)

    @staticmethod
    def conflicts(options: Any, model: Any, data: Any) -> Problems:
        """Yield (dotted key, message) of incompatible options."""
        tokens = getattr(data, "vocab_size", None)
        rows = getattr(model, "vocab_size", None)
        if tokens is not None and rows is not None and tokens > rows:
            text = f"must be ≥ data.vocab_size ({tokens}), got {rows}"
            yield "model.vocab_size", f"{text}: set one of them, or another data.tokenizer"
        for limit in ("n_positions", "max_position_embeddings"):
            most = getattr(model, limit, None)
            yield from too_long(options, most, f"model.{limit} ({most})")

    @property
    def capacity(self) -> int:
        """Maximum tokens of one sample in the layers; 0: all samples have equally many."""
        return 0

    def order_seed(self, split: str) -> int:
        """Return the seed of a split's order; held-out order is the same for every run seed."""
        return self.seed if split == "train" else 0

    def build_model(self) -> nn.Module:
        """Build the model with initial weights from torch's global generator."""
        return self.recipe.build(self.model_options)

    @abstractmethod
    def open_data(self, splits: Sequence[str], on_progress: Progress = None) -> None:
        """Open prepared data; raise DataError if missing or unsuitable for ``splits``."""

    @abstractmethod
    def batch(self, split: str, step: int, positions: Sequence[int], size: int) -> Batch:
        """Return the samples ``positions`` of the global batch of ``size`` of ``step``.

        Tensors are on the CPU. May be called in a worker process.
        """

    @abstractmethod
    def samples(self, split: str) -> int:
        """Return the number of samples in one pass over ``split``."""

    @abstractmethod
    def example(self, size: int, device: torch.device) -> Batch:
        """Return a batch of the right shapes without data, for dry runs."""

    @abstractmethod
    def count(self, batch: Batch) -> int:
        """Return the number of items that the loss is summed over."""

    @abstractmethod
    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
        """Return (sum, count) in fp32: exact under accumulation and data parallelism."""

    def observe(self, model: nn.Module, batch: Batch, *, final: bool) -> Observation:
        """Evaluate one micro-batch.

        Args:
            model: model in eval mode, without gradients.
            batch: micro-batch of an evaluation split, on the model's device.
            final: True in the last or an explicit evaluation: compute costly metrics too.
        """
        loss, count = self.loss(model, batch)
        return {"loss": (loss, count)}

    def generates(self, *, final: bool) -> bool:
        """Return True if the number of forwards in :meth:`observe` depends on the data."""
        return False

    def require_metrics(self) -> None:  # noqa: B027 - most tasks need no package
        """Raise an error if :meth:`metrics` needs a package that is missing; called before a run.

        The last evaluation comes after all training, which would be lost.
        """

    def metrics(self, observations: Iterable[Observation]) -> dict[str, float]:
        """Reduce all observations of an evaluation to numbers, ``loss`` among them.

        Rates and scores are percentages. Override for metrics that are not means.
        """
        return averages(observations)


def too_long(options: Any, most: int | None, limit: str) -> Problems:
    """Yield keys of a task with sequences longer than ``most`` positions; ``limit``: in words."""
    for key in ("sequence_length", "max_length"):
        length = getattr(options, key, 0)
        # batches of sequences that differ in length are padded
        longest = padded_length(length) if key == "max_length" else length
        if most is not None and longest > most:
            padded = f", which is padded to {longest}" if length <= most else ""
            yield f"task.{key}", f"must be ≤ {limit}, got {length}{padded}"


class ScoredTask(Task):
    """Task whose loss is computed from scores of the items."""

    @property
    def has_classes(self) -> bool:
        """True if every item is one of several classes and its scores are their logits."""
        return True

    @abstractmethod
    def scores(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the scores of every item and of padding, (…, classes) if ``has_classes``."""

    @abstractmethod
    def total(self, scores: Tensor, batch: Batch) -> Tensor:
        """Return the summed loss of a batch from its :meth:`scores`."""

    def is_item(self, batch: Batch) -> Tensor | None:
        """Return (…) bool: which :meth:`scores` belong to items; None: there is no padding."""
        return None

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
        return self.total(self.scores(model, batch), batch), self.count(batch)


def widen(x: Tensor) -> Tensor:
    """Convert to fp32; keep fp64."""
    return x if x.dtype.itemsize > 4 else x.float()


def cross_entropy(
    logits: Tensor, targets: Tensor, *, compiled: bool = False, **options: Any
) -> Tensor:
    """Return the sum of the cross-entropies in nats, accumulated in fp32.

    For the 50,304 tokens of GPT-2 the loss moves more memory than any layer. Compiled, no fp32
    copy of the logits exists: 8 bytes per bf16 logit, forward and backward (10 with label
    smoothing). Otherwise logits are processed in chunks that the backward recomputes: 54 bytes per
    logit, and memory for one chunk at a time. Without gradients chunks are always used.

    Args:
        logits: (…, classes); fp64 stays fp64.
        targets: (…) int64; -100, or ``ignore_index``, is ignored.
        compiled: compile the loss together with its backward.
        options: keyword arguments of torch.nn.functional.cross_entropy.
    """
    rows = logits.reshape(-1, logits.shape[-1])
    flat = targets.reshape(-1)
    if compiled and torch.is_grad_enabled():
        return _compiled_total()(rows, flat, **options)
    return sum_in_chunks(functools.partial(_total, **options), rows, flat)


def sum_in_chunks(total: Callable[..., Tensor], rows: Tensor, *others: Tensor) -> Tensor:
    """Add up ``total`` of chunks of rows, which the backward computes again.

    Args:
        total: called with rows of all tensors; returns their sum, 0-d.
        rows: (n, classes); a chunk has at most :data:`LOGITS_AT_ONCE` of its entries.
        others: (n, …).
    """
    length = max(1, LOGITS_AT_ONCE // rows.shape[-1])
    if len(rows) <= length:
        return total(rows, *others)
    chunks = zip(*(tensor.split(length) for tensor in (rows, *others)), strict=True)
    first, *rest = (
        checkpoint(total, *chunk, use_reentrant=False, preserve_rng_state=False) for chunk in chunks
    )
    return sum(rest, start=first)


def _total(rows: Tensor, targets: Tensor, **options: Any) -> Tensor:
    return F.cross_entropy(widen(rows), targets, reduction="sum", **options)


@functools.cache
def _compiled_total() -> Any:
    return torch.compile(_total)  # recompiles once for a varying number of rows


def build_task(run: Run) -> Task:
    """Build the task of a run without touching data."""
    return registry.get("task", run.task.name)(run.task, run.model, run.data, run.seed)


def read(observations: Sequence[Observation]) -> list[Observation]:
    """Replace device tensors by numbers in one device-to-host copy."""

    def tensors(value: Any) -> list[Tensor]:
        first = value[0] if isinstance(value, tuple) else value
        return [first] if isinstance(first, torch.Tensor) else []

    flat = [t for seen in observations for value in seen.values() for t in tensors(value)]
    # exact: counts, classes and positions are below 2⁵³
    numbers = iter(torch.cat([t.reshape(-1).double() for t in flat]).tolist() if flat else ())

    def plain(value: Any) -> Any:
        for tensor in tensors(value):
            kind = float if tensor.is_floating_point() else int
            part = [kind(next(numbers)) for _ in range(tensor.numel())]
            value = (*part, value[1]) if isinstance(value, tuple) else part
        return value

    return [{key: plain(value) for key, value in seen.items()} for seen in observations]


def averages(observations: Iterable[Observation]) -> dict[str, float]:
    """Return the mean of every (sum, count) pair; omit other entries."""
    totals: dict[str, tuple[float, float]] = {}
    for observation in observations:
        for key, value in observation.items():
            if isinstance(value, tuple):
                total, count = totals.get(key, (0.0, 0.0))
                totals[key] = total + value[0], count + value[1]
    return {key: total / count for key, (total, count) in totals.items() if count}
