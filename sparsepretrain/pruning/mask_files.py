"""Files of masks: one bit per weight, in safetensors."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from sparsepretrain.errors import CheckpointError, one_line
from sparsepretrain.kernels import pack_rows, unpack_rows

NAME = "masks.safetensors"
"""Name of the file beside a pruned checkpoint."""
ABOUT = "masks"
"""Key of the metadata: pattern, and shapes (layer -> [out_features, in_features]), as JSON."""


def masks_file(path: str | Path) -> Path:
    """Return the file of masks at ``path``, which may be the directory of a pruned checkpoint."""
    path = Path(path).expanduser()
    return path / NAME if path.is_dir() else path


def write_masks(file: Path, masks: Iterable[tuple[str, Tensor]], pattern: tuple[int, int]) -> None:
    """Write layers and their bool masks (out_features, in_features), 8 weights per byte.

    Weight i of a row is bit i mod 8 of byte i div 8, the lowest bit first.
    """
    packed = {}
    shapes = {}
    for name, mask in masks:
        packed[name] = pack_rows(mask).cpu()
        shapes[name] = list(mask.shape)
    # one entry: safetensors writes several in any order
    about = {"pattern": "{}:{}".format(*pattern), "shapes": shapes}
    save_file(packed, file, {ABOUT: json.dumps(about)})


def read_masks(path: str | Path) -> Iterator[tuple[str, Tensor]]:
    """Yield layer and bool mask (out_features, in_features), one at a time.

    Args:
        path: a file of :func:`write_masks`, or a directory with ``masks.safetensors``.

    Raises:
        CheckpointError: there is no such file, or it holds something else.
    """
    file = masks_file(path)
    if not file.is_file():
        raise CheckpointError(f"{file}: there is no such file of masks")
    try:
        with safe_open(file, framework="pt") as packed:
            metadata = packed.metadata() or {}
            if ABOUT not in metadata:
                raise CheckpointError(
                    f"{file} has no masks: expected a file that `sparsepretrain prune` wrote"
                )
            for name, shape in json.loads(metadata[ABOUT])["shapes"].items():
                code = packed.get_tensor(name)
                if code.dtype != torch.uint8:
                    raise ValueError(f"{name} is {code.dtype}, expected packed bits (uint8)")
                yield name, unpack_rows(code, shape)
    except (SafetensorError, OSError, ValueError, LookupError, AttributeError, TypeError) as error:
        raise CheckpointError(f"{file} is damaged: {one_line(error)[:200]}") from error
