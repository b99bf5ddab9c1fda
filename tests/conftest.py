"""Fixtures of all tests, and the check that tests leave nothing in the checkout."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.register_assert_rewrite("support")
from sparsepretrain import registry  # noqa: E402
from sparsepretrain.files import cache_directory  # noqa: E402
from support.tiny_runs import Tiny, write_corpus  # noqa: E402

# Several runs may share the cores of a test machine: idle threads must not spin.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# Many tests have a cache directory of their own; compiling the CPU kernels for each takes seconds.
os.environ.setdefault("NUMBA_CACHE_DIR", str(cache_directory() / "kernels" / "tests"))

CHECKOUT = Path(__file__).parents[1]

# One commit has one result: property tests see the same cases in every run. `make test-explore`
# draws new ones; environments that only check versions of torch have no hypothesis.
EXPLORES = os.environ.get("SPARSEPRETRAIN_TEST_PROFILE") == "explore"
with contextlib.suppress(ModuleNotFoundError):
    from hypothesis import settings

    settings.register_profile("fixed", derandomize=True, deadline=None)
    settings.register_profile("explore", deadline=None, print_blob=True, database=None)
    settings.load_profile("explore" if EXPLORES else "fixed")
FILES_BEFORE = pytest.StashKey[set[Path]]()


def _files_in_checkout() -> set[Path]:
    """List all files, without those that Git, Python and test tools write while tests run."""
    skipped = {".git", ".venv", ".hypothesis", "__pycache__"}
    files: set[Path] = set()
    for folder, folders, names in os.walk(CHECKOUT):
        folders[:] = [f for f in folders if f not in skipped and not f.endswith("_cache")]
        files.update(Path(folder, name) for name in names)
    return files


def pytest_sessionstart(session: pytest.Session) -> None:
    if not hasattr(session.config, "workerinput"):  # in the process that starts the workers
        session.config.stash[FILES_BEFORE] = _files_in_checkout()


def pytest_sessionfinish(session: pytest.Session) -> None:
    before = session.config.stash.get(FILES_BEFORE, None)
    left = sorted(_files_in_checkout() - before) if before is not None else []
    if left:
        names = ", ".join(str(path.relative_to(CHECKOUT)) for path in left[:10])
        print(f"\nFAILED: the tests left {len(left)} files in the checkout: {names}")
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if EXPLORES:  # tests without drawn cases would find the same again
        items[:] = [item for item in items if hasattr(getattr(item, "obj", None), "hypothesis")]


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Seed the global generators, which tests of one process would hand on to each other.

    Before fixtures of all scopes: which test of a module comes first depends on the load.
    """
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(scope="session", autouse=True)
def _session_directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep fixtures of modules and sessions out of the checkout too."""
    with contextlib.chdir(tmp_path_factory.mktemp("session")):
        yield


@pytest.fixture(autouse=True)
def _own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run each test in an empty directory, as a user does: the checkout may hold runs."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="session")
def small_corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve text files, 40 kB in all."""
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="session")
def prepared_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where all tests of a session share prepared data."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def _default_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """``SPARSEPRETRAIN_TEST_BACKEND``: what whatever names no backend runs on the CPU.

    ``triton`` in the interpreter (``TRITON_INTERPRET=1``, ``make test-triton``) or ``reference``,
    so that the tests of the loops, the golden vectors among them, are tests of those too.
    """
    backend = os.environ.get("SPARSEPRETRAIN_TEST_BACKEND")
    if backend in ("triton", "reference"):
        from sparsepretrain.kernels import dispatch

        monkeypatch.setattr(dispatch, "prefers_triton", lambda device: backend == "triton")
        monkeypatch.setattr(dispatch, "prefers_cpu", lambda x: False)


@pytest.fixture(autouse=True)
def _own_plugins() -> Iterator[None]:
    """Forget plug-ins that a test has loaded, which later tests of the process would list."""
    before = set(sys.modules)
    yield
    registry.named_plugins.clear()
    loaded = {name for name in sys.modules.keys() - before if "sparsepretrain_plugin_" in name}
    for name in loaded:
        del sys.modules[name]
    for classes in registry._registered.values():
        for key in [key for key, cls in classes.items() if cls.__module__ in loaded]:
            del classes[key]


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test needs another machine: connections beyond this one are refused."""
    connect = socket.socket.connect

    def local(self: socket.socket, address: Any) -> None:
        internet = self.family in (socket.AF_INET, socket.AF_INET6)
        if internet and address[0] not in ("127.0.0.1", "::1", "localhost"):
            raise OSError(f"a test connects to {address}")
        connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", local)


@pytest.fixture
def tiny(
    tmp_path: Path, small_corpus: Path, prepared_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> Tiny:
    """Small runs below ``tmp_path``."""
    monkeypatch.setenv("SPARSEPRETRAIN_CACHE_DIR", str(prepared_cache))
    return Tiny(tmp_path, small_corpus)


@pytest.fixture
def stop_after(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """``stop_after(3)``: the process receives SIGTERM while it trains step 3."""
    from sparsepretrain.training import loop

    original = loop.train_step

    def arm(step: int, number: int = signal.SIGTERM) -> None:
        def train_step(t: Any) -> Any:
            values = original(t)
            if t.step == step:
                os.kill(os.getpid(), number)
            return values

        monkeypatch.setattr(loop, "train_step", train_step)

    return arm


@pytest.fixture
def drawn():
    """Draw figures in this test."""


@pytest.fixture
def quick_files(request, monkeypatch):
    """Do not draw figures, which takes half a second each."""
    if "drawn" not in request.fixturenames:
        from matplotlib.figure import Figure

        monkeypatch.setattr(Figure, "savefig", lambda figure, file: Path(file).touch())
