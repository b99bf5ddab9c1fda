"""The verb ``doctor``: versions and devices."""

from types import SimpleNamespace

import torch

from sparsepretrain import cli
from sparsepretrain.cli import _machine


def test_devices_have_a_data_sheet(monkeypatch):
    gpu = SimpleNamespace(name="NVIDIA H200", major=9, minor=0, total_memory=141 * 2**30)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: gpu)
    monkeypatch.setattr(_machine, "present_device", lambda: torch.device("cpu"))  # no driver to ask
    rows = dict(_machine.machine())
    assert rows["cuda:0"].startswith("NVIDIA H200, compute capability 9.0, 141 GiB; 989.4 dense")


def test_a_slow_version_of_cusparselt_is_named(monkeypatch):
    line = "cuSPARSELt 0.8.0 is slower on H100: pip install it"
    monkeypatch.setattr(_machine, "slow_version", lambda device: line)
    assert dict(_machine.machine())["cuSPARSELt"] == "0.8.0 is slower on H100: pip install it"


def test_doctor_on_a_machine_without_a_gpu(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert cli.main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert f"torch           {torch.__version__}" in text and "GPU             none" in text
    assert "No matmul runs sparse here: this machine has no CUDA device" in text


def test_doctor_says_that_widths_are_padded_where_matmuls_run_sparse(monkeypatch):
    monkeypatch.setattr(_machine, "present_device", lambda: torch.device("cpu"))
    monkeypatch.setattr(_machine, "unsupported", lambda device, dtype: None)
    text = _machine.here()
    assert text.startswith("Sparse matmuls run here in bf16 and fp16, with cuSPARSELt")
    assert "padded with zeros to multiples of 64 × 64, in fp8 of 64 × 128." in text


def test_doctor_names_the_types_that_do_not_run_sparse(monkeypatch):
    faults = {torch.float16: "an illegal instruction"}
    monkeypatch.setattr(_machine, "present_device", lambda: torch.device("cpu"))
    monkeypatch.setattr(_machine, "unsupported", lambda device, dtype: faults.get(dtype))
    text = _machine.here()
    assert text.startswith("Sparse matmuls run here in bf16, with")
    assert "Not in fp16: an illegal instruction." in text
