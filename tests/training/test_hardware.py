"""Peaks for MFU are found by whole words, or not at all."""

from __future__ import annotations

import json

import pytest
import torch

from sparsepretrain.training.hardware import GPUS, environment, known_gpu, peak_flops

NAMES = {
    "NVIDIA B200": 2250.0,
    "NVIDIA H200": 989.4,
    "NVIDIA H200 NVL": 835.5,
    "NVIDIA H100 80GB HBM3": 989.4,
    "NVIDIA H100 PCIe": 756.5,
    "NVIDIA H100 NVL": 835.5,
    "NVIDIA A100-SXM4-80GB": 312.0,
    "NVIDIA A100-PCIE-40GB": 312.0,
    "NVIDIA A100 80GB PCIe": 312.0,
    "NVIDIA L40S": 362.05,
    "NVIDIA L4": 121.0,
    "NVIDIA GeForce RTX 4090": 165.2,
    "NVIDIA GeForce RTX 3090": 71.0,
    # not in the table: no number is better than a wrong one
    "NVIDIA L40": None,
    "Tesla T4": None,
    "AMD Instinct MI300X": None,
    "NVIDIA GeForce RTX 4090 Laptop GPU": None,
    "NVIDIA GeForce RTX 4090 D": None,
    "NVIDIA GeForce RTX 3090 Ti": None,
    "NVIDIA H100 80GB HBM3 MIG 1g.10gb": None,
    "NVIDIA A100-SXM4-40GB MIG 3g.20gb": None,
    "NVIDIA GB200": None,
}


@pytest.mark.parametrize("name", NAMES)
def test_names(monkeypatch, name):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    expected = NAMES[name]
    for precision in ("fp16", "bf16"):
        peak = peak_flops(torch.device("cuda"), precision)
        assert peak == (None if expected is None else expected * 1e12)
    for precision in ("fp32", "fp8_sim"):
        assert peak_flops(torch.device("cuda"), precision) is None
    assert peak_flops(torch.device("cpu"), "bf16") is None


def test_every_entry_is_reachable_and_has_a_source():
    found = {known_gpu(name) for name in NAMES} | {known_gpu("L40S"), known_gpu("A100 40GB")}
    assert found - {None} == set(GPUS)
    assert all(gpu.source and gpu.bandwidth for gpu in GPUS)


def test_names_that_people_use():
    assert known_gpu("H100 SXM").name == "H100"
    assert known_gpu("NVIDIA A100-SXM4-80GB").bandwidth == 2039
    assert known_gpu("NVIDIA A100 80GB PCIe").bandwidth == 1935
    assert known_gpu("NVIDIA A100-PCIE-40GB").bandwidth == 1555
    assert known_gpu("V100") is None and known_gpu("") is None


def test_environment():
    found = json.loads(json.dumps(environment(torch.device("cpu"))))
    assert found["packages"]["torch"]
    assert found["hardware"]["cores"] >= 1 and found["hardware"]["device"]
    assert found["command"].startswith("sparsepretrain")
