"""Hardware of a run for environment.json, and data sheets of GPUs."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import platform
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import torch

import sparsepretrain
from sparsepretrain.config.compose import shell_line

PACKAGES = (
    "torch", "triton", "numpy", "transformers", "tokenizers", "hydra-core", "wandb", "datasets",
)  # fmt: skip
"""Packages whose versions a run records."""


class GPU(NamedTuple):
    """Peak rate of a data sheet."""

    name: str  # words of the name that torch reports
    tflops: float  # dense fp16 and bf16 with fp32 accumulation; 2:4 matmuls: twice as many
    source: str


GPUS = (
    # Data sheets of Hopper, Ada and later print FLOP/s "with sparsity": halved here.
    GPU("B200", 2250.0, "NVIDIA Blackwell architecture brief, HGX B200, 4.5 PFLOP/s sparse"),
    GPU("H200 NVL", 835.5, "NVIDIA H200 data sheet, NVL, 1,671 TFLOP/s sparse"),
    GPU("H200", 989.4, "NVIDIA H200 data sheet, SXM, 1,979 TFLOP/s sparse"),
    GPU("H100 PCIe", 756.5, "NVIDIA H100 data sheet, PCIe, 1,513 TFLOP/s sparse"),
    GPU("H100 NVL", 835.5, "NVIDIA H100 data sheet, NVL, 1,671 TFLOP/s sparse"),
    GPU("H100", 989.4, "NVIDIA H100 data sheet, SXM, 1,979 TFLOP/s sparse"),
    GPU("A100", 312.0, "NVIDIA A100 data sheet"),
    GPU("L40S", 362.05, "NVIDIA L40S data sheet, 733 TFLOP/s sparse"),
    GPU("L4", 121.0, "NVIDIA L4 data sheet, 242 TFLOP/s sparse"),
    GPU("RTX 4090", 165.2, "NVIDIA Ada architecture white paper, table of GeForce RTX 4090"),
    GPU("RTX 3090", 71.0, "NVIDIA GA102 architecture white paper, GeForce RTX 3090"),
)
"""More special names first."""

OTHER_CHIPS = frozenset({"MIG", "Laptop", "Max-Q", "Ti", "D", "SUPER"})
"""Words that make a name another, slower or faster, device: those have no entry."""


def peak_flops(device: torch.device, precision: str) -> float | None:
    """Return the dense peak FLOP/s in fp16 and bf16; None: unknown, and no MFU is printed.

    fp32 has no entry since it may or may not mean TF32, fp8 since only some layers run in it.
    """
    if device.type != "cuda" or precision not in ("fp16", "bf16"):
        return None
    gpu = known_gpu(torch.cuda.get_device_name(device))
    return None if gpu is None else gpu.tflops * 1e12


def known_gpu(name: str) -> GPU | None:
    """Return the data sheet of a GPU by the name that torch reports; None: unknown."""
    return next((gpu for gpu in GPUS if _is(gpu.name, name)), None)


def visible_devices() -> list[str]:
    """Return the GPUs of this process, each as ``CUDA_VISIBLE_DEVICES`` names it."""
    if not torch.cuda.is_available():
        return []
    named = [d.strip() for d in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    return [d for d in named if d] or [str(i) for i in range(torch.cuda.device_count())]


@functools.cache
def unusable_gpu() -> str:
    """Return why torch sees no GPU on a machine that has a driver, and the remedy; "": it has none.

    The newest wheels need the newest drivers, and torch falls back to the CPU without an error.
    """
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1")
    if hidden or torch.version.cuda is None or torch.cuda.is_available():
        return ""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return (
            "nvidia-smi is here, but the driver's libcuda.so.1 is not: in a container, set "
            "NVIDIA_DRIVER_CAPABILITIES=compute,utility"
            if shutil.which("nvidia-smi")
            else ""
        )
    number = ctypes.c_int()
    text = ctypes.c_char_p()
    code = driver.cuInit(0)
    driver.cuDriverGetVersion(ctypes.byref(number))
    major = number.value // 1000
    minor = number.value % 1000 // 10
    if major < int(torch.version.cuda.partition(".")[0]):
        # each driver runs all minor versions of its CUDA
        index = "https://download.pytorch.org/whl/cu126"
        other = f", or pip install torch --index-url {index}" if major == 12 else ""
        return (
            f"the NVIDIA driver is for CUDA {major}.{minor}, and this torch for CUDA "
            f"{torch.version.cuda}: update the driver{other}"
        )
    driver.cuGetErrorString(code, ctypes.byref(text))
    reason = (text.value or b"unknown error").decode()
    return f"the NVIDIA driver finds no usable GPU (cuInit: {code}, {reason})"


def environment(device: torch.device) -> dict[str, Any]:
    """Versions, commit, command and hardware of this process."""
    versions = {}
    for name in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            versions[name] = version(name)
    return {
        "command": shell_line(["sparsepretrain", *sys.argv[1:]]),
        "sparsepretrain": sparsepretrain.__version__,
        "commit": _commit(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": versions,
        "hardware": {
            "device": _device_name(device),
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
        },
    }


def _is(key: str, name: str) -> bool:
    # "L4" must not match "L40S": compare whole words
    words = {*name.split(), *name.replace("-", " ").split()}
    return words.isdisjoint(OTHER_CHIPS) and words.issuperset(key.split())


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    # Losses depend on the instructions that matmuls use, and virtual machines hide the full name.
    try:
        first, _, _ = Path("/proc/cpuinfo").read_text(encoding="utf-8").partition("\n\n")
        cpu = {k.strip(): v.strip() for k, _, v in (x.partition(":") for x in first.split("\n"))}
        name = f"{cpu['model name']} (family {cpu['cpu family']}, model {cpu['model']})"
    except (OSError, KeyError):
        name = platform.processor() or platform.machine()
    return f"{name} {torch.backends.cpu.get_cpu_capability()}"


def _commit() -> str | None:
    """Commit of the checkout that the package runs from; None for an installed wheel.

    ``SPARSEPRETRAIN_COMMIT`` names the commit of a copy, which may lie in another repository.
    """
    root = Path(sparsepretrain.__file__).parents[1]
    if named := os.environ.get("SPARSEPRETRAIN_COMMIT"):
        return named
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return result.stdout.strip()
