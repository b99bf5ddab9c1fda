"""Evaluate a checkpoint on a whole split: build the model, load, measure, record."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sparsepretrain.console import Console, significant
from sparsepretrain.data.tokenizer import tokenizer
from sparsepretrain.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    DivergedError,
    cannot_write,
    reason,
)
from sparsepretrain.files import write_atomic
from sparsepretrain.runs import weights
from sparsepretrain.runs.ownership import exclusive
from sparsepretrain.runs.weights import WeightSource
from sparsepretrain.training import derive, validation
from sparsepretrain.training.assembly import build_session
from sparsepretrain.training.hardware import environment
from sparsepretrain.training.session import Session
from sparsepretrain.training.session_state import averages


def evaluate_checkpoint(
    path: str,
    overrides: Sequence[str] = (),
    config_dirs: Sequence[Path] = (),
    *,
    split: str = "validation",
    average: int = 1,
    out: Path | None = None,
    console: Console | None = None,
) -> dict[str, Any]:
    """Return all metrics of a checkpoint over a whole split, each sample once.

    Args:
        path: see :func:`weights.find`.
        overrides, config_dirs: see :func:`derive.evaluated`.
        split: validation or test; training data is augmented, mixed or cut.
        average: number of last checkpoints whose weights are averaged, see
            :meth:`WeightSource.model_state`.
        out: file that the result is appended to; None: ``eval.jsonl`` of the run directory, if any.
        console: prints the result; one on the standard output by default.

    Returns:
        the line that was appended.
    """
    console = console or Console()
    source = weights.find(path, console.warn, average=average)
    run = derive.evaluated(source, overrides, config_dirs)
    session = build_session(
        run, console, splits=(split,), initial=source if source.config is None else None
    )
    samples = session.task.samples(split)
    if not samples:
        raise DataError(f"the {split} split of {run.data.name} is empty: choose another")
    _load_weights(session, source, console)
    proof = session.sparsifier.prove()
    metrics = validation.evaluate(session, split, None, final=True)
    assert metrics is not None
    step = "" if source.step is None else f", step {source.step:,}"
    if source.averaged:
        steps = ", ".join(f"{averaged:,}" for averaged in source.averaged_steps)
        step = f", mean of the weights of steps {steps}"
    rows = [
        ("checkpoint", f"{source.path}{step}"),
        (split, f"{samples:,} {session.task.sample} of {run.data.name}, every one once"),
        ("target layers", f"{len(session.sparsifier.layers)}: {proof}"),
        *((k, significant(v) if isinstance(v, float) else str(v)) for k, v in metrics.items()),
    ]
    console.table(f"{run.task.name}, {run.sparsity.name}", rows)
    wrong = [k for k, v in metrics.items() if isinstance(v, float) and math.isnan(v)]
    if wrong:
        raise DivergedError(
            f"{source.path}: {', '.join(wrong)} is nan: expected finite weights and data; evaluate "
            "an earlier checkpoint. Nothing was written"
        )
    result = {
        "checkpoint": str(source.path),
        "step": source.step,
        "average": average,
        "averaged_steps": source.averaged_steps,
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "task": run.task.name,
        "data": run.data.name,
        "fingerprint": session.task.fingerprint,
        "overrides": list(overrides),
        "environment": environment(session.device),
        "split": split,
        "samples": samples,
        "weights": "sparse" if proof.holds else "dense",
        "pattern": proof.pattern if proof.sparse else None,
        "pattern_holds": proof.holds,
        "zeros": proof.zeros / proof.entries if proof.entries else None,
        "why_dense": None if proof.sparse else proof.why_dense or "a dense method",
        "metrics": metrics,
    }
    if out is None and source.run is not None:
        out = source.run.evaluations_file
    if out is not None:
        session.world.first(lambda: append(result, out))
        console.info(f"written to {out}")
    return result


def _load_weights(session: Session, source: WeightSource, console: Console) -> None:
    """Load the weights, the averages that the run kept, and the state of the method."""
    newest = source.checkpoint
    if newest is None:  # init.path has loaded them
        rows = session.model.get_input_embeddings().num_embeddings  # type: ignore[operator]
        if (tokens := getattr(session.run.data, "vocab_size", 0)) > rows:
            raise ConfigError(f"data.vocab_size is {tokens}, but {source.path} has {rows} tokens")
        return
    assert source.config is not None
    fingerprint = newest.part("fingerprint")
    same_data = source.config["data"] == session.run.plain["data"]
    if same_data and fingerprint != session.task.fingerprint:
        text = f"the data are not those of the run (fingerprint {fingerprint} then)"
        if tokenizer(getattr(session.run.data, "tokenizer", "")).origin == "trained":
            raise DataError(f"{text}, so token ids mean other text: prepare the same data again")
        console.warn(text)
    try:
        session.model.load_state_dict(
            source.model_state(k for k, _ in session.model.named_parameters())
        )
    except RuntimeError as error:
        raise CheckpointError(f"{newest} does not fit this model: {reason(error)}") from error
    session.sparsifier.load_state_dict(newest.part("sparsifier"))
    if source.averaged:
        session.ema = None  # one average at a time
    if session.ema is not None:
        averaged, updates = averages(
            {key: newest.part(key) for key in ("ema", "ema_updates")}, session.model
        )
        session.ema.load({name: value[...] for name, value in averaged.items()}, updates)


def append(result: dict[str, Any], file: Path) -> None:
    """Add a line; evaluations at the same time, also on other machines, lose none.

    Appending does not suffice: two machines that append to a file of NFS write to the same place.
    """
    finite = {
        key: value if not isinstance(value, float) or math.isfinite(value) else None
        for key, value in result["metrics"].items()
    }
    line = json.dumps(result | {"metrics": finite}, ensure_ascii=False, allow_nan=False) + "\n"
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file = file.resolve()
        if file.exists() and not file.is_file():  # a pipe or a device
            with open(file, "ab", buffering=0) as stream:
                stream.write(line.encode())
            return
        with exclusive(file):
            before = file.read_bytes() if file.exists() else b""
            write_atomic(file, before + line.encode())
    except OSError as error:
        raise cannot_write(file, error) from error
