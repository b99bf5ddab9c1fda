"""Benchmark scripts run without a GPU, in seconds."""

import json
import os
import subprocess
import sys
from importlib import import_module

import pytest
import torch

import cpu
import harness
import linear
from sparsepretrain import kernels
from sparsepretrain.errors import ConfigError
from sparsepretrain.kernels.cpu import KERNELS
from sparsepretrain.sparsity.matmuls import policy, sparse24
from support import ROOT

SCRIPTS = ROOT / "benchmarks"
WITHOUT_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="rehearses without a GPU")


@pytest.fixture
def run(tmp_path):
    """``run(script, *words)``: exit code and cases of a quick run."""

    def run(script, *words, methods=True):
        out = tmp_path / f"{script}.json"
        works = import_module(script).works
        code = harness.main(script, works, ["--quick", "--out", str(out), *words], methods=methods)
        return code, json.loads(out.read_text())["cases"]

    return run


def labels(cases, before):
    """Return the names of measured cases that start with ``before``, without it."""
    names = [case["name"] for case in cases if case["value"] is not None]
    return [name.removeprefix(before) for name in names if name.startswith(before)]


@WITHOUT_GPU
@pytest.mark.parametrize("script", ["facts", "kernels", "blocks", "square"])
def test_rehearsal_measures_tiny_sizes(run, script):
    code, cases = run(script)
    measured = [case for case in cases if not case["status"].startswith("skipped")]
    assert code == 0 and measured
    for case in measured:
        assert case["value"] > 0 and case["status"] == "ok", case
        assert all(times > 0 for times in case["detail"].get("times_as_fast_as", {}).values())


@WITHOUT_GPU
def test_every_method_is_compared_with_dense(run):
    dense = ["nn.Linear", *linear.timed_methods(with_backward=True)]
    tiny = "linear, tiny, forward and backward, bf16, "
    assert labels(run("linear")[1], tiny) == dense
    _, cases = run("linear", "--methods", "ste", "--sparse-matmuls", "auto", "--fp8")
    assert labels(cases, f"{tiny}fp8, sparse_matmuls=auto, ") == ["nn.Linear", "dense", "ste"]


@pytest.mark.slow
@WITHOUT_GPU
def test_step_ratios_of_the_cpu(run):
    code, cases = run("cpu", "--only", "step*", methods=False)
    names = {case["name"].removeprefix("step time, ") for case in cases}
    measured = ("transformers' GPT-2 in a plain loop", "dense", "sste", "bimask")
    threads = ["1 thread", "2 threads"][: os.cpu_count()]
    wanted = {f"{name} over plain PyTorch, {t}" for name in measured for t in threads}
    assert code == 0 and names == wanted


@pytest.mark.slow
@WITHOUT_GPU
def test_what_loops_save(run):
    code, cases = run("cpu", "--only", "loops", methods=False)
    assert code == 0 and all(case["value"] > 0 for case in cases)
    assert set(KERNELS) >= {name for operations in cpu.LOOPS for name in operations}
    assert len(cases) == len(cpu.LOOPS)


@pytest.mark.slow  # twenty seconds: the optimum of many blocks
def test_masks_are_compared_with_the_optimum(run):
    code, cases = run("transposable", methods=False)
    assert code == 0
    for kind in ("gap", "step"):
        assert set(labels(cases, f"{kind}, ")) == {"4:8", "8:16", "1:4", "2:8"}
    for case in cases:
        assert case["status"] == "ok" and 0 <= case["value"] < 100, case
        if case["name"].startswith("gap"):
            assert case["value"] <= case["detail"]["largest percent"] and case["value"] < 2


def test_both_ways_of_finding_documents_are_measured(run):
    code, cases = run("documents", methods=False)
    ways = {"scan, cold", "bounds, cold", "scan, warm", "bounds, warm"}
    assert code == 0 and set(labels(cases, "find documents, ")) == ways
    assert all(case["detail"]["documents"] > 100_000 for case in cases)


def test_an_unknown_method_is_refused(run):
    with pytest.raises(ConfigError, match="'sst'"):
        linear.timed_methods(["sst"])


@WITHOUT_GPU
def test_a_wrong_sparse_matmul_gets_no_time(run, monkeypatch):
    # a wrong entry in sparse matmuls without a bias, which only MVUE has
    wrong = []

    def multiply(packed, dense, bias=None, **flags):
        product = kernels.matmul_24(packed, dense, bias, **flags)
        if bias is None:
            wrong.append(product.shape)
            product[0, 0] += 0.03 * product.abs().max()
        return product

    def seconds(run):
        run()
        return 1e-3 if run.args[0].packs else 2e-3

    def medians(works, device):
        return {name: seconds(run) for name, run in works.items()}

    monkeypatch.setattr(policy, "unsupported", lambda device, *_: None)
    monkeypatch.setattr(policy, "medians", medians)
    monkeypatch.setattr(sparse24, "matmul_24", multiply)
    code, cases = run("linear", "--methods", "sste", "--sparse-matmuls", "auto")
    found = {case["name"].partition("sparse_matmuls=auto, ")[2]: case for case in cases}
    assert code == 1 and set(wrong) == {(128, 64)}
    assert found["sste"]["status"].startswith("wrong")
    assert found["sste"]["value"] is None and found["dense"]["status"] == "ok"
    assert found["sste, mvue=none"]["status"] == "ok"


BARE = f"""
import importlib, pkgutil, sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in sys.argv[1:]:
            raise ImportError("blocked: " + name)
sys.meta_path.insert(0, Refuse())
sys.path.insert(0, {str(SCRIPTS)!r})
import sparsepretrain.kernels, sparsepretrain.sparsity
from sparsepretrain import registry
for name in registry.names("method"):
    registry.get("method", name)
names = [m.name for m in pkgutil.iter_modules(sparsepretrain.kernels.__path__)]
for name in names:
    importlib.import_module("sparsepretrain.kernels." + name)
for name in ("kernels", "linear", "blocks", "square", "facts"):
    importlib.import_module(name)
import sparsepretrain as sp
sp.sparsify
"""
ABSENT = "hydra omegaconf wandb datasets transformers tokenizers accelerate yaml rich matplotlib"


def test_imports_with_torch_and_triton_alone():
    command = [sys.executable, "-c", BARE, *ABSENT.split()]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
