"""Image classification: cross-entropy, top-1 and top-5 accuracy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparsepretrain.data.augmentation import Augmentation, mix
from sparsepretrain.data.formats import Images
from sparsepretrain.data.order import Shuffle
from sparsepretrain.data.preparation import load
from sparsepretrain.errors import Problems
from sparsepretrain.registry import register
from sparsepretrain.tasks import (
    Batch,
    Observation,
    Progress,
    ScoredTask,
    cross_entropy,
    widen,
)


@dataclass(slots=True, kw_only=True)
class ImageClassificationOptions:
    """Options of the task."""

    name: Literal["image_classification"]
    image_size: Annotated[int, "> 0"]
    label_smoothing: Annotated[float, "[0, 1)"]
    mixup: Annotated[float, "≥ 0"]
    cutmix: Annotated[float, "≥ 0"]
    mix_probability: Annotated[float, "[0, 1]"]
    cutmix_share: Annotated[float, "[0, 1]"]
    copies: Annotated[int, "> 0"]
    crop: Literal["resized", "shift"]
    scale: tuple[float, float]
    ratio: tuple[float, float]
    shift: Annotated[int, "≥ 0"]
    flip: Annotated[float, "[0, 1]"]
    color_jitter: Annotated[float, "≥ 0"]
    lighting: Annotated[float, "≥ 0"]
    rand_augment: str | None
    random_erasing: Annotated[float, "[0, 1]"]
    cutout: Annotated[int, "≥ 0"]
    interpolation: Literal["bilinear", "bicubic", "nearest", "random"]
    eval_interpolation: Literal["bilinear", "bicubic", "nearest"]
    eval_crop: Annotated[float, "(0, 1]"]
    mean: tuple[float, float, float]
    std: Annotated[tuple[float, float, float], "> 0"]

    def problems(self) -> Problems:
        if not 0 < self.scale[0] <= self.scale[1] <= 1:
            yield "scale", f"must be two fractions in (0, 1], got {list(self.scale)}"
        if not 0 < self.ratio[0] <= self.ratio[1]:
            yield "ratio", f"must be two positive numbers, got {list(self.ratio)}"
        only: dict[str, dict[str, Any]] = {
            "resized": {"color_jitter": 0.0, "rand_augment": None, "random_erasing": 0.0},
            "shift": {"shift": 0, "cutout": 0},
        }
        for crop, keys in only.items():
            for key, off in keys.items():
                if crop != self.crop and getattr(self, key) != off:
                    word = "null" if off is None else off
                    yield key, f"needs task.crop={crop}, or must be {word}"
        if self.cutout > self.image_size > 0:
            yield "cutout", f"must be ≤ task.image_size ({self.image_size}), got {self.cutout}"
        if self.crop == "shift" and self.interpolation == "random":
            yield "interpolation", "random needs task.crop=resized"
        policy = self.rand_augment
        if policy is not None and not policy.startswith(("rand-", "augmix-", "original", "v0")):
            yield "rand_augment", f"must be a policy like rand-m9-mstd0.5-inc1, got {policy!r}"


@register("task", "image_classification")
class ImageClassification(ScoredTask):
    """Classification with one label per image.

    Augmentation of a sample is a function of (seed, epoch, position in the epoch). Mixup and cutmix
    mix within a micro-batch, as within a device's batch in timm: their key is (seed, step, first
    position), so ``batch.micro`` affects them.
    """

    Options = ImageClassificationOptions
    kind = "images"
    unit = "images"
    metric = "top1"

    @staticmethod
    def conflicts(options: Any, model: Any, data: Any) -> Problems:
        if options.image_size != model.image_size:
            expected = f"task.image_size ({options.image_size})"
            yield "model.image_size", f"must equal {expected}, got {model.image_size}"

    def open_data(self, splits: Sequence[str], on_progress: Progress = None) -> None:
        data = load(self.data_options, on_progress=on_progress)
        self.fingerprint = data.fingerprint
        classes = self.model_options.classes
        self._images = {s: Images(self.data_options, data, s, classes) for s in splits}
        self._orders = {
            split: Shuffle(
                images.count, self.order_seed(split), self.options.copies if split == "train" else 1
            )
            for split, images in self._images.items()
        }
        self._augmentation = Augmentation(self.options, self.seed)

    def batch(self, split: str, step: int, positions: Sequence[int], size: int) -> Batch:
        """Return normalized ``images`` (n, 3, size, size) fp32 and ``labels`` (n,) int64.

        In training with mixup or cutmix also ``partners`` (n,) int64, the labels of the mixed-in
        images, and ``shares`` (n,) fp32, the weight of the own label.
        """
        images = self._images[split]
        samples = self._orders[split].samples(step, positions, size)
        labels = torch.tensor([images.label(sample.item) for sample in samples])
        augmented = (
            self._augmentation.train(images.image(sample.item), sample.epoch, sample.position)
            if split == "train"
            else self._augmentation.evaluate(images.image(sample.item))
            for sample in samples
        )
        pixels = torch.stack(list(augmented))
        if split != "train" or not self._mixes:
            return {"images": pixels, "labels": labels}
        key = self.seed, step, positions[0]
        pixels, partners, shares = mix(pixels, labels, self.options, key)
        return {"images": pixels, "labels": labels, "partners": partners, "shares": shares}

    @property
    def _mixes(self) -> bool:
        return self.options.mixup > 0 or self.options.cutmix > 0

    def samples(self, split: str) -> int:
        return self._images[split].count

    def example(self, size: int, device: torch.device) -> Batch:
        side = self.options.image_size
        labels = torch.zeros(size, dtype=torch.int64, device=device)
        batch = {"images": torch.zeros(size, 3, side, side, device=device), "labels": labels}
        if self._mixes:
            batch |= {"partners": labels, "shares": torch.zeros(size, device=device)}
        return batch

    def count(self, batch: Batch) -> int:
        return int(batch["labels"].numel())

    def scores(self, model: nn.Module, batch: Batch) -> Tensor:
        return widen(self.recipe.logits(model, batch["images"]))

    def total(self, scores: Tensor, batch: Batch) -> Tensor:
        """Return Σ cross-entropy in nats against smoothed and mixed targets.

        Cross-entropy against a mixture of targets is the mixture of the cross-entropies.
        """
        smoothing = self.options.label_smoothing

        def losses(labels: Tensor) -> Tensor:
            return F.cross_entropy(scores, labels, reduction="none", label_smoothing=smoothing)

        total = losses(batch["labels"])
        if "partners" in batch:
            shares = batch["shares"]
            total = shares * total + (1 - shares) * losses(batch["partners"])
        return total.sum()

    def observe(self, model: nn.Module, batch: Batch, *, final: bool) -> Observation:
        """Return cross-entropy without smoothing, and top-1 and top-5 accuracy in percent."""
        logits = self.scores(model, batch)
        labels = batch["labels"]
        count = self.count(batch)
        best = logits.topk(min(5, logits.shape[-1]), dim=-1).indices
        hits = best == labels[:, None]
        return {
            "loss": (cross_entropy(logits, labels), count),
            "top1": (100 * hits[:, 0].sum(), count),
            "top5": (100 * hits.any(-1).sum(), count),
        }
