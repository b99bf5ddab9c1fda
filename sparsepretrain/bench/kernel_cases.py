"""Every kernel as a case.

One registry serves two suites: ``offline`` compiles the launches of a case and reads the machine
code, ``kernels`` runs it on a GPU against the reference, other formulations and a device copy.
"""

from __future__ import annotations

from sparsepretrain.bench import token_cases, weight_cases
from sparsepretrain.bench.kernel_case import KernelCase


def kernel_cases() -> list[KernelCase]:
    """All cases, in the order of the operations of a training step."""
    return [*weight_cases.cases(), *token_cases.cases()]
