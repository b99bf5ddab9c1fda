"""Tokenization of shards, in this process or in worker processes."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import connection, get_context, parent_process
from pathlib import Path

import numpy as np

from sparsepretrain.data.encoding import Codec, open_codec
from sparsepretrain.data.source import Shard, Source
from sparsepretrain.errors import DataError
from sparsepretrain.files import write_atomic


@dataclass(frozen=True, slots=True)
class Job:
    """Settings shared by all workers."""

    source: Source
    tokenizer: Path | None
    """tokenizer.json; None: bytes."""
    dtype: str
    """NumPy dtype of the token files."""
    directory: Path
    """Output directory."""

    def file(self, shard: Shard) -> Path:
        """Return the token file of ``shard``; an existing file is complete."""
        return self.directory / f"{shard.split}-{shard.index:06d}.bin"


def run(job: Job, shards: list[Shard], workers: int) -> Iterator[tuple[Shard, int]]:
    """Tokenize ``shards`` and yield each with its number of tokens when finished.

    Raises:
        DataError: a document cannot be read, or a worker process died.
    """
    if workers <= 1:
        codec = open_codec(job.tokenizer)
        for shard in shards:
            yield shard, _tokenize(job, codec, shard)
        return
    # not fork: tokenizers and pyarrow have threads, and a forked lock stays locked
    executor = ProcessPoolExecutor(workers, get_context("spawn"), _start_worker, (job,))
    try:
        futures = {executor.submit(_in_worker, shard): shard for shard in shards}
        for future in as_completed(futures):
            yield futures[future], future.result()
    except BrokenProcessPool as error:
        raise DataError(
            "a worker process died while tokenizing (out of memory?): run again with fewer "
            "--workers; finished shards are kept"
        ) from error
    finally:
        executor.shutdown(cancel_futures=True)


def _tokenize(job: Job, codec: Codec, shard: Shard) -> int:
    documents = list(job.source.documents(shard))
    encoded = codec.encode([text for text, _ in documents])
    end = np.array([] if codec.end_of_text is None else [codec.end_of_text], dtype=job.dtype)
    parts = [end[:0]]
    for ids, (_, last) in zip(encoded, documents, strict=True):
        parts += [ids.astype(job.dtype, copy=False), end if last else end[:0]]
    tokens = np.concatenate(parts)
    # an orphaned worker may still write a shard that another process works on: own temporary file
    write_atomic(job.file(shard), tokens.data, tag=f".{os.getpid()}")
    return len(tokens)


_worker: tuple[Job, Codec]


def _start_worker(job: Job) -> None:
    global _worker
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    threading.Thread(target=_die_with_parent, daemon=True).start()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # or each would start a thread per core
    _worker = job, open_codec(job.tokenizer)


def _die_with_parent() -> None:
    # a killed parent closes no queue: its workers would wait forever
    parent = parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os._exit(1)


def _in_worker(shard: Shard) -> int:
    return _tokenize(*_worker, shard)
