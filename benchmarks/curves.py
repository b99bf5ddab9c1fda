"""Pre-train GPT-2 124M for minutes under several methods; compare losses at equal steps and time.

    python benchmarks/curves.py --methods dense,sste,srste --out curves.json

The text are the Python sources of the machine's own packages (66M tokens or more in an image with
torch), so nothing is downloaded. One seed and a short run rank no methods: the curves show that
training works, how fast it is, and where a method's loss lies after the same minutes. Without a GPU
a tiny model takes six steps.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from harness import Case, Work, header, measure_all
from sparsepretrain.config import compose, validate
from sparsepretrain.config.schema import Run
from sparsepretrain.console import Console
from sparsepretrain.runs.directory import RunDirectory
from sparsepretrain.training.trainer import train

STEPS = 800
"""Optimizer steps of 64 windows of 1024 tokens: 52M tokens."""
SIZE = (
    *("batch.size=64", "batch.micro=16", "schedule.warmup=80"),
    *("eval.every=100", "eval.batches=16", "log.every=10"),
)
TINY_STEPS = 6
TINY = (
    *("model.n_layer=1", "task.sequence_length=32", "batch.size=4", "batch.micro=4"),
    *("schedule.warmup=2", "eval.every=3", "eval.batches=1", "log.every=1"),
)
POINTS = 10
"""Moments of a comparison at equal time."""


def run_of(method: str, given: argparse.Namespace, runs: Path) -> Run:
    """Return the configuration of one run."""
    cuda = torch.cuda.is_available()
    words = ["model=gpt2_124m" if cuda else "model=gpt2_nano", "data=python_source"]
    if given.data == "site-packages":
        words.append(f"data.roots=['{Path(torch.__file__).parents[1]}']")
    if cuda:
        words += ["precision=bf16", "compile=blocks", "data.tokenizer=gpt2_size_bpe", *SIZE]
        if given.tokenizer is not None:  # a file that was trained before: 15 s less
            words += [f"data.tokenizer='{given.tokenizer.resolve()}'", "data.vocab_size=50257"]
    else:
        words += TINY
    steps = given.steps if cuda and not given.quick else TINY_STEPS
    words += [f"steps={steps}", f"sparsity={method}", f"name={method}"]
    words += ["log.layers_every=0", "checkpoint.every=0", "tracker=jsonl", f"runs_dir='{runs}'"]
    return validate(compose(words, []))


def curve(method: str, given: argparse.Namespace, runs: Path) -> list[Case]:
    """Train with one method and return its losses; a run that a signal ends keeps what it has."""
    run = run_of(method, given, runs)
    started = time.time()
    code = train(run, Console())
    lines = RunDirectory.of(run).record_file.read_text(encoding="utf-8").splitlines()
    return [case_of(method, [json.loads(line) for line in lines], run.steps, started, code)]


def case_of(
    method: str, lines: Sequence[dict[str, Any]], steps: int, started: float, code: int = 0
) -> Case:
    """Return the last validation loss, and both curves, from the lines of a record."""
    trained = [line for line in lines if "split" not in line]
    tested = [line for line in lines if line.get("split") == "validation"]
    case = Case(name=method, unit="nats", value=tested[-1]["loss"] if tested else None)
    rates = [line["tokens_per_second"] for line in trained if line.get("tokens_per_second")]
    shares = [line["mfu_dense"] for line in trained if line.get("mfu_dense")]
    first = trained[0]["time"]
    case.detail = {
        "steps": trained[-1]["step"],
        "tokens": trained[-1]["tokens"],
        "seconds_to_first_line": first - started,
        "tokens_per_second": statistics.median(rates) if rates else None,
        "mfu_dense": statistics.median(shares) if shares else None,
        "training": [[line["step"], line["time"] - first, line["loss"]] for line in trained],
        "validation": [[line["step"], line["loss"]] for line in tested],
        "flip_rate": [[line["step"], line["flip_rate"]] for line in trained if "flip_rate" in line],
    }
    if code or trained[-1]["step"] < steps:
        case.status = f"skipped: {trained[-1]['step']} of {steps} steps, exit code {code}"
    return case


def comparison(cases: Sequence[dict[str, Any]]) -> str:
    """Return a table of validation losses at equal steps, and of training losses at equal time."""
    found = {case["name"]: case["detail"] for case in cases if case["detail"].get("training")}
    if not found:
        return "no curve"
    lines = ["validation loss at step"]
    steps = sorted({step for each in found.values() for step, _ in each["validation"]})
    columns = [("", [str(step) for step in steps])]
    for name, each in found.items():
        losses = dict(map(tuple, each["validation"]))
        columns.append((name, [f"{losses[s]:.4f}" if s in losses else "" for s in steps]))
    lines += [f"  {name:12}" + "".join(f"{cell:>9}" for cell in cells) for name, cells in columns]
    lines.append("training loss (mean of the last five lines) after seconds from the first line")
    end = min(each["training"][-1][1] for each in found.values())
    times = [end * (i + 1) / POINTS for i in range(POINTS)]
    lines.append(f"  {'':12}" + "".join(f"{t:9.0f}" for t in times))
    for name, each in found.items():
        cells = []
        for moment in times:
            past = [loss for _, seconds, loss in each["training"] if seconds <= moment][-5:]
            cells.append(f"{statistics.mean(past):9.4f}")
        rate = each["tokens_per_second"]
        speed = f"  {rate / 1e3:.0f} k tokens/s" if rate else ""
        share = f", MFU {each['mfu_dense']:.1%}" if each["mfu_dense"] else ""
        lines.append(f"  {name:12}" + "".join(cells) + speed + share)
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Train, print the comparison; return 1 if a run failed, else 0."""
    parser = argparse.ArgumentParser(prog="benchmarks/curves.py")
    parser.add_argument("--methods", default="dense,sste,srste", metavar="A,B")
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="write the results here")
    parser.add_argument("--after", type=Path, metavar="DIR", help="compare with results here, too")
    parser.add_argument("--data", choices=["stdlib", "site-packages"], default="site-packages")
    parser.add_argument("--tokenizer", type=Path, metavar="tokenizer.json")
    parser.add_argument("--steps", type=int, default=STEPS, help="of 65,536 tokens")
    parser.add_argument("--budget", type=float, metavar="S", help="begin no run after S seconds")
    parser.add_argument("--quick", action="store_true", help=f"{TINY_STEPS} steps: does it run?")
    given = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("no CUDA GPU: a tiny model only", flush=True)
        given.data, given.tokenizer = "stdlib", None
    earlier: list[dict[str, Any]] = []
    for file in sorted(given.after.glob("train-*.json")) if given.after is not None else ():
        earlier += json.loads(file.read_text(encoding="utf-8"))["cases"]
    words = sys.argv[1:] if arguments is None else list(arguments)
    with tempfile.TemporaryDirectory() as runs:
        works: dict[str, Work] = {
            method: partial(curve, method, given, Path(runs)) for method in given.methods.split(",")
        }
        cases = measure_all(works, header("curves", words, given.quick), given.out, given.budget)
    print(comparison([*earlier, *(case.as_dict() for case in cases)]))
    return int(any(case.is_error for case in cases))


if __name__ == "__main__":
    sys.exit(main())
