"""Checkpoint and masks that a run starts from: fingerprints, and the files that an export keeps."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Sequence
from pathlib import Path

from sparsepretrain.errors import CheckpointError
from sparsepretrain.files import read_json
from sparsepretrain.models.pretrained import checkpoint_file, weight_files
from sparsepretrain.runs import checkpoint

TOKENIZER_SETTINGS = ("tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
"""Files of transformers beside a tokenizer.json."""
GENERATION = "generation_config.json"
CONFIG = "config.json"
BLOCK = 4096
"""Bytes that are hashed at each place of a file of weights."""
PLACES = 256
"""Number of places, evenly spaced over a file; the first and the last block are two of them."""


def kept_files(path: str, *, same_tokenizer: bool) -> dict[str, bytes]:
    """Return name -> content of the files of a Hugging Face checkpoint that an export keeps.

    Args:
        path: directory or name on the hub.
        same_tokenizer: True if the run reads text with the checkpoint's own tokenizer.
    """
    names = (*TOKENIZER_SETTINGS, GENERATION) if same_tokenizer else (GENERATION,)
    files = {name: checkpoint_file(path, name) for name in names}
    return {name: file.read_bytes() for name, file in files.items() if file is not None}


def fingerprint(path: str) -> dict[str, str]:
    """Return name -> hash of a file, or of those of a checkpoint; empty if it is not there now.

    A checkpoint of a run is known by its manifest, which has the SHA-256 of all its files. Of a
    Hugging Face checkpoint config.json counts whole. Weights of gigabytes are too much for every
    start: of each file of weights count its size, :data:`PLACES` blocks, and in safetensors the
    names, shapes and first block of all tensors. Training changes all of these; a few changed
    numbers within a large tensor may go unnoticed.
    """
    directory = Path(path)
    if directory.is_file():
        return {directory.name: _sampled_hash(directory)}
    manifest = directory / checkpoint.MANIFEST
    if manifest.is_file():
        return {manifest.name: hashlib.sha256(manifest.read_bytes()).hexdigest()[:16]}
    if directory.is_absolute() and not (directory / CONFIG).is_file():
        return {}
    try:
        config = checkpoint_file(path, CONFIG)
        if config is None:
            return {}
        hashes = {CONFIG: hashlib.sha256(config.read_bytes()).hexdigest()[:16]}
        return hashes | {file.name: _sampled_hash(file) for file in weight_files(path)}
    except (OSError, ValueError, struct.error):  # no network, or no such repository
        return {}


def place_of(path: str) -> str:
    """Return the absolute path of a local checkpoint; a name on the hub stays."""
    return str(Path(path).absolute()) if Path(path).exists() else path


def require_same(file: Path, run: object) -> None:
    """Refuse to continue a run, or to call it finished, if its source has changed.

    Args:
        file: ``source.json`` of the run; without one nothing is compared.
        run: its name in the message.

    Raises:
        CheckpointError: the checkpoint is there and has other files.
    """
    for path, files in _recorded(file).items():
        now = fingerprint(path)
        changed = sorted(k for k in files.keys() | now.keys() if files.get(k) != now.get(k))
        if now and changed:
            raise CheckpointError(
                f"{path} has changed since {run} started from it ({', '.join(changed)}): train "
                "under another name=, or move that run away (resume=never does)"
            )


def require_known(file: Path, path: str, run: object) -> None:
    """Refuse to continue a run with another teacher than it has had.

    Weights that a run starts from are read once; a teacher is read at every start.

    Args:
        file: ``source.json`` of the run.
        path: the checkpoint that is the teacher now.
        run: its name in the message.
    """
    known = _recorded(file)
    if place_of(path) not in map(place_of, known):
        raise CheckpointError(
            f"{path} is not among the sources that {run} started with ({', '.join(known)}): if the "
            "run there has trained on, start again under another name= and give that checkpoint"
        )


def describe(paths: Sequence[str]) -> str:
    """Return the content of ``source.json``: the sources of a run and their fingerprints."""
    sources = [{"path": path, "files": fingerprint(path)} for path in paths]
    return json.dumps({"sources": sources}, indent=1) + "\n"


def _recorded(file: Path) -> dict[str, dict[str, str]]:
    """Return path -> fingerprint of the sources in ``source.json``; empty without the file."""
    if not file.is_file():
        return {}
    try:
        return {str(each["path"]): dict(each["files"]) for each in read_json(file)["sources"]}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{file} cannot be read ({error}): remove it") from error


def _sampled_hash(file: Path) -> str:
    """Hash the size and some blocks of a file of weights."""
    size = file.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    last = max(0, size - BLOCK)
    starts = {last * place // (PLACES - 1) for place in range(PLACES)}
    with open(file, "rb") as stream:
        if file.suffix == ".safetensors":
            # read here, as safe_open does not tell where a tensor begins
            length = struct.unpack("<Q", stream.read(8))[0]
            header = stream.read(min(length, size))
            digest.update(header)
            tensors = json.loads(header)
            tensors.pop("__metadata__", None)
            starts |= {8 + length + about["data_offsets"][0] for about in tensors.values()}
        for start in sorted(starts):
            stream.seek(start)
            digest.update(stream.read(BLOCK))
    return digest.hexdigest()[:16]
