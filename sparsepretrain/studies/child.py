"""Process of a cell: this one, or a child forked from a server with the common imports."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import forkserver, resource_tracker
from multiprocessing.context import ForkServerProcess
from typing import TextIO

import torch

from sparsepretrain.config.compose import shell_line
from sparsepretrain.console import Console
from sparsepretrain.errors import INTERRUPTED, SparsePretrainError, one_line
from sparsepretrain.studies.progress import StudyCell
from sparsepretrain.training.step import STOPS

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
    output = _open(log)
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


def run_here(cell: StudyCell, work: Callable[[Console], int] | None = None) -> int:
    """Do the work of a cell in this process; it prints to the log of its run.

    Args:
        cell: receives the state, and the failure, which is recorded in the run directory too.
        work: replaces that of the cell.

    Returns:
        The exit code.
    """
    code = 1
    claimed = False
    argv = sys.argv
    try:
        with cell.directory.claim():  # refused if another process trains the run
            claimed = True
        sys.argv = ["sparsepretrain", *cell.command]  # recorded with the run
        with _printing_to(str(cell.directory.console_log)) as output:
            print(f"$ {shell_line(sys.argv)}")
            try:
                code = (work or cell.work())(Console(output))
            except Exception as error:
                label = getattr(error, "label", type(error).__name__)
                print(f"{label}: {error}")
                if not isinstance(error, SparsePretrainError):
                    traceback.print_exc()
                raise
    except SparsePretrainError as error:
        code = error.exit_code
        cell.error = f"{error.label}: {one_line(error)}"
    except Exception as error:
        cell.error = f"{type(error).__name__}: {one_line(error)}"
    finally:
        sys.argv = argv
    cell.exit_code = code
    cell.state = cell.goal if not code else "stopped" if code in STOPS else "failed"
    if cell.state == "failed" and not cell.error:
        cell.error = f"see {cell.directory.console_log}"
    if claimed and cell.state != "stopped":
        cell.note()
    return code


@contextlib.contextmanager
def _printing_to(log: str) -> Iterator[TextIO]:
    """Send the output of this process and of its ranks to a file."""
    with _open(log) as output, contextlib.ExitStack() as saved:
        for number in (1, 2):
            copy = os.dup(number)
            saved.callback(os.close, copy)
            saved.callback(os.dup2, copy, number)
            os.dup2(output.fileno(), number)
        saved.enter_context(contextlib.redirect_stdout(output))
        saved.enter_context(contextlib.redirect_stderr(output))
        yield output


def _open(log: str) -> TextIO:
    return open(log, "a", buffering=1, encoding="utf-8", errors="replace")


def _share(threads: int, jobs: int) -> int:
    return max(1, threads // jobs)


def _end_with_parent() -> None:
    """Wait until the parent dies, then stop this run, which saves a checkpoint."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.kill(os.getpid(), signal.SIGTERM)
