"""Write `summary.md` in a directory that `scripts/gpu_check.sh` has filled.

python benchmarks/summary.py benchmarks/results/nvidia-h200
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from harness import describe
from sparsepretrain.files import write_atomic


def summary(directory: Path) -> str:
    """Return the pieces that finished, and hardware and cases of each results file."""
    finished = sorted(path.stem for path in directory.glob("*.log"))
    begun = sorted(path.name.removesuffix(".log.part") for path in directory.glob("*.log.part"))
    lines = [f"# {directory.name}", "", f"Finished: {', '.join(finished) or 'nothing'}."]
    lines += [f"Not finished: {', '.join(begun)}."] if begun else []
    for path in sorted(directory.glob("*.json")):
        found = json.loads(path.read_text(encoding="utf-8"))
        where = found["environment"]
        versions = ", ".join(f"{k} {where['packages'].get(k)}" for k in ("torch", "triton"))
        quick = ", few rounds: no figure means anything" if found["quick"] else ""
        hardware = f"{where['hardware']['device']}, {versions}, commit {where['commit']}{quick}"
        lines += ["", f"## {path.stem}", "", hardware, ""]
        lines += [f"- {describe(case)}" for case in found["cases"]]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    target = Path(sys.argv[1])
    write_atomic(target / "summary.md", summary(target))
