"""Versions and devices of this machine, and its sparse matmuls."""

from __future__ import annotations

import torch

from sparsepretrain.kernels import no_fp8_matmuls
from sparsepretrain.kernels.cusparselt.packed24 import slow_version, version
from sparsepretrain.kernels.cusparselt.startup import unsupported
from sparsepretrain.training.hardware import environment, known_gpu, unusable_gpu


def present_device() -> torch.device:
    """Return the current GPU, or the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def machine() -> list[tuple[str, str]]:
    """Return versions and devices, as rows."""
    facts = environment(present_device())
    packages = facts["packages"]
    hardware = facts["hardware"]
    commit = f", commit {facts['commit']}" if facts["commit"] else ""
    slow = slow_version(present_device())
    rows = [
        ("sparsepretrain", f"{facts['sparsepretrain']}{commit}"),
        ("Python", f"{facts['python']}, {facts['platform']}"),
        ("torch", f"{torch.__version__}, CUDA {torch.version.cuda or 'none'}"),
        ("triton", packages.get("triton", "none: kernels are those of PyTorch")),
        ("cuSPARSELt", slow.removeprefix("cuSPARSELt ") if slow else version()),
        ("CPU cores", f"{hardware['cores']}, {hardware['threads']} threads"),
    ]
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        sheet = known_gpu(properties.name)
        about = f"{properties.name}, compute capability {properties.major}.{properties.minor}, "
        about += f"{properties.total_memory / 2**30:.0f} GiB; "
        about += f"{sheet.tflops:g} dense fp16 TFLOP/s" if sheet else "no data sheet is known"
        rows.append((f"cuda:{index}", about))
    if not torch.cuda.device_count():
        why = unusable_gpu()
        rows.append(("GPU", f"none: {why}" if why else "none"))
    return rows


def here() -> str:
    """Say in one line if sparse matmuls run on this machine."""
    device = present_device()
    missing = no_fp8_matmuls(device)
    fp8 = f"No matmul runs in fp8: {missing}." if missing else "Matmuls run in fp8 here."
    types = {"bf16": torch.bfloat16, "fp16": torch.float16}
    if not missing:
        types["fp8 (e4m3×e4m3)"] = torch.float8_e4m3fn
    faults = {name: unsupported(device, dtype) for name, dtype in types.items()}
    sparse = [name for name, fault in faults.items() if fault is None]
    if not sparse:
        emulated = "Training emulates them: the same results, no gain."
        return f"No matmul runs sparse here: {faults['bf16']}. {emulated} {fp8}"
    others = "".join(f" Not in {name}: {fault}." for name, fault in faults.items() if fault)
    padding = "Widths are padded with zeros to multiples of 64 × 64, in fp8 of 64 × 128."
    library = f"with cuSPARSELt {version()}"
    return f"Sparse matmuls run here in {' and '.join(sparse)}, {library}.{others} {padding} {fp8}"
