"""Measure how long a run takes to find the documents of prepared tokens, and the memory.

`bounds` opens the file that a preparation writes next to the tokens; `scan` searches the tokens for
the end of each document, as every rank of every start would have to without that file. Each
measurement is a new process. `cold` drops the files from the page cache of the system first.
Needs 10.2 GB of disk (`--quick`: 0.1 GB) in the directory of temporary files.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from find_documents import PIECE, TOKEN
from harness import Case, Options, Work, main
from sparsepretrain.data.tokens import BOUND

GIGABYTES = 10
FIND = Path(__file__).with_name("find_documents.py")
LENGTHS = (100, 700)
"""Shortest and longest document, end included."""


def works(options: Options) -> dict[str, Work]:
    """Return the one work, which writes the tokens and measures."""
    size = int((0.1 if options.quick else GIGABYTES) * 1e9)
    return {"documents": functools.partial(documents, size, 1 if options.quick else 5)}


def documents(size: int, repeats: int) -> Iterator[Case]:
    """Compare both ways of finding the documents of `size` bytes of tokens."""
    with tempfile.TemporaryDirectory() as directory:
        count = write(Path(directory), size)
        for state in ("cold", "warm"):
            for way in ("scan", "bounds"):
                # the fastest: other programs of the machine only make it longer
                found = min(
                    (measure(directory, way, state) for _ in range(repeats)),
                    key=lambda one: one["seconds"],
                )
                detail = {"documents": count, "token bytes": size, "processes": repeats}
                yield Case(
                    name=f"find documents, {way}, {state}",
                    value=found["seconds"],
                    unit="s",
                    detail=found | detail,
                )


def write(directory: Path, size: int) -> int:
    """Write tokens with a 0 after every document, and their bounds; return the documents."""
    rng = np.random.default_rng(0)
    total, last, count = size // TOKEN.itemsize, 0, 0
    with (
        open(directory / "train.bin", "wb") as tokens,
        open(directory / "train.bounds", "wb") as ends,
    ):
        ends.write(np.zeros(1, BOUND).data)
        for begin in range(0, total, PIECE):
            piece = rng.integers(1, 32000, min(PIECE, total - begin), TOKEN)
            lengths = rng.integers(*LENGTHS, len(piece) // LENGTHS[0], endpoint=True)
            found = last + np.cumsum(lengths)
            found = found[(found > begin) & (found <= begin + len(piece))]
            piece[found - 1 - begin] = 0
            tokens.write(piece.data)
            ends.write(found.astype(BOUND).data)
            last, count = int(found[-1]), count + len(found)
        if last < total:
            ends.write(np.array([total], BOUND).data)
            count += 1
        for stream in (tokens, ends):
            stream.flush()
            os.fsync(stream.fileno())
    return count


def measure(directory: str, way: str, state: str) -> dict[str, float]:
    """Return the result of ``find_documents.py`` in a new process."""
    if state == "cold":
        for file in Path(directory).iterdir():
            with open(file, "rb") as stream:
                os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    command = [sys.executable, str(FIND), directory, way]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout)
    return found


if __name__ == "__main__":
    sys.exit(main("documents", works))
