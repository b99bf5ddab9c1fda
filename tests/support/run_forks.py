"""Trains in forked children that are killed; reads jobs from stdin, writes results to stdout.

Importing torch and transformers takes five seconds, a run a tenth of one: the imports are done
once and every run is a fork of this process, which has no threads of its own.

A job: {"argv": [...], "at": what to wait for, "delay": seconds after that, "signals": [numbers],
"gap": seconds between them}
"at" is {"line": k}: k lines in metrics.jsonl of "directory", or {"seconds": s} after the start, or
{"call": k}: the child kills itself at the k-th file operation, {"call": k, "thread": "checkpoint"}:
at the k-th of threads that are called so, or null: no signal.
The result: {"code": exit code or -signal, "out": stdout and stderr}.
"""

import json
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import safetensors.torch
import torch.utils.flop_counter  # noqa: F401
import transformers.models.gpt2.modeling_gpt2  # noqa: F401

import sparsepretrain.training.trainer  # noqa: F401
from sparsepretrain.cli import train
from sparsepretrain.training.stopping import StopSignals
from support.forked import main_in_child

LIMIT = 120.0
train.illustrate = lambda *args: None  # plots take longer than the runs


enter = StopSignals.__enter__


def unblocked(self: StopSignals) -> StopSignals:
    enter(self)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    return self


StopSignals.__enter__ = unblocked  # type: ignore[method-assign]


def child(argv: list[str], log: int, at: dict[str, Any]) -> None:
    def prepare() -> None:
        if "call" in at:
            kill_at(at["call"], at.get("thread", ""))

    main_in_child(argv, log, prepare)


def kill_at(call: int, thread: str) -> None:
    """SIGKILL this process before the ``call``-th operation of ``thread`` that changes a file."""
    count = 0

    def wrap(function: Any) -> Any:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            nonlocal count
            count += threading.current_thread().name.startswith(thread)
            if count == call:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **kwargs)

        return wrapped

    for owner, name in (
        (os, "replace"), (os, "fsync"), (os, "rename"), (os, "mkdir"), (os, "unlink"),
        (shutil, "rmtree"), (safetensors.torch, "save_file"), (Path, "write_text"), (Path, "mkdir"),
    ):  # fmt: skip
        setattr(owner, name, wrap(getattr(owner, name)))


def lines(directory: str) -> int:
    try:
        return (Path(directory) / "metrics.jsonl").read_bytes().count(b"\n")
    except OSError:
        return 0


def run(job: dict[str, Any]) -> dict[str, Any]:
    at = job["at"] or {}
    with tempfile.TemporaryFile() as log:
        start = time.monotonic()
        # argparse and omegaconf turn an interrupt into errors of their own: an early one waits
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        pid = os.fork()
        if pid == 0:
            child(job["argv"], log.fileno(), at)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        todo = list(job.get("signals", [signal.SIGKILL])) if at and "call" not in at else []
        status = None
        while status is None:
            seconds = time.monotonic() - start
            if todo and (
                lines(job["directory"]) >= at["line"] if "line" in at else seconds >= at["seconds"]
            ):
                time.sleep(job.get("delay", 0.0))
                for number in todo:
                    os.kill(pid, number)
                    time.sleep(job.get("gap", 0.0))
                todo = []
            if seconds > LIMIT:
                os.kill(pid, signal.SIGKILL)
            done, code = os.waitpid(pid, os.WNOHANG)
            status = code if done else None
            time.sleep(0.0005)
        log.seek(0)
        return {"code": os.waitstatus_to_exitcode(status), "out": log.read().decode()}


if __name__ == "__main__":
    for text in sys.stdin:
        print(json.dumps(run(json.loads(text))), flush=True)
