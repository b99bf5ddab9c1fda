"""Image augmentation; every random draw is a function of a key."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from sparsepretrain.errors import needs

if TYPE_CHECKING:
    from PIL.Image import Image

# last word of a key: keeps the draws of different uses apart
AUGMENT = 1
MIX = 2
LIGHT = 3

EIGENVALUES = (0.2175, 0.0188, 0.0045)
EIGENVECTORS = ((-0.5675, 0.7192, 0.4009), (-0.5808, -0.0045, -0.8140), (-0.5836, -0.6948, 0.4203))
"""Covariance of ImageNet's colors in [0, 1] (fb.resnet.torch): rows are red, green and blue,
columns belong to the eigenvalues."""


def keyed_words(*key: int, count: int = 4) -> np.ndarray:
    """Return ``count`` 32-bit words determined by ``key``, stable across NumPy versions."""
    return np.random.SeedSequence(key).generate_state(count)


@contextmanager
def keyed_generators(words: np.ndarray) -> Iterator[None]:
    """Seed the global generators of Python, NumPy and torch, and restore them on exit.

    timm and torchvision draw from all three.
    """
    states = random.getstate(), np.random.get_state()
    random.seed(int(words[0]))
    np.random.seed(int(words[1]))
    try:
        with torch.random.fork_rng(devices=()):
            # not torch.manual_seed, which also seeds GPUs
            torch.default_generator.manual_seed(int(words[2]))
            yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])


class Augmentation:
    """Conversion of images to tensors for training and evaluation.

    ``crop: resized`` is timm's pipeline as used by DeiT (random resized crop, flip, RandAugment or
    color jitter, normalization, random erasing). ``crop: shift`` is for small images: scale to the
    input size, shift, flip and cut out; missing pixels become the mean.
    """

    def __init__(self, options: Any, seed: int) -> None:
        self._options = options
        self._seed = seed

    def train(self, image: Image, epoch: int, position: int) -> Tensor:
        """Return the augmented RGB image of (epoch, position): (3, size, size) fp32."""
        words = keyed_words(self._seed, epoch, position, AUGMENT)
        if self._options.crop == "shift":
            tensor = self._shift(image, words)
        else:
            with keyed_generators(words):
                tensor = self._timm[0](image)
        return tensor + self._light(epoch, position) if self._options.lighting else tensor

    def _light(self, epoch: int, position: int) -> Tensor:
        """Return AlexNet's noise along the principal color components: (3, 1, 1), normalized."""
        # the legacy generator, whose stream is frozen
        draws = np.random.RandomState(keyed_words(self._seed, epoch, position, LIGHT))
        shares = draws.standard_normal(3) * self._options.lighting * EIGENVALUES
        noise = np.array(EIGENVECTORS) @ shares / self._options.std
        return torch.from_numpy(noise.astype(np.float32)).view(3, 1, 1)

    def evaluate(self, image: Image) -> Tensor:
        """Return the RGB image for evaluation: (3, size, size) fp32."""
        if self._options.crop == "shift":
            return torch.from_numpy(self._pixels(image, self._options.eval_interpolation))
        return self._timm[1](image)

    def _shift(self, image: Image, words: np.ndarray) -> Tensor:
        options = self._options
        size = options.image_size
        border = options.shift
        cut = options.cutout
        pixels = self._pixels(image, options.interpolation)
        places = words.astype(np.uint64)
        if border:
            top, left = (int(word % np.uint64(2 * border + 1)) for word in places[:2])
            padded = np.pad(pixels, ((0, 0), (border, border), (border, border)))
            pixels = padded[:, top : top + size, left : left + size]
        if float(words[2]) * 2.0**-32 < options.flip:
            pixels = pixels[:, :, ::-1]
        pixels = np.array(pixels)
        if cut:
            top, left = divmod(int(places[3]), 1 << 16)
            top, left = top % (size - cut + 1), left % (size - cut + 1)
            pixels[:, top : top + cut, left : left + cut] = 0.0
        return torch.from_numpy(pixels)

    def _pixels(self, image: Image, interpolation: str) -> np.ndarray:
        from PIL.Image import Resampling

        size = self._options.image_size
        if image.size != (size, size):
            image = image.resize((size, size), Resampling[interpolation.upper()])
        mean, std = np.array([self._options.mean, self._options.std], dtype=np.float32)
        scaled = np.asarray(image, dtype=np.float32) * (1 / (255 * std)) - mean / std
        return scaled.transpose(2, 0, 1)

    @cached_property
    def _timm(self) -> tuple[Any, Any]:
        with needs("task.crop=resized", "timm", "vision"):
            from timm.data import create_transform
        o = self._options
        both: dict[str, Any] = {"mean": tuple(o.mean), "std": tuple(o.std)}
        both["input_size"] = (3, o.image_size, o.image_size)
        jitter: Any = o.color_jitter or None
        training = create_transform(
            is_training=True,
            scale=tuple(o.scale),
            ratio=tuple(o.ratio),
            hflip=o.flip,
            color_jitter=jitter,
            auto_augment=o.rand_augment,
            interpolation=o.interpolation,
            re_prob=o.random_erasing,
            re_mode="pixel",
            **both,
        )
        return training, create_transform(
            crop_pct=o.eval_crop, interpolation=o.eval_interpolation, **both
        )


def mix(
    images: Tensor, labels: Tensor, options: Any, key: Sequence[int]
) -> tuple[Tensor, Tensor, Tensor]:
    """Mixup (arXiv:1710.09412) or cutmix (arXiv:1905.04899) within a batch, as timm mixes.

    Each image is mixed with its mirror position in the batch, all in the same way. ``images`` are
    modified in place. Returns images, labels of the partners (batch,), weight of the own label
    (batch,) fp32.
    """
    # the legacy generator: its stream is frozen, that of Generator.beta is not
    draws = np.random.RandomState(keyed_words(*key, MIX))
    partners = labels.flip(0)
    share = 1.0
    if draws.random_sample() < options.mix_probability:
        both = options.mixup > 0 and options.cutmix > 0
        cut = draws.random_sample() < options.cutmix_share if both else options.cutmix > 0
        alpha = options.cutmix if cut else options.mixup
        share = float(draws.beta(alpha, alpha))
        other = images.flip(0)
        if cut:
            box, share = _box(images.shape[-2], images.shape[-1], share, draws)
            images[..., box[0], box[1]] = other[..., box[0], box[1]]
        else:
            images.mul_(share).add_(other, alpha=1 - share)
    return images, partners, torch.full((len(labels),), share, dtype=torch.float32)


def _box(
    height: int, width: int, share: float, draws: np.random.RandomState
) -> tuple[tuple[slice, slice], float]:
    """Draw a box of (1 - share) of the area, clipped; return it and the share outside."""
    side = np.sqrt(1 - share)
    sides = []
    for length in (height, width):
        center = draws.randint(length)
        half = int(length * side) // 2
        sides.append(slice(max(center - half, 0), min(center + half, length)))
    area = (sides[0].stop - sides[0].start) * (sides[1].stop - sides[1].start)
    return (sides[0], sides[1]), 1 - area / (height * width)
