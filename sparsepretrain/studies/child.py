"""The child process of a cell, forked from a server that has imported what all of them need."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from multiprocessing import forkserver, resource_tracker
from multiprocessing.context import ForkServerProcess

from sparsepretrain.config.compose import shell_line
from sparsepretrain.errors import INTERRUPTED, SparsePretrainError
from sparsepretrain.tracking.console import Console

LOST = 255
"""Exit code of a child whose fork server was killed: what became of it is not known."""

# Importing torch and transformers takes 5 to 8 s, which a fork server pays once. It may be forked:
# the imports start no thread and do not initialise CUDA (tests/studies/test_engine.py).
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
    """Call ``work`` in a child process, whose exit code is what it returns.

    Args:
        work: can be pickled.
        family: of the model, whose module of transformers the fork server imports.
        command: words after ``sparsepretrain`` that do the same; empty: those of this process.
        log: file to which it prints.
        jobs: children that divide the threads of the CPU.
        environment: its variables, all of them.
    """
    resource_tracker.ensure_running()  # which unblocks signals on its way
    library = f"transformers.models.{family}.modeling_{family}"  # passed over if there is none
    modules = ["sparsepretrain.training.trainer", "numba", "omegaconf", library]
    forkserver.set_forkserver_preload(modules)
    # the server must outlive a signal to the whole process group, and its children their start
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
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
    os.setpgid(0, 0)  # signals of the terminal come through the parent, once
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
        import torch

        if jobs > 1:
            torch.set_num_threads(max(1, torch.get_num_threads() // jobs))
        sys.exit(work(Console(output)))
    except SparsePretrainError as error:
        print(f"{error.label}: {error}")
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


def _end_with_parent() -> None:
    """Save and end when the parent was killed."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.kill(os.getpid(), signal.SIGTERM)
