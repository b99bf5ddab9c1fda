"""What the run runs on: environment.json, and dense peak FLOP/s for MFU."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import sparsepretrain
from sparsepretrain.config.compose import shell_line

DENSE_PEAK_TFLOPS: tuple[tuple[str, float, str], ...] = (
    # name as torch reports it, dense fp16/bf16 tensor TFLOP/s with fp32 accumulation, source.
    # Data sheets of Hopper, Ada and later print the figure "with sparsity": halved here.
    ("B200", 2250.0, "NVIDIA Blackwell architecture brief, HGX B200, 4.5 PFLOP/s sparse"),
    ("H200 NVL", 835.5, "NVIDIA H200 data sheet, NVL, 1,671 TFLOP/s sparse"),
    ("H200", 989.4, "NVIDIA H200 data sheet, SXM, 1,979 TFLOP/s sparse"),
    ("H100 PCIe", 756.5, "NVIDIA H100 data sheet, PCIe, 1,513 TFLOP/s sparse"),
    ("H100 NVL", 835.5, "NVIDIA H100 data sheet, NVL, 1,671 TFLOP/s sparse"),
    ("H100", 989.4, "NVIDIA H100 data sheet, SXM, 1,979 TFLOP/s sparse"),
    ("A100", 312.0, "NVIDIA A100 data sheet"),
    ("L40S", 362.05, "NVIDIA L40S data sheet, 733 TFLOP/s sparse"),
    ("L4", 121.0, "NVIDIA L4 data sheet, 242 TFLOP/s sparse"),
    ("RTX 4090", 165.2, "NVIDIA Ada architecture white paper, table of GeForce RTX 4090"),
    ("RTX 3090", 71.0, "NVIDIA GA102 architecture white paper, GeForce RTX 3090"),
)

OTHER_CHIPS = frozenset({"MIG", "Laptop", "Max-Q", "Ti", "D", "SUPER"})
"""Words that make a name another, slower or faster, device: those have no entry."""


def peak_flops(device: torch.device, precision: str) -> float | None:
    """Dense peak FLOP/s, or None where it is not known: then no MFU is printed.

    Args:
        device: where the model is.
        precision: ``fp16`` or ``bf16``; fp32 has no entry since it may or may not mean TF32,
            fp8_sim none since nothing runs in fp8.
    """
    if device.type != "cuda" or precision not in ("fp16", "bf16"):
        return None
    name = torch.cuda.get_device_name(device)
    return next((t * 1e12 for key, t, _ in DENSE_PEAK_TFLOPS if _is(key, name)), None)


def visible_devices() -> list[str]:
    """The GPUs of this process, each as ``CUDA_VISIBLE_DEVICES`` names it."""
    if not torch.cuda.is_available():
        return []
    named = [d.strip() for d in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    return [d for d in named if d] or [str(i) for i in range(torch.cuda.device_count())]


def environment(device: torch.device) -> dict[str, Any]:
    """Versions, commit, command and hardware of this process."""
    packages = ("torch", "numpy", "transformers", "tokenizers", "hydra-core", "wandb", "datasets")
    versions = {name: v for name in packages if (v := _version(name)) is not None}
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
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.partition(":")[2].strip() for line in lines if "model name" in line)
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _commit() -> str | None:
    """Commit of the checkout that the package runs from; None for an installed wheel."""
    root = Path(sparsepretrain.__file__).parents[1]
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return result.stdout.strip()
