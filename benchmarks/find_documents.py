"""Open the documents of prepared tokens in a process of its own, for ``documents.py``.

Arguments: a directory that ``documents.py`` has written, and ``scan`` or ``bounds``. Prints JSON.
It imports no torch, whose pages would hide the memory that is measured.
"""

from __future__ import annotations

import json
import re
import sys
import time
from pathlib import Path

import numpy as np

from sparsepretrain.data.order import windows
from sparsepretrain.data.tokens import BOUND, TokenData

TOKEN = np.dtype("<u2")
PIECE = 1 << 24
"""Tokens searched at a time."""
MB = 1e6


def find(directory: Path, way: str) -> dict[str, float]:
    """Open the documents, and return the seconds, and the growth of the process in MB.

    `peak`: largest resident memory, mapped pages of the files included, which the system takes back
    when it needs them. `private`: memory of the process alone that stays.
    """
    before = {key: status(key) for key in ("VmRSS", "RssAnon")}
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # resets the peak
    start, cpu = time.perf_counter(), time.process_time()
    tokens = np.memmap(directory / "train.bin", TOKEN, mode="r")
    if way == "scan":
        parts = range(0, len(tokens), PIECE)
        ends = [np.flatnonzero(tokens[i : i + PIECE] == 0) + (i + 1) for i in parts]
        bounds = np.unique(np.concatenate([[0], *ends, [len(tokens)]]))
    else:
        bounds = np.memmap(directory / "train.bounds", BOUND, mode="r")
    data = TokenData("mine", directory, "", 32000, {"train": tokens}, None, 0, {"train": bounds})
    opened = windows(data, "train", 256, 0, documents=True)
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    assert opened.count == len(bounds) - 1
    return {
        "seconds": seconds,
        "cpu seconds": cpu,
        "peak": (status("VmHWM") - before["VmRSS"]) / MB,
        "private": (status("RssAnon") - before["RssAnon"]) / MB,
    }


def status(key: str) -> int:
    """Return a size of this process in bytes."""
    found = re.search(rf"{key}:\s+(\d+) kB", Path("/proc/self/status").read_text(encoding="ascii"))
    assert found is not None
    return int(found[1]) * 1024


if __name__ == "__main__":
    print(json.dumps(find(Path(sys.argv[1]), sys.argv[2])))
