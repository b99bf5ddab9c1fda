"""The start-up test of cuSPARSELt: may matmuls of a type run on this device, and if not, why.

That torch has the library says nothing about the device. On an H200, version 0.8.0 multiplies bf16
and fp8 correctly in every layout, and in fp16 it ends with an illegal instruction where the result
is in rows. No later call of that process reaches the GPU, so the test runs in a process of its own:
what breaks there costs nothing but the type. Its verdict goes to the user's cache directory.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import torch

import sparsepretrain
from sparsepretrain.kernels.cusparselt.choices import Key, load_verdict, save_verdict
from sparsepretrain.kernels.cusparselt.packed24 import Problem, fastest, version
from sparsepretrain.kernels.hardware import broken, no_cuda

SIXTEEN_BITS = (torch.bfloat16, torch.float16)
FP8 = torch.float8_e4m3fn
LIMIT = 180.0
"""Seconds that the test may take; it takes about ten, most of them to import torch."""
CODE = "import sys; sys.path[:0] = [{path!r}]; from {module} import _main; _main()"
"""Code of the process that tests, in which this checkout comes first, as it does here. A process of
multiprocessing would run the program of the user a second time."""


def unsupported(device: torch.device, *dtypes: torch.dtype) -> str | None:
    """Return the reason for which ``device`` has no sparse matmuls in ``dtypes``, or None.

    Args:
        device: where weights are.
        dtypes: of the operands; one that works is enough. Default: fp16 or bf16.
    """
    if reason := no_cuda(device):
        return reason
    if torch.version.hip is not None or not torch.backends.cusparselt.is_available():
        return "this build of torch has no cuSPARSELt"
    if (capability := torch.cuda.get_device_capability(device)) < (8, 0):
        return "compute capability {}.{} has no sparse tensor cores (8.0)".format(*capability)
    faults = []
    for dtype in dtypes or SIXTEEN_BITS:
        found = _verdict(device, dtype)
        if found is None:
            return None
        faults.append(found)
    return faults[0]


def fault(device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why small products of ``dtype`` are wrong in some layout, or None; may break CUDA."""
    if dtype == FP8:  # the dense operand is transposed, and scales and bias come after the product
        out = torch.float32
        layouts = [(True, True, False), (True, False, False)]
    else:
        out = dtype
        layouts = [(True, True, True), (False, False, False), (False, True, False)]
    for layout in layouts:
        try:
            fastest(Problem(device, dtype, out, 256, 128, 512, *layout))
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            hint = ", which leaves the device unusable" if broken(error, device) else ""
            return _first_line(error) + hint
    return None


@functools.cache
def _verdict(device: torch.device, dtype: torch.dtype) -> str | None:
    """Return the reason for which ``dtype`` fails on ``device``, from the cache or a new test."""
    key: Key = {
        "test": str(dtype),
        "device": torch.cuda.get_device_name(device),
        "cusparselt": version(),
        "torch": torch.__version__,
    }
    known = load_verdict(key)
    if known is not None:
        return known or None
    verdict = _tested_elsewhere(device, dtype)
    if "fault" not in verdict:  # says nothing about the type: another process tries again
        return f"the start-up test of cuSPARSELt {version()} failed: {verdict['error']}"
    save_verdict(key, verdict["fault"])
    return verdict["fault"] or None


def _tested_elsewhere(device: torch.device, dtype: torch.dtype) -> dict[str, str]:
    """Return what :func:`_main` prints in a process of its own, or why it printed nothing."""
    package = Path(sparsepretrain.__file__).parents[1]
    index = torch.cuda.current_device() if device.index is None else device.index
    code = CODE.format(path=str(package), module=__name__)
    words = [sys.executable, "-c", code, str(index), str(dtype).removeprefix("torch.")]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=LIMIT)
    except subprocess.TimeoutExpired:
        return {"error": f"no verdict after {LIMIT:.0f} s"}
    with contextlib.suppress(ValueError, IndexError):
        return dict(json.loads(done.stdout.splitlines()[-1]))
    last = (done.stderr.splitlines() or ["nothing was printed"])[-1]
    return {"error": f"exit code {done.returncode}: {last}"}


def _first_line(error: Exception) -> str:
    """Return what happened; torch adds lines about how to debug it."""
    return str(error).strip().partition("\n")[0]


def _main() -> None:
    """Print the verdict on a type and a device, which are the arguments of the process.

    JSON: ``fault`` is the text of :func:`fault`, "" for none; ``error`` if the test could not run.
    """
    device, dtype = torch.device("cuda", int(sys.argv[1])), getattr(torch, sys.argv[2])
    try:
        torch.zeros(1, device=device)  # a device that is busy or full is no fault of the library
        verdict = {"fault": fault(device, dtype) or ""}
    except RuntimeError as error:
        verdict = {"error": _first_line(error)}
    print(json.dumps(verdict), flush=True)
    os._exit(0)  # a broken device would be noticed again when torch is torn down
