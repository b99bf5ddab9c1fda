"""Peaks for MFU are found by whole words, or not at all."""

import ctypes
import json
import shutil
import warnings

import pytest
import torch

from sparsepretrain import cli, errors
from sparsepretrain.errors import ConfigError, SparsePretrainWarning
from sparsepretrain.training import hardware, plan, world
from sparsepretrain.training.hardware import environment, peak_flops
from sparsepretrain.training.plan import peak_items
from sparsepretrain.training.tracing import StepCost
from sparsepretrain.training.world import World

NAMES = {
    "NVIDIA B200": 2250.0, "NVIDIA H200": 989.4, "NVIDIA H200 NVL": 835.5,
    "NVIDIA H100 80GB HBM3": 989.4, "NVIDIA H100 PCIe": 756.5, "NVIDIA H100 NVL": 835.5,
    "NVIDIA A100-SXM4-80GB": 312.0, "NVIDIA A100-PCIE-40GB": 312.0, "NVIDIA A100 80GB PCIe": 312.0,
    "NVIDIA L40S": 362.05, "NVIDIA L4": 121.0, "NVIDIA GeForce RTX 4090": 165.2,
    "NVIDIA GeForce RTX 3090": 71.0, "H100 SXM": 989.4,
}  # fmt: skip
# not in the table: no number is better than a wrong one
UNKNOWN = [
    "NVIDIA L40", "Tesla T4", "AMD Instinct MI300X", "NVIDIA GeForce RTX 4090 Laptop GPU",
    "NVIDIA GeForce RTX 4090 D", "NVIDIA GeForce RTX 3090 Ti", "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
    "NVIDIA A100-SXM4-40GB MIG 3g.20gb", "NVIDIA GB200", "V100", "",
]  # fmt: skip


@pytest.mark.parametrize("name", [*NAMES, *UNKNOWN])
def test_peak_flops_by_device_name(monkeypatch, name):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    expected = NAMES.get(name)
    for precision in ("fp16", "bf16"):
        peak = peak_flops(torch.device("cuda"), precision)
        assert peak == (None if expected is None else expected * 1e12)
    for precision in ("fp32", "fp8_sim"):
        assert peak_flops(torch.device("cuda"), precision) is None
    assert peak_flops(torch.device("cpu"), "bf16") is None


def test_peak_rate_is_that_of_all_ranks(tiny, monkeypatch):
    """Throughput counts the items of the global batch."""
    session = tiny.build("precision=bf16")
    assert peak_items(session) is None
    monkeypatch.setattr(plan, "peak_flops", lambda device, precision: 2e12)
    session.setup.cost = StepCost(flops=1e6, saved=0, largest=0, items=64, blocks=1)
    assert peak_items(session) == 64 * 2e6
    session.world = World(session.device, size=4)
    assert peak_items(session) == 4 * 64 * 2e6


def test_environment_is_json():
    found = json.loads(json.dumps(environment(torch.device("cpu"))))
    assert found["packages"]["torch"]
    assert found["hardware"]["cores"] >= 1 and found["hardware"]["device"]
    assert found["command"].startswith("sparsepretrain")


class Driver:
    """What libcuda answers."""

    def __init__(self, code, version):
        self.code, self.version = code, version

    def cuInit(self, flags):
        return self.code

    def cuDriverGetVersion(self, version):
        version._obj.value = self.version
        return 0

    def cuGetErrorString(self, code, text):
        text._obj.value = b"no CUDA-capable device"
        return 0


CU126 = "--index-url https://download.pytorch.org/whl/cu126"
TOO_OLD = "the NVIDIA driver is for CUDA 12.4, and this torch for CUDA 13.2: update the driver"


@pytest.fixture
def machine(monkeypatch):
    """A machine of which torch sees no GPU: with this driver, or with none."""
    real = ctypes.CDLL

    def make(code=None, version=0, *, smi=False):
        hardware.unusable_gpu.cache_clear()
        errors.warn_once.cache_clear()
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
        monkeypatch.setattr(torch.version, "cuda", "13.2")
        which = {"nvidia-smi": "/usr/bin/nvidia-smi"} if smi else {}
        monkeypatch.setattr(shutil, "which", which.get)

        def opened(name, *rest):
            if "cuda" not in name:
                return real(name, *rest)
            if code is None:
                raise OSError(f"{name}: cannot open shared object file")
            return Driver(code, version)

        monkeypatch.setattr(ctypes, "CDLL", opened)

    yield make
    hardware.unusable_gpu.cache_clear()
    errors.warn_once.cache_clear()


@pytest.mark.parametrize(
    ("driver", "message"),
    [
        ((803, 12040), f"{TOO_OLD}, or pip install torch {CU126}"),
        ((803, 11080), "CUDA 11.8, and this torch for CUDA 13.2: update the driver"),
        ((100, 13020), "(cuInit: 100, no CUDA-capable device)"),
    ],
)
def test_a_gpu_that_torch_cannot_use_is_explained(driver, message, machine, capsys):
    machine(*driver)
    with pytest.warns(SparsePretrainWarning) as caught:
        for _ in range(2):
            assert world.World.single("auto").device.type == "cpu"
    (told,) = [str(w.message) for w in caught]
    assert told.startswith("parallel.device=auto") and message in told
    assert "\n" not in told
    with pytest.raises(ConfigError) as refused:
        world.World.single("cuda")
    assert message in str(refused.value)
    assert cli.main(["doctor"]) == 0
    assert message in " ".join(capsys.readouterr().out.split())


def test_a_container_without_the_library_of_the_driver_is_explained(machine):
    machine(smi=True)
    with pytest.warns(SparsePretrainWarning, match=r"nvidia-smi is here, but .* libcuda\.so\.1"):
        world.World.single("auto")


@pytest.mark.parametrize("hidden", [False, True])
def test_hidden_or_absent_gpu_does_not_warn(hidden, machine, monkeypatch):
    machine(smi=hidden)
    if hidden:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert world.World.single("auto").device.type == "cpu"
    with pytest.raises(ConfigError, match=r"device=cuda"):
        world.World.single("cuda")
