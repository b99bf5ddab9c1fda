"""Fixtures of the tests that train; see tiny_runs.py."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.register_assert_rewrite("tiny_runs")
from tiny_runs import Tiny, write_corpus  # noqa: E402

# several runs may share the cores of a test machine: idle threads must not spin
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


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
        def train_step(t: Any) -> dict[str, Any]:
            values = original(t)
            if t.step == step:
                os.kill(os.getpid(), number)
            return values

        monkeypatch.setattr(loop, "train_step", train_step)

    return arm
