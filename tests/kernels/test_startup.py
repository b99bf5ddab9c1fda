"""The start-up test of cuSPARSELt: its verdicts, and that it runs in a process of its own."""

import subprocess

import pytest
import torch

from sparsepretrain.kernels.cusparselt import startup

HALF, BRAIN = torch.float16, torch.bfloat16


@pytest.fixture
def hopper(monkeypatch, tmp_path):
    """A GPU of compute capability 9.0, and a cache directory of its own."""
    monkeypatch.setenv("SPARSEPRETRAIN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    monkeypatch.setattr(torch.backends.cusparselt, "is_available", lambda: True)
    monkeypatch.setattr(startup, "version", lambda: "0.8.0")
    startup._verdict.cache_clear()
    yield torch.device("cuda", 0)
    startup._verdict.cache_clear()


class Processes:
    """Processes that would run the test; each prints what is given for its type."""

    def __init__(self, monkeypatch, **printed):
        self.printed, self.begun = printed, []
        monkeypatch.setattr(subprocess, "run", self.run)

    def run(self, words, **_):
        dtype = words[-1]
        self.begun.append(dtype)
        text = self.printed.get(dtype, '{"fault": ""}')
        if text is None:
            raise subprocess.TimeoutExpired(words, startup.LIMIT)
        return subprocess.CompletedProcess(words, 0 if text else -4, text, "cannot go on\n")


def forget():
    """Begin anew, as another process does."""
    startup._verdict.cache_clear()


def test_a_type_whose_matmuls_are_right_is_supported(hopper, monkeypatch):
    processes = Processes(monkeypatch)
    assert startup.unsupported(hopper) is None
    assert processes.begun == ["bfloat16"]  # one of the 16-bit types is enough
    assert startup.unsupported(hopper, HALF) is None
    assert startup.unsupported(hopper, startup.FP8) is None
    assert processes.begun == ["bfloat16", "float16", "float8_e4m3fn"]
    forget()
    assert startup.unsupported(hopper, HALF, startup.FP8) is None
    assert len(processes.begun) == 3  # verdicts are kept for other processes


def test_a_type_that_breaks_the_device_is_refused_alone(hopper, monkeypatch):
    processes = Processes(monkeypatch, float16='{"fault": "an illegal instruction"}')
    assert startup.unsupported(hopper, HALF) == "an illegal instruction"
    assert startup.unsupported(hopper, BRAIN) is None and startup.unsupported(hopper) is None
    forget()
    assert startup.unsupported(hopper, HALF) == "an illegal instruction"
    assert processes.begun == ["float16", "bfloat16"]
    monkeypatch.setattr(startup, "version", lambda: "0.8.1")  # another library is tested anew
    forget()
    assert startup.unsupported(hopper, HALF) == "an illegal instruction"
    assert processes.begun == ["float16", "bfloat16", "float16"]


def test_a_process_without_a_verdict_is_a_reason(hopper, monkeypatch):
    Processes(monkeypatch, bfloat16="", float16="")
    assert startup.unsupported(hopper, BRAIN) == (
        "the start-up test of cuSPARSELt 0.8.0 failed: exit code -4: cannot go on"
    )


@pytest.mark.parametrize(
    ("printed", "words"),
    [
        (None, "no verdict after 180 s"),
        ('{"error": "CUDA out of memory"}', "failed: CUDA out of memory"),
        ("", "failed: exit code -4"),
    ],
)
def test_a_test_that_cannot_run_is_a_reason_and_is_tried_again(printed, words, hopper, monkeypatch):
    processes = Processes(monkeypatch, bfloat16=printed)
    assert words in startup.unsupported(hopper, BRAIN)
    forget()
    startup.unsupported(hopper, BRAIN)
    assert processes.begun == ["bfloat16"] * 2


@pytest.mark.parametrize(
    ("module", "name", "value", "words"),
    [
        (torch.cuda, "is_available", lambda: False, "no CUDA device"),
        (torch.cuda, "get_device_capability", lambda device: (7, 5), "7.5 has no sparse tensor"),
        (torch.backends.cusparselt, "is_available", lambda: False, "no cuSPARSELt"),
    ],
)
def test_device_without_sparse_matmuls_is_refused(module, name, value, words, monkeypatch, hopper):
    processes = Processes(monkeypatch)
    assert "on cpu" in startup.unsupported(torch.device("cpu"))
    monkeypatch.setattr(module, name, value)
    assert words in startup.unsupported(hopper) and not processes.begun


@pytest.mark.parametrize("dtype", [HALF, BRAIN])
def test_every_layout_is_tested(dtype, monkeypatch, hopper):
    tested = []
    monkeypatch.setattr(startup, "fastest", tested.append)
    assert startup.fault(hopper, dtype) is None
    assert {(p.dtype, p.out_dtype) for p in tested} == {(dtype, dtype)} and len(tested) == 3


@pytest.mark.parametrize("breaks", [False, True])
def test_the_first_fault_ends_the_test(breaks, monkeypatch, hopper):
    tested = []

    def fastest(problem):
        tested.append(problem)
        raise RuntimeError("CUDA error: internal error\nCompile with `TORCH_USE_CUDA_DSA`")

    monkeypatch.setattr(startup, "fastest", fastest)
    monkeypatch.setattr(startup, "broken", lambda error, device: breaks)
    found = startup.fault(hopper, HALF)
    assert len(tested) == 1
    assert found == "CUDA error: internal error" + breaks * ", which leaves the device unusable"


def test_memory_that_others_hold_is_no_fault_of_the_library(monkeypatch, hopper):
    def full(problem):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(startup, "fastest", full)
    with pytest.raises(torch.OutOfMemoryError):
        startup.fault(hopper, HALF)


def test_the_process_of_the_test_runs_this_package_and_ends(hopper):
    """A real process: without a GPU it says why it cannot test."""
    if torch.cuda.device_count():
        pytest.skip("the GPU would be tested")
    found = startup._tested_elsewhere(hopper, BRAIN)
    assert found.keys() == {"error"} and "exit code" not in found["error"], found
