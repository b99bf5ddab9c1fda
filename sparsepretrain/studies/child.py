"""Child process of a cell, forked from a server with the common imports."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from multiprocessing import forkserver, resource_tracker
from multiprocessing.context import ForkServerProcess

import torch

from sparsepretrain.config.compose import shell_line
from sparsepretrain.console import Console
from sparsepretrain.errors import INTERRUPTED, SparsePretrainError

# Importing torch and transformers takes 5 to 8 s; a fork server pays once. Forking is safe: the
# imports start no thread and do not initialize CUDA (tests/studies/test_engine.py).
_processes = multiprocessing.get_context("forkserver")
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def start_child(
    work: Callable[[Console], int],
    *,
    family: str,
    command: Sequence[str],
    log: str,
    jobs: int,
    environment: dict[str, str],
) -> ForkServerProcess:
    """Call picklable ``work`` in a child process; its result is the exit code."""
    resource_tracker.ensure_running()  # first: starting it unblocks signals
    library = f"transformers.models.{family}.modeling_{family}"  # skipped if missing
    modules = ["sparsepretrain.training.launch", "numba", "omegaconf", library]
    forkserver.set_forkserver_preload(modules)
    # The server and new children inherit the mask: Ctrl-C reaches the whole process group.
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    if jobs > 1:  # read when NumPy is imported; idle threads spin and slow other cells
        os.environ.setdefault("OPENBLAS_NUM_THREADS", str(_share(os.cpu_count() or 1, jobs)))
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    child = _processes.Process(target=_work, args=(work, command, log, jobs, environment))
    child.start()
    return child


def _work(
    work: Callable[[Console], int],
    command: Sequence[str],
    log: str,
    jobs: int,
    environment: dict[str, str],
) -> None:
    """Body of a child process."""
    os.setpgid(0, 0)  # the parent forwards signals of the terminal, once
    os.environ.clear()
    os.environ.update(environment)
    output = open(log, "a", buffering=1, encoding="utf-8", errors="replace")  # noqa: SIM115
    os.dup2(output.fileno(), 1)
    os.dup2(output.fileno(), 2)
    sys.stdout = sys.stderr = output
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    if command:
        sys.argv = ["sparsepretrain", *command]
        print(f"$ {shell_line(sys.argv)}")
    try:
        if jobs > 1:
            torch.set_num_threads(_share(torch.get_num_threads(), jobs))
            os.environ.pop("OMP_NUM_THREADS", None)  # ranks of the cell divide its share
        sys.exit(work(Console(output)))
    except SparsePretrainError as error:
        print(f"{error.label}: {error}")
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


def _share(threads: int, jobs: int) -> int:
    return max(1, threads // jobs)


def _end_with_parent() -> None:
    """Wait until the parent dies, then stop this run, which saves a checkpoint."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.kill(os.getpid(), signal.SIGTERM)
