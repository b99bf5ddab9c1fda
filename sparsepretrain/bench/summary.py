"""Results as Markdown: a page for each file, ``summary.md`` for what ``gpu_check.sh`` has left.

python -m sparsepretrain.bench.summary benchmarks/results/nvidia-h200
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from sparsepretrain.bench import SUITES
from sparsepretrain.bench.compare import describe
from sparsepretrain.files import write_atomic

KEPT = {None: "", True: "yes", False: "NO"}


def summary(directory: Path) -> str:
    """Pieces that finished, and a table for each results file."""
    pieces = sorted(path.stem for path in directory.glob("*.log"))
    begun = sorted(path.name.removesuffix(".log.part") for path in directory.glob("*.log.part"))
    lines = [f"# {directory.name}", "", f"Finished: {', '.join(pieces) or 'nothing'}."]
    if begun:
        lines.append(f"Not finished: {', '.join(begun)}.")
    for path in sorted(directory.glob("*.json")):
        lines += ["", *page(path, "##")]
    return "\n".join(lines) + "\n"


def page(path: Path, heading: str = "#") -> Iterator[str]:
    """Lines of Markdown about a results file: hardware, cases, and what its suite reports."""
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    environment = found["environment"]
    packages = environment["packages"]
    yield from (f"{heading} {path.stem}", "")
    yield (
        f"{environment['hardware']['device']}, torch {packages.get('torch')}, triton "
        f"{packages.get('triton')}, commit {environment['commit']}"
        + (", few rounds: no figure means anything" if found["quick"] else "")
    )
    if ceilings := found.get("ceilings"):
        yield "Ceilings, measured: {copy_gbps:.0f} GB/s, {bf16_tflops:.0f} TFLOP/s.".format(
            **ceilings
        )
    module = import_module(SUITES[found["suite"]])
    if hasattr(module, "report"):
        yield from ("", *module.report(found))
    compared = any(row.get("ratio_to") for row in found["cases"])
    heads = ["case", "measured", *["times as fast as"] * compared, "limit, kept"]
    yield from ("", f"| {' | '.join(heads)} |", "| --- " * len(heads) + "|")
    for row in found["cases"]:
        name, reading = describe(row)
        share = row.get("frac_of_copy")
        cells = [name, str(reading) + ("" if share is None else f", {share:.0%} of copy")]
        if compared:
            ratios = row.get("ratio_to", {}).items()
            cells.append(", ".join(f"{other} {ratio:.2f}" for other, ratio in ratios))
        yield f"| {' | '.join(cells)} | {_limit(row)}{KEPT[row['ok']]} |"
    if path.with_suffix(".png").exists():
        yield from ("", f"![{path.stem}]({path.stem}.png)")


def _limit(row: dict[str, Any]) -> str:
    """Of a case that was held to one, before whether it is kept."""
    if row["ok"] is None:
        return ""
    if (goal := row.get("goal_us")) is not None:
        return f"≤ {goal:g} µs, "
    if (goal := row.get("goal")) is not None:
        return f"≥ {goal:.0%} of copy, "
    signs = {"at_most": "≤", "at_least": "≥"}
    found = [f"{sign} {row[key]:g}, " for key, sign in signs.items() if row.get(key) is not None]
    return "".join(found)


def main() -> None:
    """Write ``summary.md`` in the directory that is named."""
    directory = Path(sys.argv[1])
    write_atomic(directory / "summary.md", summary(directory))
    sys.stdout.write(f"{directory / 'summary.md'}\n")


if __name__ == "__main__":
    main()
