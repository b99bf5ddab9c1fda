"""Run what docs/results.md reports, and write its numbers: ``make results``.

Every run is the command that the page shows. Studies that are in the file are not repeated unless
they are named, so an interrupted call goes on where it was. ``cpu_seconds`` is user and system time
of the whole training command, which other things change less than ``training_seconds``, the
wall-clock time.

    python scripts/results.py [--runs-dir DIR] [NAME ...]     all, or the named ones
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "docs" / "results.json"


@dataclass(frozen=True)
class Study:
    """One run and the split that it is evaluated on afterwards."""

    name: str
    words: str
    """Overrides of ``train``, or of ``finetune`` with ``start``."""
    split: str = "validation"
    start: str | None = None
    """Name of the study whose run is fine-tuned."""

    def command(self, runs: str) -> list[str]:
        """As it is typed."""
        if self.start is None:
            return ["train", *self.words.split()]
        return ["finetune", str(newest(Path(runs) / self.start)), *self.words.split()]


STUDIES = [
    *(
        Study(f"translation_{m}", f"experiment=nano_translation sparsity={m}", "test")
        for m in ("sste", "dense")
    ),
    *(
        Study(f"vision_{m}", f"experiment=nano_vision sparsity={m}", "test")
        for m in ("sste", "dense")
    ),
    *(
        Study(f"convolutions_{m}", f"experiment=nano_vision model=resnet_nano sparsity={m}", "test")
        for m in ("sste", "dense")
    ),
    *(Study(f"bert_{m}", f"experiment=nano_bert sparsity={m}") for m in ("sste", "dense")),
    *(Study(f"gpt2_{m}", f"sparsity={m}") for m in ("sste", "dense")),
    *(
        Study(f"python_qa_{m}", "task=python_qa", "validation", f"gpt2_{m}")
        for m in ("sste", "dense")
    ),
]


def newest(directory: Path) -> Path:
    """The run directory of a study; there is one per configuration."""
    return max(directory.glob("*-s*"), key=lambda path: path.stat().st_mtime)


def sparsepretrain(*words: str) -> None:
    """The command of this interpreter's installation; stops the script when it fails."""
    subprocess.run([sys.executable, "-m", "sparsepretrain", *words], check=True)


def run(study: Study, runs: str) -> dict[str, Any]:
    """Train and evaluate one study; returns what the page needs."""
    words = study.command(runs)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    # an interrupted run starts over, so that its cost is that of one whole run
    sparsepretrain(*words, f"name={study.name}", f"runs_dir={runs}", "resume=never")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    directory = newest(Path(runs) / study.name)
    sparsepretrain("eval", str(directory), f"split={study.split}")
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    held_out = [line for line in lines if line.get("split") == "validation"]
    final = json.loads((directory / "eval.jsonl").read_text().splitlines()[-1])
    environment = json.loads((directory / "environment.json").read_text())
    shown = [*words]
    if study.start is not None:
        shown[1] = f"RUN of {study.start}"
    return {
        "command": " ".join(["sparsepretrain", *shown]),
        "steps": lines[-1]["step"],
        "cpu_seconds": round(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime),
        "training_seconds": round(lines[-1]["time"]),
        "first": metrics(held_out[0]),
        "last": metrics(held_out[-1]),
        "split": study.split,
        "samples": final["samples"],
        "final": metrics(final["metrics"]),
        "environment": {k: environment[k] for k in ("commit", "hardware", "packages")},
    }


def references() -> dict[str, dict[str, float]]:
    """What guessing reaches on the validation records of the stand-in, in percent."""
    import numpy as np

    from sparsepretrain import data, registry
    from sparsepretrain.config import compose
    from sparsepretrain.data.formats import records
    from sparsepretrain.tasks.question_answering import exact_match, f1

    def held_out(name: str) -> list[dict[str, Any]]:
        plain = compose([f"data={name}"])["data"]
        source: Any = registry.get("source", plain["source"])
        return records(data.load(source.Options(**plain)), "validation")

    draws, found = np.random.default_rng(0), []
    for row in held_out("python_qa"):
        words, (truth, _) = row["context"].split(), row["answers"][0]
        for _ in range(10):  # as many words as the answer has, anywhere
            begin = draws.integers(max(1, len(words) - len(truth.split()) + 1))
            guess = " ".join(words[begin : begin + len(truth.split())])
            found.append((exact_match(guess, truth), f1(guess, truth)))
    matched, overlap = np.mean(found, axis=0)
    return {
        "python_qa": {
            "exact_match of a random span": 100 * float(matched),
            "f1 of a random span": 100 * float(overlap),
        },
    }


def metrics(line: dict[str, Any]) -> dict[str, float]:
    """The metrics of an evaluation."""
    hidden = ("step", "time", "tokens", "split")
    return {k: v for k, v in line.items() if k not in hidden and isinstance(v, int | float)}


def main() -> None:
    """Run the chosen studies and update the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(s.name for s in STUDIES))
    parser.add_argument("--runs-dir", default="runs/results")
    arguments = parser.parse_args()
    unknown = set(arguments.names) - {study.name for study in STUDIES}
    if unknown:
        parser.error(f"no such study: {', '.join(sorted(unknown))}")
    for study in STUDIES:
        found = json.loads(OUT.read_text()) if OUT.exists() else {}
        if study.name in arguments.names or not (arguments.names or study.name in found):
            found[study.name] = run(study, arguments.runs_dir)
            ordered = {s.name: found[s.name] for s in STUDIES if s.name in found}
            ordered["references"] = references()
            OUT.write_text(json.dumps(ordered, indent=1) + "\n")


if __name__ == "__main__":
    main()
