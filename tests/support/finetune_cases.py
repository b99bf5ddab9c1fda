"""Small sources, files and runs for the tests of fine-tuning."""

import io
import json
from pathlib import Path
from typing import Any

from sparsepretrain.config import freeze
from sparsepretrain.console import Console
from sparsepretrain.runs import weights
from sparsepretrain.training import derive
from sparsepretrain.training.schedules import resolve_steps

QUICK = (
    "tracker.mode=disabled",
    "parallel.device=cpu",
    "batch.size=4",
    "batch.micro=4",
    "log.every=1",
)


def write_rows(file: Path, rows: list[dict[str, Any]]) -> Path:
    """One JSON object per line."""
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


def sentences(count: int) -> list[dict[str, Any]]:
    """Pairs in the format of MRPC: equal or not."""
    words = ["sheep", "goats", "lines", "files"]
    return [
        {
            "sentence1": f"{i} {words[i % 4]}",
            "sentence2": f"{i} {words[(i + i % 2) % 4]}",
            "label": 1 - i % 2,
            "idx": i,
        }
        for i in range(count)
    ]


def glue(root: Path, train: int = 24, validation: int = 10) -> list[str]:
    """Overrides that let MRPC's recipe read two local files."""
    first = write_rows(root / "train.jsonl", sentences(train))
    second = write_rows(root / "dev.jsonl", sentences(validation))
    return ["task=glue/mrpc", f"data.train=['{first}']", f"data.validation=['{second}']"]


def squad(root: Path, rows: int = 12) -> list[str]:
    """Overrides that let SQuAD's recipe read local files, short enough for tiny models."""
    data = [
        {
            "question": f"who counts {i}?",
            "context": f"in line {i} the shepherd counts {i} sheep",
            "answers": {"text": ["the shepherd"], "answer_start": [len(f"in line {i} ")]},
        }
        for i in range(rows)
    ]
    train, dev = (write_rows(root / f"{name}_spans.jsonl", data) for name in ("train", "dev"))
    short = ("task.max_length=64", "task.stride=16", "task.max_question=24")
    return ["task=squad", f"data.train=['{train}']", f"data.validation=['{dev}']", *short]


def load(checkpoint: Path, *overrides: str) -> Any:
    return derive.finetuned(str(checkpoint), [*QUICK, *overrides], [], Console(io.StringIO()))


def train(checkpoint: Path, *overrides: str) -> tuple[Path, str, list[dict[str, Any]]]:
    """(run directory, output, record) of a fine-tuning run."""
    from sparsepretrain.training.trainer import train as start

    out = io.StringIO()
    run = resolve_steps(load(checkpoint, *overrides))
    assert start(run, Console(out)) == 0
    directory = freeze.run_directory(run)
    lines = (directory / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return directory, out.getvalue(), [json.loads(line) for line in lines]


def build(checkpoint: Path, *overrides: str) -> Any:
    """Everything the loop touches, before the first step."""
    from sparsepretrain.training.assembly import build_session

    run = resolve_steps(load(checkpoint, *overrides))
    console = Console(io.StringIO())
    return build_session(run, console, initial=weights.find(run.init.path))
