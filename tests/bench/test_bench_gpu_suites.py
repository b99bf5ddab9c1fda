"""The suites for a GPU: their registry, what they judge, and that they run without one."""

import contextlib
import dataclasses
import itertools
import json
import os
import subprocess
import sys
from importlib import import_module
from types import SimpleNamespace

import pytest
import torch
from kernel_variants import all_cases

from sparsepretrain import bench, cli, kernels
from sparsepretrain.bench import gpu, linear, train
from sparsepretrain.bench import kernels as suite
from sparsepretrain.bench.kernel_cases import TINY, kernel_cases, normal
from sparsepretrain.bench.kernels import Timed, difference
from sparsepretrain.bench.linear import timed_methods
from sparsepretrain.kernels.timing import medians
from sparsepretrain.sparsity.execution import semi_structured

CPU = torch.device("cpu")


def case_named(name):
    return next(case for case in kernel_cases() if case.name == name)


def test_registry():
    cases = all_cases()
    names = [case.name for case in cases]
    assert len(set(names)) == len(names)
    for case in cases:
        assert case.limits, case.name
        assert case.bytes > 0
        assert case.goal is None or 0 < case.goal <= 1
        assert case.shapes or (case.goal is None and case.goal_us is None), case.name
        assert set(case.refused) <= set(case.architectures)
    assert all(case.shapes for case in kernel_cases())
    goals = {case.name for case in cases if case.goal or case.goal_us}
    assert {
        "2:4 soft threshold ×β, fp32→bf16",
        "S-STE after a step, all FFN weights of 124M",
    } <= goals


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
def test_kernels_without_a_gpu(tmp_path):
    path = tmp_path / "kernels.json"
    result = bench.run(suite="kernels", out=path, quick=True)
    assert json.loads(path.read_text()) == result
    assert result["schema"] == 1
    assert result["gpu"] is None
    assert result["within_limits"] is True
    timed = {case.name for case in kernel_cases()}
    assert {row["case"] for row in result["cases"]} == timed
    for row in result["cases"]:
        if row["impl"] == "triton":
            assert row["status"] == "skipped: needs a CUDA GPU"
            assert row["us"] is None
        else:
            assert row["status"] == "ok", row
            assert row["us"]["p10"] <= row["us"]["p50"] <= row["us"]["p90"]
            assert row["max_err"] <= 1e-2
        assert row["frac_of_copy"] is None
    assert not path.with_suffix(".png").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
@pytest.mark.parametrize(
    ("name", "impls", "lines"),
    [
        ("linear", ["nn.Linear", *timed_methods()], ["linear, LLaMA 7B, forward and backward"]),
        ("train", ["dense", "sste"], ["training step, GPT-2 124M, bf16, compiled"]),
        (
            "block",
            4 * ["nn.Linear", *timed_methods(["sste", "tsrste"])],
            ["| sste | 2 | 16 | 64 | 2 | ", "| method | N | n | d | h | FFN, training, bf16 |"],
        ),
        ("products", 3 * ["dense", "2:4"], ["| fp8 e4m3 | 128 | 0.", "| type | m = n = k |"]),
        ("hours", ["dense", "sste"], ["| GPT-2 micro | sste | 0.", "step, DeiT-base"]),
    ],
)
def test_layers_and_steps_without_a_gpu(tmp_path, name, impls, lines):
    path = tmp_path / "out.json"
    result = bench.run(suite=name, out=path, quick=True)
    timed = [row for row in result["cases"] if row["us"]]
    assert [row["impl"] for row in timed] == impls
    for row in timed:
        assert row["status"] == "ok"
        assert row["us"]["p50"] > 0
        assert all(ratio > 0 for ratio in row["ratio_to"].values())
    others = [row for row in result["cases"] if row["us"] is None]
    assert others and all(row["status"] == "skipped: needs a CUDA GPU" for row in others)
    page = path.with_suffix(".md").read_text()
    assert all(line in page for line in lines), page
    if name == "hours":
        dense, _ = timed
        assert dense["hours"] == pytest.approx(dense["steps"] * dense["us"]["p50"] / 3.6e9)
    if name == "train":
        dense, sste = timed
        assert dense["losses"] != sste["losses"]
        assert dense["losses"][0] == pytest.approx(5.5, abs=0.5)  # ln 256 = 5.545
        assert sste["flip_rate"] > 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
def test_methods_and_backend_are_chosen(tmp_path, capsys):
    path = tmp_path / "out.json"
    words = [f"out={path}", "quick=true", "methods=sste", "backend=auto"]
    for name, impls in (
        ("linear", ["nn.Linear", "dense", "sste, mvue=none", "sste"]),
        ("train", ["dense", "sste"]),
    ):
        assert cli.main(["bench", f"suite={name}", *words]) == 0
        rows = [row for row in json.loads(path.read_text())["cases"] if row["us"]]
        assert sorted(row["impl"] for row in rows) == sorted(impls)
        assert all(row["case"].endswith(", backend=auto") for row in rows)
        assert path.with_suffix(".png").read_bytes()[:4] == b"\x89PNG"
    capsys.readouterr()
    assert cli.main(["bench", "suite=linear", "methods=sst", f"out={path}"]) == 2
    assert "no method 'sst' (did you mean 'sste'?)" in capsys.readouterr().err
    assert cli.main(["bench", "suite=cpu", "methods=sste"]) == 2
    assert (
        "methods, backend and fp8 are for suite=linear, block, train, hours"
        in capsys.readouterr().err
    )
    assert cli.main(["bench", "suite=hours", "fp8=true"]) == 2
    assert "suite=hours measures recipes as they are" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
def test_layers_in_fp8_are_rehearsed_simulated(tmp_path):
    path = tmp_path / "out.json"
    for more, recipe in ((), "hybrid"), (("backend=auto",), "e4m3"):
        words = [f"out={path}", "quick=true", "methods=ste", "fp8=true", *more]
        assert cli.main(["bench", "suite=linear", *words]) == 0
        rows = [row for row in json.loads(path.read_text())["cases"] if row["us"]]
        assert {row["status"] for row in rows} == {"ok"}
        assert all(", bf16, fp8" in row["case"] for row in rows)
        choice = bench.Choice(backend="auto" if more else "emulate", fp8=True)
        assert choice.precision(torch.device("cuda")) == {"name": "fp8", "recipe": recipe}


@pytest.mark.filterwarnings("ignore:StepAdamW switched")
@pytest.mark.parametrize("name", timed_methods())
def test_every_method_takes_steps(name):
    run = train.Training(name, train.TINY, 2, train.source_bytes(), CPU)
    run.step()
    assert len(run.losses) == 1


def test_a_wrong_kernel_gets_no_time(monkeypatch):
    """The GPU path with the timer replaced: what is compared, and what is refused."""
    case = case_named("2:4 mask, fp32")
    inputs = case.make(TINY, CPU)
    expected = case.run("reference", *inputs)
    for work, status in (
        (lambda x: case.run("reference", x), "ok"),
        (lambda x: ~case.run("reference", x), "wrong"),
        (lambda x: case.run("reference", x).float(), "wrong"),
        (lambda x: 1 / 0, "failed: division by zero"),
    ):
        result = Timed(case=case.name, shape=list(TINY), impl="triton", goal=0.8)
        assert suite._is_right(result, case, work, inputs, expected) is (status == "ok")
        assert result.status == status
        assert result.ok is (None if status == "ok" else False)


def test_a_wrong_sparse_product_gets_no_time(tmp_path, monkeypatch):
    """``auto`` with a wrong entry in sparse products without a bias, which only MVUE has."""
    wrong = []

    def multiply(packed, dense, bias=None, **flags):
        product = kernels.matmul_24(packed, dense, bias, **flags)
        if bias is None:
            wrong.append(product.shape)
            product[0, 0] += 0.03 * product.abs().max()
        return product

    def seconds(run):
        run()
        return 1e-3 if isinstance(run.args[0], semi_structured.SemiStructured) else 2e-3

    def medians(works, device):
        return {name: seconds(run) for name, run in works.items()}

    monkeypatch.setattr(semi_structured, "unsupported", lambda device, **_: None)
    monkeypatch.setattr(semi_structured, "medians", medians)
    monkeypatch.setattr(semi_structured, "matmul_24", multiply)
    choice = bench.Choice(("sste",), "auto")
    result = bench.run(suite="linear", out=tmp_path / "out.json", quick=True, choice=choice)
    rows = {row["impl"]: row for row in result["cases"] if row["impl"]}
    status = {"nn.Linear": "ok", "dense": "ok", "sste, mvue=none": "ok", "sste": "wrong"}
    assert {name: row["status"] for name, row in rows.items()} == status
    assert rows["sste"]["us"] is None and set(wrong) == {(128, 64)}
    assert rows["sste, mvue=none"]["max_err"] < linear.TOLERANCE < rows["sste"]["max_err"] < 0.04


def test_an_unrepeatable_kernel_is_wrong():
    case = case_named("2:4 soft threshold ×β, fp32→bf16")
    inputs = case.make(TINY, CPU)
    expected = case.run("reference", *inputs)
    calls = iter([expected, expected + 1])
    result = Timed(case=case.name, shape=list(TINY), impl="triton")
    assert not suite._is_right(result, case, lambda *_: next(calls), inputs, expected)
    assert result.status == "wrong"


def test_goals_are_judged():
    times = {"p10": 1.0, "p50": 2.0, "p90": 3.0, "rounds": 3}
    row = Timed(case="a", shape=[4, 4], impl="triton", us=times, frac_of_copy=0.8, goal=0.85)
    assert row.ok is False
    assert (row.value_text, row.limit_text) == ("2 µs, 80% of copy", "≥ 85% of copy")
    row.goal = 0.75
    assert row.ok is True
    row.goal, row.goal_us = None, 1.9
    assert (row.ok, row.limit_text) == (False, "≤ 1.9 µs")


def test_times_become_fractions_and_ratios():
    copy = gpu.Series(us=[1e3, 2e3], mode="graph")  # 2 GiB in 1 ms and in 2 ms
    ours, theirs = gpu.Series(us=[10, 20], mode="graph"), gpu.Series(us=[30, 60], mode="eager")
    rows = {
        impl: Timed(case="a", shape=[4, 4], impl=impl, bytes=2e-2 * gpu.COPY_BYTES)
        for impl in ("triton", "reference")
    }
    suite._fill(rows, {suite.COPY: copy, "triton": ours, "reference": theirs})
    assert rows["triton"].frac_of_copy == pytest.approx(1.0)
    assert rows["triton"].ratio_to == {"reference": 3.0}
    assert rows["reference"].frac_of_copy == pytest.approx(1 / 3)
    assert rows["reference"].mode == "eager"


class FakeCuda:
    """Enough of torch.cuda to time on the CPU.

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
        monkeypatch.setattr(gpu, "COPY_BYTES", 1 << 16)
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
        """What torch does where the host waits for the device."""
        if self.capturing:
            raise RuntimeError("operation not permitted when stream is capturing")
        if self.sync_debug_mode == "error":
            raise RuntimeError("called a synchronizing CUDA operation")

    def event(self, enable_timing):
        event = SimpleNamespace(at=0, synchronize=lambda: None)
        event.record = lambda: setattr(event, "at", next(self.clock))
        event.elapsed_time = lambda later: 1e-3 * (later.at - event.at)
        return event


def test_the_path_of_a_gpu(monkeypatch):
    cuda = FakeCuda(monkeypatch)
    seen = set()

    def run(backend, x):
        seen.add((backend, x.data_ptr()))
        return kernels.nm_mask(x)

    def synchronises(x):
        cuda.wait()
        return kernels.nm_mask(x)

    case = dataclasses.replace(
        case_named("2:4 mask, fp32"),
        run=run,
        others={"synchronises": synchronises, "wrong": lambda x: ~kernels.nm_mask(x)},
    )
    rows = {row.impl: row for row in suite.on_gpu(case, TINY, rounds=5, device=CPU)}
    assert list(rows) == ["triton", "reference", "compiled reference", "synchronises", "wrong"]
    assert [row.status for row in rows.values()] == ["ok", "ok", "ok", "ok", "wrong"]
    assert [row.mode for row in rows.values()] == ["graph", "graph", "graph", "eager", ""]
    assert rows["wrong"].us is None
    ours = rows["triton"]
    assert ours.us["rounds"] == 5
    assert ours.goal == 0.85
    assert set(ours.ratio_to) == {"reference", "compiled reference", "synchronises"}
    assert ours.bytes == 5 * 64 * 256
    assert ours.frac_of_copy > 0
    # the inputs are 64 kB and the cache three times that: nine sets keep every one cold
    assert gpu.copies_for(64 * 256 * 4) == 9
    assert len({place for backend, place in seen if backend == "triton"}) >= 9


def test_a_work_that_waits_is_not_captured_and_spoils_no_later_case(monkeypatch):
    cuda = FakeCuda(monkeypatch)

    def waits(x):
        cuda.wait()
        return kernels.nm_mask(x)

    case = dataclasses.replace(case_named("2:4 mask, bf16"), run=lambda _, x: kernels.nm_mask(x))
    first = dataclasses.replace(case, others={"waits": waits})
    modes = {row.impl: row.mode for row in suite.on_gpu(first, TINY, rounds=1, device=CPU)}
    assert modes == {"triton": "graph", "reference": "graph", "waits": "eager"}
    assert not cuda.spoilt and cuda.sync_debug_mode == "default"
    later = suite.on_gpu(case, TINY, rounds=1, device=CPU)
    assert [row.mode for row in later] == ["graph", "graph"]


def test_a_failed_capture_stops_its_case_with_a_reason(monkeypatch):
    cuda = FakeCuda(monkeypatch)

    def run(backend, x):
        if cuda.capturing:
            raise RuntimeError("no graph\nof this")
        return kernels.nm_mask(x)

    case = dataclasses.replace(case_named("2:4 mask, bf16"), run=run)
    rows = suite.on_gpu(case, TINY, rounds=1, device=CPU)
    assert {row.status for row in rows} == {"failed: no graph of this"}
    assert all(row.us is None and row.ok is False for row in rows)


@pytest.mark.parametrize("name", ["linear", "products"])
def test_a_module_that_cannot_be_timed_is_a_failed_case(name, tmp_path, monkeypatch):
    def refuse(*_):
        raise RuntimeError("no graph of this")

    monkeypatch.setattr(import_module(f"sparsepretrain.bench.{name}"), "durations", refuse)
    choice = bench.Choice(("ste",)) if name == "linear" else None
    result = bench.run(suite=name, out=tmp_path / "out.json", quick=True, choice=choice)
    failed = [row for row in result["cases"] if row["status"] == "failed: no graph of this"]
    assert len(failed) == (1 if name == "linear" else 3)
    assert all(row["ok"] is False for row in failed)


def named(name, us=1.0):
    return Timed(
        case=name, shape=[], impl="", us=dict.fromkeys(("p10", "p50", "p90", "rounds"), us)
    )


@pytest.fixture
def listed(tmp_path, monkeypatch):
    """``listed(*works, **words)`` runs them as a suite; the JSON and what was raised."""
    module = SimpleNamespace()
    monkeypatch.setitem(bench.SUITES, "kernels", "listed_suite")
    monkeypatch.setitem(sys.modules, "listed_suite", module)

    def run(*works, **words):
        module.cases, path, error = lambda quick: works, tmp_path / "out.json", None
        try:
            bench.run(suite="kernels", out=path, **words)
        except BaseException as caught:
            error = caught
        return [row["case"] for row in json.loads(path.read_text())["cases"]], error

    return run


def test_cases_that_were_measured_survive_the_end_of_a_suite(listed):
    def killed():
        raise KeyboardInterrupt

    cases, error = listed(lambda: [named("a"), named("b")], named("c"), killed, named("d"))
    assert cases == ["a", "b", "c"] and isinstance(error, KeyboardInterrupt)


def test_no_case_is_begun_when_the_budget_is_spent(listed, monkeypatch, tmp_path):
    seconds = iter(range(0, 1000, 10))
    monkeypatch.setattr(bench, "time", SimpleNamespace(monotonic=lambda: next(seconds)))
    works = [lambda name=name: [named(name)] for name in "abcde"]
    cases, error = listed(*works, budget=25)
    assert error is None and cases == ["a", "b", "the last 3 of 5"]
    last = json.loads((tmp_path / "out.json").read_text())["cases"][-1]
    assert last["status"] == "skipped: 25 s are over" and last["ok"] is None


def test_products_to_choose_from_are_timed_one_by_one_where_no_graph_captures_them(monkeypatch):
    cuda = FakeCuda(monkeypatch)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())

    def refused():
        if cuda.capturing:
            raise RuntimeError("no graph of this")

    assert set(medians({"a": refused, "b": lambda: None}, CPU)) == {"a", "b"}
    with pytest.raises(RuntimeError, match="no such product"):
        medians({"a": lambda: (_ for _ in ()).throw(RuntimeError("no such product"))}, CPU)


def test_references_are_compiled_where_there_is_a_goal(monkeypatch):
    FakeCuda(monkeypatch)
    without = case_named("2:4 mask, bf16")
    goal = dataclasses.replace(without, goal=0.5)
    for case, compiled in ((without, False), (goal, True)):
        case = dataclasses.replace(case, run=lambda _, x: kernels.nm_mask(x))
        found = {row.impl for row in suite.on_gpu(case, TINY, rounds=1, device=CPU)}
        assert ("compiled reference" in found) is compiled


def test_small_shapes_are_timed_last(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    shapes = [work.args[1] for work in suite.cases(quick=False)]
    assert len(shapes) == sum(len(case.shapes) for case in kernel_cases())
    sizes = [rows * columns for rows, columns in shapes]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] > sizes[-1]


@pytest.mark.parametrize("backend", ["emulate", "auto"])
def test_training_stores_operands_whatever_the_backend(backend):
    choice = bench.Choice(("sste",), backend)
    run = train.Training("sste", train.TINY, 2, train.source_bytes(), CPU, choice=choice)
    run.step()
    assert all(layer.sparsity._stored for layer in run.sparsifier.layers.values())


def test_ceilings(monkeypatch):
    FakeCuda(monkeypatch)
    monkeypatch.setattr(gpu, "PRODUCT", 64)
    found = gpu.ceilings(CPU)
    assert set(found) == {"copy_gbps", "bf16_tflops"} and all(v > 0 for v in found.values())


def test_difference():
    x = torch.tensor([1.0, -4.0, float("nan"), float("inf")])
    assert difference(x, x.clone()) == 0
    assert difference(x + torch.tensor([1.0, 0, 0, 0]), x) == 0.25
    assert difference(x.nan_to_num(0.0), x) == float("inf")
    assert difference(-x, x) == float("inf")  # the sign of an infinity
    assert difference(x.half(), x) == float("inf")
    assert difference(x[:3], x) == float("inf")
    mask = torch.tensor([True, False, True, True])
    assert difference(mask, ~mask) == 1.0
    assert difference([mask, (x, 3 * mask)], [mask, (x, 3 * mask)]) == 0
    assert difference(torch.empty(0), torch.empty(0)) == 0


def test_fresh_copies_keep_strides():
    x = normal((8, 12), CPU).t()
    (copy, (inner,), number) = suite._fresh((x, [x], 3))
    assert copy.stride() == x.stride()
    assert number == 3
    assert torch.equal(inner, x)
    assert inner.data_ptr() != x.data_ptr()


def test_plot(tmp_path):
    times = {"p10": 1.0, "p50": 2.0, "p90": 3.0, "rounds": 3}
    row = Timed(case="a", shape=[4, 4], impl="triton", us=times, frac_of_copy=0.8, goal=0.85)
    environment = {"hardware": {"device": "GPU"}, "packages": {"torch": "2"}, "commit": "abc"}
    result = {"suite": "kernels", "cases": [row.as_dict()], "environment": environment}
    suite.draw(result, tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes()[:4] == b"\x89PNG"


BARE = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {names}:
            raise ImportError("blocked: " + name)
sys.meta_path.insert(0, Refuse())
"""
IMPORTS = """
import importlib, pkgutil
import sparsepretrain.kernels, sparsepretrain.sparsity
from sparsepretrain import registry
for name in registry.names("method"):
    registry.get("method", name)
names = [m.name for m in pkgutil.iter_modules(sparsepretrain.kernels.__path__)]
for name in names:
    importlib.import_module("sparsepretrain.kernels." + name)
for name in ("kernels", "linear", "block", "products", "train"):
    importlib.import_module("sparsepretrain.bench." + name)
import sparsepretrain as sp
sp.sparsify
"""
COMMAND = """
from sparsepretrain.cli import main
sys.exit(main(["bench", "suite=linear", "quick=true", "out=" + {out!r}]))
"""
ABSENT = {"hydra", "omegaconf", "wandb", "datasets", "transformers", "tokenizers", "accelerate"}


def test_imports_with_torch_and_triton_alone():
    absent = ABSENT | {"yaml", "rich", "matplotlib"}
    code = BARE.format(names=absent) + IMPORTS
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_command_runs_on_a_bare_machine(tmp_path):
    out = str(tmp_path / "linear.json")
    code = BARE.format(names=ABSENT) + COMMAND.format(out=out)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "linear.json").read_text())["suite"] == "linear"


def test_nvidia_smi_is_asked_about_the_gpu_that_torch_uses(tmp_path, monkeypatch):
    tool = tmp_path / "nvidia-smi"
    tool.write_text('#!/bin/sh\necho "$@" >> "$0.log"\necho "580.1, 1980"\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    gpu_properties = SimpleNamespace(
        name="x",
        major=9,
        minor=0,
        multi_processor_count=1,
        total_memory=1,
        L2_cache_size=1,
        uuid="6c3d-b3",
    )
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: gpu_properties)
    found = gpu.state()
    assert found["driver_version"] == "580.1" and found["clocks.sm"] == "1980"
    asked = (tmp_path / "nvidia-smi.log").read_text().splitlines()
    assert asked and all(line.endswith("--id=GPU-6c3d-b3") for line in asked)
