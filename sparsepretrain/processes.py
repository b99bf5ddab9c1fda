"""Rank of this process as set by torchrun, and its error report; without torch.

A failed rank writes a report for its launcher in the format of torch's elastic agent
(``torch.distributed.elastic.multiprocessing.errors``).
"""

from __future__ import annotations

import json
import os
import time
import traceback
from typing import Any, NoReturn

from sparsepretrain.errors import RankError, SparsePretrainError


def started() -> bool:
    """Return True if a launcher (torchrun, or this package's own) started this process."""
    return "WORLD_SIZE" in os.environ and "RANK" in os.environ


def rank() -> int:
    """Return the rank of this process; rank 0 prints."""
    return int(os.environ["RANK"]) if started() else 0


interrupted = False
"""True after a SIGINT to the command."""


def interrupt(number: int, frame: object) -> NoReturn:
    """Handle SIGINT; note it, since a bare ``except`` of a library may swallow the exception."""
    global interrupted
    interrupted = True
    raise KeyboardInterrupt


def report(error: BaseException) -> bool:
    """Write ``error`` for the launcher; return False without a launcher."""
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
