"""Versions and devices of this machine, and the matmuls of each method that it can run sparse."""

from __future__ import annotations

from typing import Any

import torch

from sparsepretrain import registry
from sparsepretrain.kernels import no_fp8_products
from sparsepretrain.kernels.cusparselt.packed24 import unsupported, version
from sparsepretrain.sparsity.backend import Backend, LayerSize
from sparsepretrain.sparsity.method import Method, typical_row
from sparsepretrain.sparsity.products import DENSE, MATMUL_OF, MATMULS
from sparsepretrain.training.hardware import environment, known_gpu, unusable_gpu

META = torch.device("meta")
SIZE = LayerSize((64, 64), 1, META)
"""Linear layer whose features are multiples of 64."""


def present_device() -> torch.device:
    """Return the current GPU, or the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def machine() -> list[tuple[str, str]]:
    """Return versions and devices, as rows."""
    found = environment(present_device())
    packages, hardware = found["packages"], found["hardware"]
    commit = f", commit {found['commit']}" if found["commit"] else ""
    rows = [
        ("sparsepretrain", f"{found['sparsepretrain']}{commit}"),
        ("Python", f"{found['python']}, {found['platform']}"),
        ("torch", f"{torch.__version__}, CUDA {torch.version.cuda or 'none'}"),
        ("triton", packages.get("triton", "none: kernels are those of PyTorch")),
        ("cuSPARSELt", version()),
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
    """Say in one line if sparse products run on this machine."""
    device = present_device()
    missing = no_fp8_products(device)
    fp8 = f"No product runs in fp8: {missing}." if missing else "Products run in fp8 here."
    why = unsupported(device, fp8=False)
    if why is not None:
        emulated = "Training emulates them: the same results, no gain."
        return f"No product runs sparse here: {why}. {emulated} {fp8}"
    both = "" if missing or unsupported(device, fp8=True) else ", and in fp8 (e4m3×e4m3)"
    return f"Sparse products run here, in fp16 and bf16{both}, with cuSPARSELt {version()}. {fp8}"


def method_rows() -> list[list[str]]:
    """Return rows of method, its three products, and the reasons for dense ones.

    They hold for default options, and for every device that has sparse products.
    """
    backend, rows = Backend("auto"), []
    for name in registry.names("method"):
        method: Any = registry.get("method", name)
        if not issubclass(method, Method):  # a plugin's, which only training refuses
            continue
        reasons = backend.reasons(typical_row(name, method), SIZE, DENSE)
        cells = dict.fromkeys(MATMULS, "dense")
        cells |= {MATMUL_OF[k]: "emulated" if why else "sparse" for k, why in reasons.items()}
        why_not = dict.fromkeys(filter(None, reasons.values()))
        rows.append([name, *cells.values(), "; ".join(why_not)])
    return rows
