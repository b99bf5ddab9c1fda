"""Write `summary.md` in a directory that `scripts/gpu_check.sh` has filled.

python benchmarks/summary.py benchmarks/results/nvidia-h200
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from harness import describe
from sparsepretrain.files import write_atomic


def summary(directory: Path) -> str:
    """Return the pieces that finished, and the cases of each results file, as Markdown."""
    finished = sorted(path.stem for path in directory.glob("*.log"))
    begun = sorted(path.name.removesuffix(".log.part") for path in directory.glob("*.log.part"))
    lines = [f"# {directory.name}", "", f"Finished: {', '.join(finished) or 'nothing'}."]
    if begun:
        lines.append(f"Not finished: {', '.join(begun)}.")
    for path in sorted(directory.glob("*.json")):
        lines += ["", *section(path)]
    return "\n".join(lines) + "\n"


def section(path: Path) -> Iterator[str]:
    """Return the hardware and the cases of one results file."""
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    environment = found["environment"]
    packages = environment["packages"]
    quick = ", few rounds: no figure means anything" if found["quick"] else ""
    yield from (f"## {path.stem}", "")
    yield (
        f"{environment['hardware']['device']}, torch {packages.get('torch')}, triton "
        f"{packages.get('triton')}, commit {environment['commit']}{quick}"
    )
    yield ""
    yield from (f"- {describe(case)}" for case in found["cases"])


if __name__ == "__main__":
    target = Path(sys.argv[1])
    write_atomic(target / "summary.md", summary(target))
