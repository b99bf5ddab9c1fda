"""Parallel, crash-safe conversion of text to token files.

Shards are tokenized into ``<directory>.partial``, each appearing by a rename; a later attempt
reuses finished shards. The merged files, manifest last, become the prepared directory by one
rename. A lock admits one process per directory; others wait and use its result.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from sparsepretrain import registry
from sparsepretrain.data.encoding import (
    SETTINGS,
    ByteCodec,
    Codec,
    FileCodec,
    declare_end,
    open_codec,
)
from sparsepretrain.data.formats import FORMATS, raw_targets
from sparsepretrain.data.source import (
    SPLITS,
    TRAIN,
    VALIDATION,
    Document,
    GeneratedSource,
    Shard,
    Source,
)
from sparsepretrain.data.tokens import (
    BOUND,
    MANIFEST,
    TOKENIZER,
    Damaged,
    TokenData,
    fingerprint,
    open_tokens,
)
from sparsepretrain.errors import DataError, SparsePretrainWarning
from sparsepretrain.files import cache_directory, replacing, sync, write_atomic, writer_tag

VERSION = 3
"""Version of layout and contents, hashed into directory names: others are never opened."""

TRAINING_TEXT = 256 << 20
"""Maximum bytes of training text for a tokenizer; more hardly changes the result."""
BATCH = 4 << 20
"""Bytes or characters of text that a thread tokenizes at a time; a longer document is one batch."""
PIECE = 16 << 20
"""Bytes of a token file that are merged at a time; a multiple of every token's size."""


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of one phase of a preparation."""

    phase: str
    done: int
    total: int | None
    unit: str
    seconds: float
    """Seconds since the phase began."""
    tokens: int = 0
    """Tokens made in this phase, reused shards excluded."""


OnProgress = Callable[[Progress], None]


class _Phase:
    def __init__(self, report: OnProgress, name: str, total: int | None, unit: str) -> None:
        self._report = report
        self._what = (name, total, unit)
        self._begin = time.monotonic()

    def __call__(self, done: int, tokens: int = 0) -> None:
        name, total, unit = self._what
        self._report(Progress(name, done, total, unit, time.monotonic() - self._begin, tokens))


def prepare(
    options: Any, *, workers: int | None = None, on_progress: OnProgress | None = None
) -> TokenData:
    """Prepare the data of ``options`` if missing or damaged, and open it.

    Args:
        options: ``Options`` of a registered source.
        workers: tokenizing threads; None: one per core, or one for bytes.
        on_progress: called after each shard.

    Raises:
        DataError: the text cannot be found, fetched, read or tokenized, or the cache written.
    """
    source, directory = _locate(options)
    report = on_progress or (lambda progress: None)
    with contextlib.suppress(Damaged):
        return open_tokens(directory)
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        with _exclusive(directory, report):
            try:
                return open_tokens(directory)
            except Damaged as damage:
                if directory.exists():
                    text = f"{damage.problem}: preparing {options.name} again"
                    warnings.warn(text, SparsePretrainWarning, stacklevel=2)
            try:
                _build(source, directory, workers, report)
            except DataError:
                # Hours of tokenized text from the network survive a repair. A repaired file has
                # another time, and so its data another directory.
                if source.kind in FORMATS or source.offline:
                    shutil.rmtree(f"{directory}.partial", ignore_errors=True)
                raise
            except FileNotFoundError:  # another machine has published, and removed its parts
                with contextlib.suppress(Damaged):
                    return open_tokens(directory)
                raise
            return open_tokens(directory)
    except OSError as error:
        where = error.filename or directory
        raise DataError(
            f"cannot prepare {options.name}: {where}: {error.strerror or error} (prepared data "
            f"goes to {directory.parent}; SPARSEPRETRAIN_CACHE_DIR chooses another place)"
        ) from error


def load(options: Any, *, on_progress: OnProgress | None = None) -> TokenData:
    """Open the prepared data of ``options``; prepare offline sources if missing or damaged."""
    source, directory = _locate(options)
    try:
        return open_tokens(directory, known=True)
    except Damaged:
        if source.offline:
            return prepare(options, on_progress=on_progress)
        if (directory / MANIFEST).is_file():
            raise
        raise DataError(source.missing()) from None


def require_prepared(options: Any) -> None:
    """Refuse data that :func:`load` would not find and may not prepare, without reading any.

    Raises:
        DataError: prepared data, or a local file, is missing.
    """
    if issubclass(registry.get("source", options.source), GeneratedSource):
        return
    source, directory = _locate(options)
    if not source.offline and not (directory / MANIFEST).is_file():
        raise DataError(source.missing())


def _refuse_same_splits(options: Any) -> None:
    """Refuse a file, or a split of the hub, that two splits name: validation must be held out."""
    seen: dict[str, str] = {}
    for split in SPLITS:
        value = getattr(options, split, None)
        entries = [value] if isinstance(value, str) else value
        for entry in entries if isinstance(entries, list | tuple) else ():
            if (other := seen.setdefault(entry, split)) != split:
                key = "split" if other == TRAIN and hasattr(options, "split") else other
                raise DataError(f"data.{split}: {entry} is also one of data.{key}: name other data")


def _locate(options: Any) -> tuple[Source, Path]:
    _refuse_same_splits(options)
    source: Source = registry.get("source", options.source)(options)
    identity: dict[str, Any] = {
        "version": VERSION,
        "options": {k: v for k, v in asdict(options).items() if k not in options.about},
        "state": source.state(),
    }
    if source.tokenizer.origin == "file":
        identity["tokenizer"] = source.tokenizer.read()
        identity["declared_end"] = source.tokenizer.declared_end()
    text = json.dumps(identity, sort_keys=True, ensure_ascii=True)
    key = hashlib.sha256(text.encode()).hexdigest()[:16]
    return source, cache_directory() / f"{options.name}-{key}"


def _exclusive(directory: Path, report: OnProgress) -> Any:
    """Acquire a file lock, which the system releases if the process dies.

    On some network file systems it holds on this machine only. Then two machines prepare the same
    bytes: temporary names differ, and the second one takes what the first one has published.
    """
    from filelock import FileLock, Timeout

    lock = FileLock(f"{directory}.lock")
    try:
        return lock.acquire(timeout=0)
    except Timeout:
        _Phase(report, "waiting for another process", None, "")(0)
        return lock.acquire()


def _build(source: Source, directory: Path, workers: int | None, report: OnProgress) -> None:
    parts = directory.with_name(f"{directory.name}.partial")
    _Phase(report, "reading", None, source.unit)(0)
    shards = [replace(shard, index=i) for i, shard in enumerate(source.shards())]
    tokenizer = None if source.tokenizer.origin == "bytes" else parts / TOKENIZER
    if tokenizer is not None and not tokenizer.exists():
        text = _TrainingText(source, shards, report)
        content = source.tokenizer.make(text, source.vocab_size)
        parts.mkdir(exist_ok=True)
        end = source.end_of_text or source.tokenizer.declared_end()
        if end is not None:
            write_atomic(parts / SETTINGS[0], declare_end(end))
        write_atomic(tokenizer, content, tag=writer_tag())
    parts.mkdir(exist_ok=True)
    codec = open_codec(tokenizer)
    if codec.vocab_size > source.vocab_size:
        shutil.rmtree(parts)
        raise DataError(
            f"tokenizer {source.tokenizer.name} has {codec.vocab_size} tokens, more than "
            f"data.vocab_size={source.vocab_size}: set data.vocab_size={codec.vocab_size}"
        )
    _check_end(codec, source, parts)
    if isinstance(codec, FileCodec) and codec.lacks_declared:
        # a run and its export must not add the missing token to the vocabulary
        (parts / SETTINGS[0]).unlink()
        if codec.ends:
            write_atomic(parts / SETTINGS[0], declare_end(codec.ends[0]))
    dtype = np.min_scalar_type(source.vocab_size - 1).newbyteorder("<").str  # little-endian
    job = _Job(source, tokenizer, dtype, parts)
    _tokenize(job, shards, workers, report)
    _publish(_merge(job, shards, report), directory)


def _check_end(codec: Codec, source: Source, parts: Path) -> None:
    """Refuse a missing end-of-text token; warn if none is known, or if it is a guess."""
    if isinstance(codec, ByteCodec):
        return
    what = f"tokenizer {source.tokenizer.name}"
    special = ", ".join(codec.special_names()) or "none"
    named = source.end_of_text
    if named is not None and named not in codec.ends:
        shutil.rmtree(parts)
        raise DataError(
            f"data.end_of_text: {what} has no token {named!r}; its special tokens: {special}"
        )
    text = ""
    if codec.lacks_declared:
        guess = (
            f"{codec.ends[0]} ends each document" if codec.ends else "documents follow each other"
        )
        text = (
            f"{what} has no token {codec.declared!r}, the eos_token of the file beside it, so "
            f"{guess}: name another one by data.end_of_text; special tokens: {special}"
        )
    elif not codec.ends:
        text = (
            f"{what} has no end-of-text token of a usual name, so documents follow each other "
            f"without a separator: name it by data.end_of_text; special tokens: {special}"
        )
    elif len(codec.ends) > 1:
        text = (
            f"{what} has several end-of-text tokens, {', '.join(codec.ends)}: {codec.ends[0]} "
            "ends each document; data.end_of_text names another one"
        )
    if text:
        warnings.warn(text, SparsePretrainWarning, stacklevel=4)


@dataclass(frozen=True, slots=True)
class _Job:
    """Settings shared by all shards."""

    source: Source
    tokenizer: Path | None
    """tokenizer.json; None: bytes."""
    dtype: str
    """NumPy dtype of the token files."""
    directory: Path
    """Output directory."""

    def file(self, shard: Shard) -> Path:
        """Return the token file of ``shard``; an existing file is complete."""
        return self.directory / f"{shard.index:06d}.bin"


@dataclass(frozen=True)
class _TrainingText:
    """Training text of a tokenizer; can be iterated more than once."""

    source: Source
    shards: list[Shard]
    report: OnProgress

    def __iter__(self) -> Iterator[bytes | str]:
        shards = [shard for shard in self.shards if shard.split == TRAIN]
        seen = 0
        done = 0
        total = sum(shard.size for shard in shards)
        phase = _Phase(self.report, "training the tokenizer", total, self.source.unit)
        for shard in shards:
            for text, _ in self.source.documents(shard):
                yield text
                seen += len(text)
                if seen > TRAINING_TEXT:  # a shard may be a whole compressed corpus
                    return
            done += shard.size
            phase(done)


def _tokenize(job: _Job, shards: list[Shard], workers: int | None, report: OnProgress) -> None:
    pending = [shard for shard in shards if not job.file(shard).exists()]
    if workers is None:
        # the cores available to this process, where the system tells
        allowed = getattr(os, "sched_getaffinity", lambda _: range(os.cpu_count() or 1))(0)
        workers = 1 if job.tokenizer is None else len(allowed)
    total = sum(shard.size for shard in shards)
    done = total - sum(shard.size for shard in pending)
    tokens = 0
    phase = _Phase(report, "tokenizing", total, job.source.unit)
    phase(done)
    codec = open_codec(job.tokenizer)
    # threads suffice: tokenizers releases the interpreter lock
    pool = ThreadPoolExecutor(workers)
    try:
        futures = {pool.submit(_tokenize_shard, job, codec, shard): shard for shard in pending}
        for future in as_completed(futures):
            done, tokens = done + futures[future].size, tokens + future.result()
            phase(done, tokens)
    finally:
        pool.shutdown(cancel_futures=True)


def _tokenize_shard(job: _Job, codec: Codec, shard: Shard) -> int:
    end = np.array([] if codec.end_of_text is None else [codec.end_of_text], dtype=job.dtype)
    count = 0
    with replacing(job.file(shard), tag=writer_tag()) as stream:
        for documents in _batches(job.source.documents(shard)):
            texts = [text for text, _ in documents]
            _refuse_ends(codec, texts, job.source)
            encoded = codec.encode(texts)
            for ids, (_, last) in zip(encoded, documents, strict=True):
                for part in (ids.astype(job.dtype, copy=False), end if last else end[:0]):
                    stream.write(part.data)
                    count += len(part)
    return count


def _refuse_ends(codec: Codec, texts: list[bytes | str], source: Source) -> None:
    """Refuse byte 0 within a text of bytes, where it ends a document."""
    if not isinstance(codec, ByteCodec):
        return
    for text in texts:
        if (b"\0" if isinstance(text, bytes) else "\0") in text:  # type: ignore[operator]
            begin = text[:40] if isinstance(text, str) else text[:40].decode(errors="replace")
            raise DataError(
                f"{source.options.name}: the text that begins with {begin!r} has a NUL character, "
                "which ends a document of tokenizer=bytes: remove it, or choose another tokenizer"
            )


def _batches(documents: Iterator[Document]) -> Iterator[list[Document]]:
    """Yield the documents of a shard, which may be larger than memory, some at a time."""
    batch: list[Document] = []
    size = 0
    for document in documents:
        batch.append(document)
        size += len(document[0])
        if size > BATCH:
            yield batch
            batch = []
            size = 0
    if batch:
        yield batch


def _merge(job: _Job, shards: list[Shard], report: OnProgress) -> Path:
    """Concatenate the shards of each split in a directory of this process and return its path."""
    final = job.directory / f"final{writer_tag()}"
    shutil.rmtree(final, ignore_errors=True)
    final.mkdir()
    total = sum(job.file(shard).stat().st_size for shard in shards)
    phase = _Phase(report, "writing", total, "bytes")
    end = open_codec(job.tokenizer).end_of_text
    done = 0
    counts = {}
    digests = {}
    bounds = {}
    made = {shard.split for shard in shards} | {TRAIN, VALIDATION}
    for split in (split for split in SPLITS if split in made):
        with (
            open(final / f"{split}.bin", "wb") as tokens_file,
            open(final / f"{split}.bounds", "wb") as bounds_file,
        ):
            tokens = _Hashed(tokens_file)
            documents = _Bounds(bounds_file, end)
            for piece in _pieces(job, (shard for shard in shards if shard.split == split)):
                tokens.write(piece)
                documents.add(piece)
                done += piece.nbytes
                phase(done)
            digests[f"{split}.bin"] = tokens.finish()
            bounds[f"{split}.bounds"] = documents.finish()
        counts[split] = documents.tokens
    if counts[TRAIN] == 0:
        raise DataError(f"{job.source.options.name}: the train split has no text")
    if job.tokenizer is not None:
        tokenizer = job.tokenizer.read_bytes()
        digests[TOKENIZER] = hashlib.sha256(tokenizer).hexdigest()
        write_atomic(final / TOKENIZER, tokenizer)
        if (file := job.directory / SETTINGS[0]).is_file():
            digests[file.name] = hashlib.sha256(file.read_bytes()).hexdigest()
            write_atomic(final / file.name, file.read_bytes())
    references = {}
    for split, text in raw_targets(job.source, shards).items():
        references[f"{split}.references"] = hashlib.sha256(text).hexdigest()
        write_atomic(final / f"{split}.references", text)
    manifest = {
        "name": job.source.options.name,
        "fingerprint": fingerprint(job.dtype, digests),
        "vocab_size": job.source.vocab_size,
        "dtype": job.dtype,
        "tokens": counts,
        "end_of_text": end,
        "sha256": digests,
        "bounds": bounds,
        "references": references,
        "options": asdict(job.source.options),
    }
    write_atomic(final / MANIFEST, json.dumps(manifest, indent=2) + "\n")
    return final


def _pieces(job: _Job, shards: Iterable[Shard]) -> Iterator[np.ndarray]:
    """Yield the tokens of ``shards`` in pieces of at most ``PIECE`` bytes."""
    for shard in shards:
        with open(job.file(shard), "rb") as stream:
            while content := stream.read(PIECE):
                yield np.frombuffer(content, job.dtype)


class _Hashed:
    """Stream of a new file with the SHA-256 of what was written."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._hash = hashlib.sha256()

    def write(self, array: np.ndarray) -> None:
        self._hash.update(array.data)
        self._stream.write(array.data)

    def finish(self) -> str:
        """Flush the file to disk and return the hash."""
        self._stream.flush()
        os.fsync(self._stream.fileno())
        return self._hash.hexdigest()


class _Bounds(_Hashed):
    """Stream of a ``<split>.bounds`` file; the tokens of the split come in pieces."""

    def __init__(self, stream: BinaryIO, end: int | None) -> None:
        super().__init__(stream)
        self._end = end
        self._last = 0  # end of the last document with an end-of-text token
        self.tokens = 0
        self.write(np.array([0], BOUND))

    def add(self, piece: np.ndarray) -> None:
        """Write the index after each end-of-text token of the next ``piece``."""
        ends = (np.flatnonzero(piece == self._end) + (self.tokens + 1)).astype(BOUND)
        self.write(ends)
        self.tokens += len(piece)
        self._last = int(ends[-1]) if len(ends) else self._last

    def finish(self) -> str:
        """Write the end of a last document without an end-of-text token; see :class:`_Hashed`."""
        if self.tokens > self._last:
            self.write(np.array([self.tokens], BOUND))
        return super().finish()


def _publish(final: Path, directory: Path) -> None:
    parts = final.parent
    sync(final)
    with contextlib.suppress(Damaged):  # another machine was faster, see _exclusive
        open_tokens(directory)
        shutil.rmtree(parts, ignore_errors=True)
        return
    if directory.exists():
        damaged = parts / "damaged"
        shutil.rmtree(damaged, ignore_errors=True)
        os.rename(directory, damaged)
    os.rename(final, directory)
    sync(directory.parent)
    shutil.rmtree(parts, ignore_errors=True)
