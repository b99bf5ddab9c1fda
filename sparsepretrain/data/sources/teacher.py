"""Samples of a random teacher network, generated on demand."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Annotated, ClassVar

import numpy as np

from sparsepretrain.data.source import SPLITS, TRAIN, GeneratedSource, SourceOptions
from sparsepretrain.registry import register

BLOCK = 512
"""Samples per block. The rounding of a matmul depends on its shape; fixed blocks make samples
independent of the batch size."""
VERSION = 1
"""Version of the sample generator."""


@dataclass(slots=True, kw_only=True)
class TeacherOptions(SourceOptions):
    """Options of ``source: teacher``."""

    inputs: Annotated[int, "> 0"]
    outputs: Annotated[int, "> 0"]
    width: Annotated[int, "> 0"]
    depth: Annotated[int, "> 0"]
    inner: Annotated[int, "> 0"]
    scale: Annotated[float, "> 0"]
    held_out: Annotated[int, "> 0"]
    teacher_seed: Annotated[int | None, "[0, 2^32)"]


@register("source", "teacher")
class Teacher(GeneratedSource):
    """y = T(x) for x ~ N(0, I), where T is a dense ``residual_mlp``.

    Targets are divided by their standard deviation over the validation split: the mean squared
    error is a fraction of their variance.
    """

    Options: ClassVar[type[SourceOptions]] = TeacherOptions
    kind = "vectors"

    def __init__(self, options: TeacherOptions) -> None:
        super().__init__(options)
        self._block = lru_cache(2)(self._draw)
        self._weights, self._std = self._teacher(), 1.0
        blocks = -(-options.held_out // BLOCK)
        targets = [self._draw("validation", 0, block)[1] for block in range(blocks)]
        self._std = float(np.concatenate(targets)[: options.held_out].std())

    @property
    def fingerprint(self) -> str:
        identity = {k: v for k, v in asdict(self.options).items() if k not in self.options.about}
        text = json.dumps([VERSION, identity], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def count(self, split: str) -> int | None:
        return None if split == TRAIN else int(self.options.held_out)

    def samples(self, split: str, seed: int, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return inputs (n, inputs) and targets (n, outputs), both fp32."""
        blocks, which = np.unique(numbers // BLOCK, return_inverse=True)
        parts = [self._block(split, seed, int(block)) for block in blocks]
        places = which * BLOCK + numbers % BLOCK
        inputs, targets = (np.concatenate(part)[places] for part in zip(*parts, strict=True))
        return inputs, targets

    def _draw(self, split: str, seed: int, block: int) -> tuple[np.ndarray, np.ndarray]:
        stream = 1 + SPLITS.index(split)
        shape = (BLOCK, self.options.inputs)
        x = normals(seed, stream, block * BLOCK, shape).astype(np.float32)
        first, *inner, last = self._weights
        h = x @ first
        for up, down in zip(inner[::2], inner[1::2], strict=True):
            h = h + np.maximum(_normalized(h) @ up, 0) @ down
        y = _normalized(h) @ last / np.float32(self._std)
        return x, y

    def _teacher(self) -> list[np.ndarray]:
        """Return the fp32 matrices (in, out) in layer order."""
        o = self.options
        blocks = [(o.width, o.inner, 1), (o.inner, o.width, 2 * o.depth)] * o.depth
        shapes = [(o.inputs, o.width, 1), *blocks, (o.width, o.outputs, 1)]
        layers = []
        for layer, (rows, columns, sums) in enumerate(shapes):
            weights = normals(o.teacher_seed, 0, layer << 32, (rows, columns))
            layers.append(np.float32(o.scale * (sums * rows) ** -0.5) * weights.astype(np.float32))
        return layers


def normals(seed: int, stream: int, first: int, shape: tuple[int, int]) -> np.ndarray:
    """Return rows from ``first`` of the infinite N(0, 1) matrix of (seed, stream, columns), fp64.

    Box-Muller on the halves of raw Philox words, whose stream, unlike that of ``Generator``, NumPy
    guarantees across versions.
    """
    rows, columns = shape
    counters = -(-columns // 8)  # of four words each
    key = np.array([seed, stream], dtype=np.uint64)
    philox = np.random.Philox(key=key, counter=[first * counters, 0, 0, 0])
    words = philox.random_raw(rows * counters * 4).reshape(rows, -1)
    radius = np.sqrt(-2 * np.log(((words >> np.uint64(32)) + 0.5) * 2.0**-32))
    angle = (words & np.uint64(0xFFFFFFFF)) * (2 * np.pi * 2.0**-32)
    both = np.concatenate([radius * np.cos(angle), radius * np.sin(angle)], axis=1)
    return both[:, :columns]


def _normalized(h: np.ndarray) -> np.ndarray:
    """LayerNorm without weights."""
    return (h - h.mean(1, keepdims=True)) / np.sqrt(h.var(1, keepdims=True) + 1e-5)
