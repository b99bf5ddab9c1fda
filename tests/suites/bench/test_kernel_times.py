"""Times of kernels: checks, and the path of a GPU on a fake torch.cuda."""

import contextlib
import dataclasses
import itertools
from types import SimpleNamespace

import torch

import kernels as times
from harness import attempt
from kernel_cases import TINY, kernel_cases
from sparsepretrain import kernels

CPU = torch.device("cpu")


def case_named(name):
    return next(case for case in kernel_cases() if case.name == name)


def checked(case, work):
    """Return the status of a Triton kernel that computes ``work``."""
    wrong, _ = times.check(case, "a", {"triton": work}, case.make(TINY, CPU))
    return wrong[0].status.partition(":")[0] if wrong else "ok"


def test_wrong_kernel_gets_no_time():
    case = case_named("2:4 mask, fp32")
    assert checked(case, lambda x: case.run("reference", x)) == "ok"
    assert checked(case, lambda x: ~case.run("reference", x)) == "wrong"
    assert checked(case, lambda x: case.run("reference", x).float()) == "wrong"
    assert checked(case, lambda x: 1 / 0) == "failed"
    masks = iter([case.run("reference", *case.make(TINY, CPU)), torch.zeros(TINY, dtype=bool)])
    assert checked(case, lambda x: next(masks)) == "wrong", "not repeatable"


class FakeCuda:
    """Fake of torch.cuda for timing on the CPU.

    A capture that fails spoils all later ones, as in torch up to 2.12.
    """

    def __init__(self, monkeypatch):
        self.clock = itertools.count()
        self.capturing = self.spoilt = False
        self.sync_debug_mode = "default"
        properties = SimpleNamespace(L2_cache_size=3 * 64 * 256 * 4)
        nothing = contextlib.nullcontext
        for name, value in {
            "Stream": lambda: SimpleNamespace(wait_stream=lambda other: None),
            "current_stream": lambda: SimpleNamespace(wait_stream=lambda other: None),
            "stream": lambda side: nothing(),
            "synchronize": lambda: None,
            "current_device": lambda: 0,
            "get_device_properties": lambda index: properties,
            "CUDAGraph": lambda: SimpleNamespace(replay=lambda: None),
            "graph": self.capture,
            "Event": self.event,
            "get_sync_debug_mode": lambda: self.sync_debug_mode,
            "set_sync_debug_mode": lambda mode: setattr(self, "sync_debug_mode", mode),
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(times, "COPY_BYTES", 1 << 16)
        monkeypatch.setattr(torch, "compile", lambda work, **_: work)

    @contextlib.contextmanager
    def capture(self, graph, **_):
        if self.spoilt:
            raise RuntimeError("captures_underway.empty() INTERNAL ASSERT FAILED")
        self.capturing = self.spoilt = True
        try:
            yield
            self.spoilt = False
        finally:
            self.capturing = False

    def wait(self):
        """Fail as torch does on a synchronization."""
        if self.capturing:
            raise RuntimeError("operation not permitted when stream is capturing")
        if self.sync_debug_mode == "error":
            raise RuntimeError("called a synchronizing CUDA operation")

    def event(self, enable_timing):
        event = SimpleNamespace(at=0, synchronize=lambda: None)
        event.record = lambda: setattr(event, "at", next(self.clock))
        event.elapsed_time = lambda later: 1e-3 * (later.at - event.at)
        return event


def cases_of(found):
    """Return implementation -> case of one kernel on one shape."""
    return {case.name.rpartition(", ")[2]: case for case in found}


def test_gpu_path_times_checks_and_compares(monkeypatch):
    cuda = FakeCuda(monkeypatch)
    seen = set()

    def run(backend, x):
        seen.add((backend, x.data_ptr()))
        return kernels.nm_mask(x)

    def synchronizes(x):
        cuda.wait()
        return kernels.nm_mask(x)

    others = {"synchronizes": synchronizes, "wrong": lambda x: ~kernels.nm_mask(x)}
    case = dataclasses.replace(case_named("2:4 mask, fp32"), run=run, others=others)
    rows = cases_of(times.on_gpu(case, TINY, rounds=5, device=CPU))
    impls = ["triton", "reference", "compiled reference", "synchronizes", "wrong"]
    assert [name for name in rows if "copy" not in name] == impls
    assert [rows[impl].is_error for impl in impls] == [False] * 4 + [True]
    modes = [rows[impl].detail.get("mode") for impl in impls]
    assert modes == ["graph", "graph", "graph", "eager", None]
    assert rows["wrong"].value is None
    ours = rows["triton"].detail
    assert ours["rounds"] == 5
    assert set(ours["times_as_fast_as"]) == {"reference", "compiled reference", "synchronizes"}
    share = rows["bandwidth over a device copy's"]
    assert share.at_least == 0.85 and share.value == ours["of_copy"] > 0
    # the cache holds three inputs of 64 kB: nine sets keep every input cold
    assert times.copies_for(64 * 256 * 4) == 9
    assert len({place for backend, place in seen if backend == "triton"}) >= 9


def test_synchronizing_work_is_not_captured(monkeypatch):
    cuda = FakeCuda(monkeypatch)

    def waits(x):
        cuda.wait()
        return kernels.nm_mask(x)

    case = dataclasses.replace(case_named("2:4 mask, bf16"), run=lambda _, x: kernels.nm_mask(x))
    first = dataclasses.replace(case, others={"waits": waits})
    rows = cases_of(times.on_gpu(first, TINY, rounds=1, device=CPU))
    modes = {impl: case.detail["mode"] for impl, case in rows.items()}
    assert modes == {"triton": "graph", "reference": "graph", "waits": "eager"}
    assert not cuda.spoilt and cuda.sync_debug_mode == "default"
    later = times.on_gpu(case, TINY, rounds=1, device=CPU)
    assert [row.detail["mode"] for row in later] == ["graph", "graph"]


def test_works_are_launched_one_by_one_where_a_capture_fails(monkeypatch):
    cuda = FakeCuda(monkeypatch)

    def run(backend, x):
        if cuda.capturing:
            raise RuntimeError("no graph\nof this")
        return kernels.nm_mask(x)

    case = dataclasses.replace(case_named("2:4 mask, bf16"), run=run)
    rows = attempt("a", lambda: times.on_gpu(case, TINY, rounds=2, device=CPU))
    # a replayed graph and a launched work cannot be compared
    assert [row.detail["mode"] for row in rows] == ["eager", "eager"]
    assert all(row.status == "ok" and row.value > 0 for row in rows)


def test_work_that_fails_by_itself_is_a_failed_case(monkeypatch):
    FakeCuda(monkeypatch)

    def run(backend, x):
        calls.append(backend)
        if len(calls) > 6:  # it passed the comparison with the reference
            raise RuntimeError("illegal\nmemory access")
        return kernels.nm_mask(x)

    calls = []
    case = dataclasses.replace(case_named("2:4 mask, bf16"), run=run)
    (row,) = attempt("a", lambda: times.on_gpu(case, TINY, rounds=1, device=CPU))
    assert row.status == "failed: illegal memory access" and row.ok is False
