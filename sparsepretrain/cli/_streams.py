"""Standard streams that are closed, broken or full."""

from __future__ import annotations

import os
import select
import sys


def replace_closed_streams() -> None:
    """Open what a daemon was started without, or files opened later would take its number."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:  # the lowest free number is this one
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115


def stdout_is_closed() -> bool:
    """Whether the reader is gone (``| head``); if so, keep it quiet."""
    output = select.poll()
    output.register(sys.stdout, 0)  # a pipe without a reader reports an error unasked
    if not output.poll(0):
        return False
    silence_stdout()
    return True


def silence_stdout() -> None:
    """What is still buffered would fail once more when the interpreter exits."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
