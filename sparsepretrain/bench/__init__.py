"""Benchmarks: two things compared in one process, results as JSON with the hardware in it."""

from __future__ import annotations

import json
import os
from importlib import import_module
from pathlib import Path
from typing import Any

SUITES = {"cpu": "sparsepretrain.bench.cpu"}
"""Name -> module with ``cases(quick) -> list[Case]``."""


def run(*, suite: str, out: Path | None = None, quick: bool = False) -> dict[str, Any]:
    """Run a suite, print its table and write the JSON.

    Args:
        suite: a key of :data:`SUITES`.
        out: file to write; None: ``<suite>.json`` in the working directory.
        quick: few repetitions, to see that it works; limits are not judged.

    Returns:
        what was written: environment, settings and one entry per case; ``within_limits`` tells
        whether every case that has a limit keeps it.
    """
    import torch

    from sparsepretrain.tracking.console import Console
    from sparsepretrain.training.hardware import environment

    console = Console()
    cases = import_module(SUITES[suite]).cases(quick)
    result = {
        "suite": suite,
        "quick": quick,
        "environment": environment(torch.device("cuda" if torch.cuda.is_available() else "cpu")),
        "cases": [case.as_dict() for case in cases],
        "within_limits": quick or all(case.ok is not False for case in cases),
    }
    path = out or Path(f"{suite}.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    os.replace(temporary, path)
    rows = [
        (
            c.name,
            f"{c.value:.3g} {c.unit}",
            c.limit_text,
            "" if quick or c.ok is None else "yes" if c.ok else "NO",
        )
        for c in cases
    ]
    console.table(f"bench {suite}", rows, header=["case", "value", "limit", "kept"])
    console.info(f"written to {path}")
    return result
