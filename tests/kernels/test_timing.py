"""The timer of works on a CUDA device, with a device of which only the clocks exist."""

import contextlib
from types import SimpleNamespace

import pytest
import torch

from sparsepretrain.kernels import timing


class Clocks:
    """Host and device in microseconds: a launch takes host time, and runs when both are free."""

    def __init__(self, monkeypatch):
        self.host = self.device = 0.0
        self.captured = None
        self.modes = []
        cuda = {
            "Stream": lambda: SimpleNamespace(wait_stream=lambda other: None),
            "current_stream": lambda: SimpleNamespace(wait_stream=lambda other: None),
            "stream": lambda stream: contextlib.nullcontext(),
            "device": lambda device: contextlib.nullcontext(),
            "synchronize": self.wait,
            "Event": lambda enable_timing: Event(self),
            "CUDAGraph": lambda: SimpleNamespace(kernels=[], replay=None),
            "graph": self.capture,
            "get_sync_debug_mode": lambda: 0,
            "set_sync_debug_mode": lambda mode: None,
        }
        for name, value in cuda.items():
            monkeypatch.setattr(torch.cuda, name, value)

    def wait(self):
        self.host = self.device = max(self.host, self.device)

    def launch(self, host, device):
        self.host += host
        if self.captured is not None:
            self.captured.append(device)
        else:
            self.device = max(self.host, self.device) + device

    @contextlib.contextmanager
    def capture(self, graph, capture_error_mode):
        self.modes.append(capture_error_mode)
        self.captured = graph.kernels
        yield
        self.captured = None
        graph.replay = lambda: self.launch(5.0, sum(graph.kernels))


class Event:
    def __init__(self, clocks):
        self.clocks, self.at = clocks, 0.0

    def record(self):
        self.at = max(self.clocks.host, self.clocks.device)

    def synchronize(self):
        self.clocks.wait()

    def elapsed_time(self, other):
        return (other.at - self.at) / 1e3


def test_launch_overhead_does_not_change_measured_times(monkeypatch):
    """Each call of a product rebuilds its plan, for longer than a small product runs."""
    clocks = Clocks(monkeypatch)
    works = {"sparse": lambda: clocks.launch(200.0, 70.0), "dense": lambda: clocks.launch(10, 100)}
    found = timing.medians(works, torch.device("cuda"))
    assert found["sparse"] == pytest.approx(70e-6, rel=0.02)
    assert found["dense"] == pytest.approx(100e-6, rel=0.02)
    assert clocks.modes == ["thread_local"] * 2, "threads that pin memory would break a capture"


def test_a_single_call_is_timed_without_its_launch(monkeypatch):
    clocks = Clocks(monkeypatch)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: clocks.launch(5.0, cycles / 1755))
    seconds = timing.once(lambda: clocks.launch(200.0, 30.0), torch.device("cuda"))
    assert seconds == pytest.approx(30e-6)
