"""One run: build, continue, loop, prove, sum up."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sparsepretrain.config import freeze
from sparsepretrain.config.schema import Run
from sparsepretrain.errors import CheckpointError, SparsePretrainError
from sparsepretrain.kernels import pack_24
from sparsepretrain.runs import checkpoint
from sparsepretrain.runs.directory import RunDirectory
from sparsepretrain.runs.resume import choose_checkpoint, named_checkpoint
from sparsepretrain.sparsity.proof import Proof, prove
from sparsepretrain.tasks import build_task
from sparsepretrain.tracking.console import Console
from sparsepretrain.tracking.stream import Stream
from sparsepretrain.tracking.wandb import check_login
from sparsepretrain.training import initial, preflight, rng
from sparsepretrain.training.batches import TrainingBatches
from sparsepretrain.training.build import (
    attach_optimizer,
    build_model,
    pick_device,
    sparsify_model,
)
from sparsepretrain.training.ema import EMA
from sparsepretrain.training.hardware import environment, peak_flops
from sparsepretrain.training.loop import Training, run_steps
from sparsepretrain.training.plan import flops_per_item
from sparsepretrain.training.precision import describe, grad_scaler
from sparsepretrain.training.signals import StopSignals


def train(run: Run, console: Console | None = None, *, stop_after: int | None = None) -> int:
    """Train or continue ``run``.

    Args:
        run: the checked configuration.
        console: shows progress; one on the standard output by default.
        stop_after: end early, after so many steps of the run, with the evaluation, log line and
            checkpoint of an end. What it computes up to there, and its directory, are those of
            the whole run, which can be continued later.

    Returns:
        0 when finished, else the exit code of the signal that stopped it.
    """
    console = console or Console()
    check_login(run.tracker)
    directory = RunDirectory.of(run)
    named = named_checkpoint(run, console)
    end = run.steps if stop_after is None else stop_after
    finished = f"{directory} is finished ({end} steps): nothing to do"
    if run.resume != "never" and directory.is_finished(run, end):
        console.info(finished)
        return 0
    preflight.require_a_sparse_step(run)
    with StopSignals() as signals, console.own_warnings():
        own = any(directory.checkpoints.glob("step_*"))
        t = build_training(run, console, initialise=run.resume == "never" or not own)
        t.stop_after = stop_after
        with directory.claim():
            if run.resume != "never" and directory.is_finished(run, end):  # by another process
                console.info(finished)
                return 0
            source = choose_checkpoint(directory, run, named, console)
            if source is not None:
                _restore(t, source)
                console.info(f"continuing from {source} (step {t.step})")
                run_of_source = RunDirectory.of_checkpoint(source)
                if source == named and run_of_source and run_of_source.record_file.is_file():
                    directory.write(directory.record_file, run_of_source.record_file.read_bytes())
            directory.write(directory.config_file, freeze.to_yaml(run.plain))
            if t.task.tokenizer_file is not None:  # it travels with the weights
                text = t.task.tokenizer_file.read_text(encoding="utf-8")
                directory.write(directory.tokenizer_file, text)
            details = json.dumps(environment(t.device), indent=1)
            directory.write(directory.environment_file, details + "\n")
            return _run(t, directory, console, signals, resumed=source is not None)


def _run(
    t: Training,
    directory: RunDirectory,
    console: Console,
    signals: StopSignals,
    *,
    resumed: bool,
) -> int:
    run = t.run
    console.unit = t.task.unit
    _announce(t, directory, console)
    stream = Stream(
        directory.path,
        run.tracker,
        config=run.plain,
        run_name=f"{run.name}/{directory.path.name}",
        resume_step=t.step if resumed else None,
        console=console,
        total=t.end,
    )

    if stream.lines < t.lines:
        console.warn(
            f"{directory.record_file} has {stream.lines} of the {t.lines} lines that it had at "
            f"step {t.step}: the others are lost, and what is summed up or drawn lacks them"
        )

    def save() -> None:
        t.lines = stream.lines
        checkpoint.save(
            directory.checkpoints,
            t.step,
            _state(t),
            config=freeze.to_yaml(run.plain),
            keep_last=run.checkpoint.keep_last,
        )

    exit_code, summary = 1, None
    try:
        code = run_steps(t, stream.log, save, lambda: _save_masks(t, directory), signals)
        exit_code = code or 0
        if code is None:
            proof = prove(t.sparsifier)
            summary = {"proof": str(proof)}
            _summarise(t, directory, proof, console)
        else:
            saved = "; checkpoint saved" if t.step else ", before there was anything to save"
            console.info(f"stopped by a signal after step {t.step}{saved}")
    except SparsePretrainError as error:
        exit_code = error.exit_code
        raise
    finally:
        t.batches.close()
        stream.close(exit_code, summary)
    return exit_code


def build_training(
    run: Run,
    console: Console,
    *,
    splits: Sequence[str] | None = None,
    initialise: bool = True,
) -> Training:
    """Build everything the loop touches; prepares offline data, writes no run directory.

    Args:
        run: the checked configuration.
        console: shows progress, and what initial weights are.
        splits: of the data to open; None: those that training uses.
        initialise: load the weights of ``init``; needless before a checkpoint of the run's own.
    """
    device = pick_device(run)
    rng.seed_all(run.seed)
    task = build_task(run)
    # wrong targets and widths are found before data is prepared and weights are drawn
    sparsify_model(run, task, build_model(run, task, torch.device("meta")))
    if splits is None:
        splits = ("train", "validation") if run.eval.batches != 0 else ("train",)
    task.open_data(splits, on_progress=console.progress)
    model = build_model(run, task, device)
    # before sparsify, which freezes what comes from initial weights
    buffers = initial.load(run, task, model, console) if initialise else {}
    sparsifier = sparsify_model(run, task, model)
    initial.restore(sparsifier, buffers)
    optimizer = attach_optimizer(run, model, sparsifier)
    peak = peak_flops(device, run.precision.name)
    return Training(
        run=run,
        device=device,
        task=task,
        model=model,
        forward_model=torch.compile(model) if run.compile else model,  # type: ignore[arg-type]
        optimizer=optimizer,
        sparsifier=sparsifier,
        scaler=grad_scaler(run.precision, device),
        batches=TrainingBatches(task, run.batch.size, run.batch.micro, device, run.workers),
        ema=None if run.ema is None else EMA(model, run.ema),
        on_progress=console.progress,
        peak_flops=peak,
        flops_per_item=0.0 if peak is None else flops_per_item(run, task),
    )


def _state(t: Training) -> dict[str, Any]:
    """Everything a resumed run needs to go on bit for bit."""
    return {
        "step": t.step,
        "tokens": t.tokens,
        "evaluated": t.evaluated,
        "skipped": t.skipped,
        "skips_in_a_row": t.skips_in_a_row,
        "lines": t.lines,
        "flips": t.flips.state_dict(),
        "fingerprint": t.task.fingerprint,
        "model": t.model.state_dict(),
        "optimizer": t.optimizer.state_dict(),
        "sparsifier": t.sparsifier.state_dict(),
        "scaler": t.scaler.state_dict(),
        "ema": None if t.ema is None else t.ema.state_dict(),
    }


def _restore(t: Training, path: Path) -> None:
    state, _ = checkpoint.load(path)
    if state["step"] > t.run.steps:
        raise CheckpointError(
            f"{path} has {state['step']} steps, more than steps={t.run.steps}: raise steps"
        )
    if state["fingerprint"] != t.task.fingerprint:
        raise CheckpointError(
            f"{path} was trained on other data (fingerprint {state['fingerprint']}, now "
            f"{t.task.fingerprint}): prepare the same data, or start anew with resume=never"
        )
    try:
        t.model.load_state_dict(state["model"])
        fresh = [{k: v for k, v in g.items() if k != "params"} for g in t.optimizer.param_groups]
        t.optimizer.load_state_dict(state["optimizer"])
        if t.ema is not None:  # without averages in the checkpoint they begin with its weights
            t.ema = EMA(t.model, t.ema.decay)
            if state.get("ema") is not None:
                t.ema.load_state_dict(state["ema"])
    except (RuntimeError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        raise CheckpointError(f"{path} does not fit this model or optimiser: {reason}") from error
    for group, options in zip(t.optimizer.param_groups, fresh, strict=True):
        group.update(options)  # hyper-parameters come from the configuration
    t.sparsifier.load_state_dict(state["sparsifier"])
    t.scaler.load_state_dict(state["scaler"])
    if "flips" in state:  # older checkpoints have none: the first mean is over what follows
        t.flips.load_state_dict(state["flips"])
    for key in ("step", "tokens", "evaluated", "skipped", "skips_in_a_row"):
        setattr(t, key, state[key])
    t.lines = state.get("lines", 0)  # not in older checkpoints


def _save_masks(t: Training, directory: RunDirectory) -> None:
    """Packed masks (1 bit per weight) with the shapes to unpack them."""
    arrays: dict[str, np.ndarray] = {}
    for name, mask in t.sparsifier.masks().items():
        arrays[name] = pack_24(mask).cpu().numpy()
        arrays[f"{name}.shape"] = np.array(mask.shape)
    archive = io.BytesIO()
    np.savez(archive, **arrays)  # type: ignore[arg-type]
    directory.write(directory.masks_file(t.step), archive.getvalue())


def _announce(t: Training, directory: RunDirectory, console: Console) -> None:
    parameters = sum(p.numel() for p in t.model.parameters())
    coverage = t.sparsifier.coverage()
    console.info(
        f"{directory}: {parameters / 1e6:.2f}M parameters, {coverage.title} on "
        f"{len(coverage.layers)} layers, {t.device}, {describe(t.run.precision)}, "
        f"steps {t.step} to {t.end}"
    )
    for note in preflight.notes(t.run):
        console.info(f"note: {note}")


def _summarise(t: Training, directory: RunDirectory, proof: Proof, console: Console) -> None:
    lines = directory.record()
    finite = [line for line in lines if line.get("loss") is not None]
    training = [line for line in finite if "split" not in line]
    validation = [line for line in finite if line.get("split") == "validation"]
    rows = [("steps", f"{t.step:,}"), (t.task.unit, f"{t.tokens:,}")]
    if training:
        rows.append(("train loss", _course(training)))
    if validation:
        rows.append(("validation loss", _course(validation)))
        last = validation[-1]
        hidden = ("step", "time", "tokens", "split", "loss")
        texts = {k: v if isinstance(v, str) else f"{v:.4g}" for k, v in last.items()}
        rows += [(f"validation {k}", v) for k, v in texts.items() if k not in hidden]
    flips = [line["flip_rate"] for line in training if line.get("flip_rate") is not None]
    if flips:
        rows.append(("flip rate", f"peak {max(flips):.2e}, end {flips[-1]:.2e}"))
    rows.append(("target layers", f"{len(t.sparsifier.layers)}: {proof}"))
    if proof.sparse and t.end > 1 and not any(line.get("sparse") for line in training[:-1]):
        rows.append(("note", "no step trained sparse"))
    if t.skipped:
        rows.append(("skipped steps", str(t.skipped)))
    console.table(f"{t.run.name}, {t.run.sparsity.name}", rows)
    if proof.sparse and not proof.holds:
        raise SparsePretrainError(f"the final weights are {proof}; please report this")


def _course(lines: Sequence[dict[str, Any]]) -> str:
    """The first and the last loss; one number where they are the same line."""
    losses = [f"{line['loss']:.4f}" for line in (lines[0], lines[-1])[: len(lines)]]
    return " → ".join(losses)
