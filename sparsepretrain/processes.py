"""Which of several processes this is, as torchrun tells it; without torch.

A process that fails leaves a report for the one that started it, in the form of torch's elastic
agent (``torch.distributed.elastic.multiprocessing.errors``).
"""

from __future__ import annotations

import json
import os
import time
import traceback
from typing import Any

from sparsepretrain.errors import RankError, SparsePretrainError


def started() -> bool:
    """Whether a launcher (torchrun, or this package's own) has started this process."""
    return "WORLD_SIZE" in os.environ and "RANK" in os.environ


def rank() -> int:
    """Of this process among those of the run; 0 is the one that prints."""
    return int(os.environ["RANK"]) if started() else 0


_interrupted = False


def note_interrupt(happened: bool = True) -> None:
    """Remember a SIGINT, or with False forget it."""
    global _interrupted
    _interrupted = happened


def was_interrupted() -> bool:
    """True if SIGINT has come since the command began, and somebody may have swallowed it."""
    return _interrupted


def report(error: BaseException) -> bool:
    """Leave ``error`` for the launcher; returns whether there is one that takes it."""
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not file or not started():
        return False
    about: dict[str, Any] = {"timestamp": str(int(time.time()))}
    if isinstance(error, SparsePretrainError):
        text = "\n".join(f"{error.label}: {line}" for line in error.messages)
        about |= {"label": error.label, "messages": error.messages, "py_callstack": text}
        about["follows"] = isinstance(error, RankError)
    else:
        text = f"{type(error).__name__}: {error}"
        about["py_callstack"] = traceback.format_exc()
    try:
        with open(file, "w", encoding="utf-8") as stream:
            json.dump({"message": {"message": text, "extraInfo": about}}, stream)
    except OSError:
        return False
    return True
