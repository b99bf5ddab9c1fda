"""Train one run: build, resume, loop, prove, summarize."""

from __future__ import annotations

import contextlib
import io
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from sparsepretrain.config import freeze
from sparsepretrain.config.schema import Run
from sparsepretrain.console import Console, significant
from sparsepretrain.data.encoding import declare_end, declared_end
from sparsepretrain.errors import SparsePretrainError, own_warnings
from sparsepretrain.kernels import pack_24
from sparsepretrain.kernels.cusparselt.packed24 import slow_version
from sparsepretrain.processes import started
from sparsepretrain.pruning.mask_files import masks_file
from sparsepretrain.runs import checkpoint, origin, weights
from sparsepretrain.runs.checkpoint import ALONE
from sparsepretrain.runs.directory import RunDirectory
from sparsepretrain.runs.ownership import Lost, Ownership
from sparsepretrain.runs.record import Record
from sparsepretrain.runs.weights import WeightSource
from sparsepretrain.runs.writer import Writer
from sparsepretrain.sparsity.coverage import Proof
from sparsepretrain.tracking.stream import Stream
from sparsepretrain.tracking.wandb import check_login
from sparsepretrain.training import derive, plan, session_state
from sparsepretrain.training.assembly import build_session
from sparsepretrain.training.fixed_masks import RULES, require_rule
from sparsepretrain.training.hardware import environment
from sparsepretrain.training.identity import run_hashes
from sparsepretrain.training.loop import run_steps
from sparsepretrain.training.observers import Throughput
from sparsepretrain.training.precision import describe, tf32_note
from sparsepretrain.training.resume import begins_anew, choose_checkpoint, named_checkpoint
from sparsepretrain.training.session import Session
from sparsepretrain.training.stopping import StoppedEarly, StopSignals
from sparsepretrain.training.teacher import (
    FoundTeacher,
    find_teacher,
    load_teacher,
    require_same_tokens,
)
from sparsepretrain.training.world import World, join


def train(run: Run, console: Console | None = None, *, stop_after: int | None = None) -> int:
    """Train or continue ``run``.

    Args:
        run: the checked configuration.
        console: shows progress; one on the standard output by default.
        stop_after: number of steps after which the run ends early, with the evaluation, log line
            and checkpoint of an end. Up to there it is the whole run, in the same directory; it
            can be continued later.

    Returns:
        0 when finished, else the exit code of the signal that stopped it.
    """
    console = console or Console()
    check_login(run.tracker)
    try:
        with join(run) as world:
            if not world.is_main:
                console = Console.silent()
            directory = RunDirectory.of(run)
            code = 1
            # torchrun maps all exit codes to 1, also those of a single process
            leaves_status = world.size > 1 or started()
            if leaves_status:
                world.first(lambda: directory.leave_status(None))
            try:
                code = _train(run, directory, console, stop_after, world)
            except (SparsePretrainError, StoppedEarly) as error:
                code = error.exit_code
                raise
            finally:
                if leaves_status and world.is_main:
                    directory.leave_status(code)
            return code
    except StoppedEarly as stop:  # the world was left without waiting for the others
        console.info("stopped by a signal before a step was taken: there is nothing to save")
        return stop.exit_code


def _train(
    run: Run, directory: RunDirectory, console: Console, stop_after: int | None, world: World
) -> int:
    end = run.steps if stop_after is None else min(stop_after, run.steps)

    def finished() -> bool:
        done = run.resume != "never" and directory.is_finished(run, end)
        if done:
            console.info(directory.nothing_to_do(run, end))
        return done

    named = world.first(lambda: named_checkpoint(run, console))
    if world.first(finished):
        return 0
    plan.require_a_sparse_step(run)
    owner: Ownership | None = None  # of the first rank, which writes

    def own() -> None:
        nonlocal owner
        owner = claim.enter_context(directory.claim())

    with StopSignals() as signals, own_warnings(console.warn), contextlib.ExitStack() as claim:
        with signals.at_once():  # data, weights and masks can take an hour
            fresh = begins_anew(run)
            if fresh:
                require_rule(run)
                plan.warn_of_random_weights(run, console.warn)
            initial = weights.find(run.init.path, console.warn) if fresh and run.init.path else None
            # before the directory is claimed: a model that cannot be built leaves no directory
            found = find_teacher(run, console.warn)
            if found is not None and not fresh:
                origin.require_known(directory.source_file, str(found.source.path), directory)
            teacher = load_teacher(run, found, console, world) if found is not None else None
            session = build_session(
                run, console, initial=initial, fresh=fresh, world=world, teacher=teacher
            )
            if found is not None:
                require_same_tokens(found, session.task.tokenizer_file)
            session.end = end
            session.stop.signals = signals
            # first in the list: the work of probes after a step is outside its time
            session.observers.insert(0, Throughput(plan.peak_items(session)))
            world.first(own)
            if world.first(finished):  # by another process
                return 0
            source = world.first(lambda: choose_checkpoint(directory, run, named, console))
            if source is not None:
                session_state.load_state_dict(
                    session, source.parts(mapped=session_state.STORED), source
                )
                console.info(f"continuing from {source} (step {session.step})")
            other = source if source is named else None
            world.first(lambda: _write_files(session, directory, source, other))
            if fresh:
                world.first(lambda: _write_origin(session, directory, initial, found))
        return _run(session, directory, owner, console, resumed=source is not None)


def _write_files(
    session: Session,
    directory: RunDirectory,
    source: checkpoint.Checkpoint | None,
    other: checkpoint.Checkpoint | None,
) -> None:
    """Write the files that do not change during training; ``other`` has a record to copy."""
    about = environment(session.device) | run_hashes(session, source)
    about["parameters"] = sum(p.numel() for p in session.parameters)
    about["coverage"] = str(session.sparsifier.coverage()).splitlines()
    if chosen := session.sparsifier.backend:
        about["sparse_matmuls"] = chosen
    if session.setup.compiled != "none":
        about["compiled"] = session.setup.compiled
    if session.world.size > 1:
        about["processes"] = {"parallel": session.run.parallel.name, "count": session.world.size}
    before = None if other is None else RunDirectory.of_checkpoint(other.path)
    for file in (directory.record_file, directory.probes_file):
        if before is not None and (before.path / file.name).is_file():
            directory.write(file, (before.path / file.name).read_bytes())
    directory.write(directory.config_file, freeze.to_yaml(session.run.plain))
    if session.task.tokenizer_file is not None:  # it travels with the weights
        text = session.task.tokenizer_file.read_text(encoding="utf-8")
        if (end := declared_end(session.task.tokenizer_file)) is not None:
            directory.write(directory.tokenizer_settings_file, declare_end(end))
        directory.write(directory.tokenizer_file, text)
    directory.write(directory.environment_file, json.dumps(about, indent=1) + "\n")


def _write_origin(
    session: Session,
    directory: RunDirectory,
    initial: WeightSource | None,
    found: FoundTeacher | None,
) -> None:
    """Write the fingerprints of what the run starts from, and files of its export."""
    mask = session.run.init.mask
    sources = [] if initial is None else [str(initial.path)]
    sources += [] if mask in RULES else [str(masks_file(mask).absolute())]
    if found is not None:
        sources.append(origin.place_of(str(found.source.path)))
    if sources:
        directory.write(directory.source_file, origin.describe(list(dict.fromkeys(sources))))
    if initial is None:
        return
    own = derive.tokenizer_file(initial)
    text = session.task.tokenizer_file
    same = own is not None and text is not None and own.read_bytes() == text.read_bytes()
    if initial.config is None:
        files = origin.kept_files(str(initial.path), same_tokenizer=same)
    elif initial.run is not None and initial.run.pretrained.is_dir():
        kept = sorted(initial.run.pretrained.iterdir())
        files = {f.name: f.read_bytes() for f in kept if same or f.name == origin.GENERATION}
    else:
        files = {}
    for name, content in files.items():
        directory.write(directory.pretrained / name, content)


def _run(
    session: Session,
    directory: RunDirectory,
    owner: Ownership | None,
    console: Console,
    *,
    resumed: bool,
) -> int:
    run = session.run
    resume_step = session.step if resumed else None
    console.unit = session.task.unit
    stream = probed = None  # the first process writes down what all compute
    if session.world.is_main:
        _announce(session, directory, console)
        stream = Stream(directory, run, resume_step=resume_step, console=console, total=session.end)
        if run.probe:
            probed = Record(directory.probes_file, resume_step=resume_step)
            session.log_probe = probed.write
        left, before = stream.record.lines, session.counters.lines
        if left < before:
            console.warn(
                f"{directory.record_file} has {left} of the {before} lines that it had at step "
                f"{session.step}: the others are lost, and reports and figures lack them"
            )
        directory.note_failure("train")

    def log(line: dict[str, Any]) -> None:
        if stream is not None and owner is not None:
            owner.require()
            stream.log(line)

    def still_own() -> None:
        if owner is not None:
            owner.require(now=True)

    def save() -> None:
        session.world.first(still_own)
        if stream is not None:
            session.counters.lines = stream.record.lines
        state = session_state.state_dict(session)
        config = freeze.to_yaml(run.plain)

        def write() -> None:
            if session.world.is_main or session.is_sharded:
                writer.save(
                    session.step, state, config=config, keep=lambda: directory.retention(run)
                )

        session.world.together(write)

    def save_masks() -> None:
        masks = session.sparsifier.masks()
        session.world.first(
            lambda: _save_masks(masks, directory.masks_file(session.step), directory)
        )

    ranks = session.world.for_thread() if session.is_sharded else ALONE
    writer = Writer(directory.checkpoints, background=run.checkpoint.background, ranks=ranks)
    session.stop.save_failed = lambda: writer.failed
    exit_code = 1
    summary = None
    try:
        code = run_steps(session, log, save, save_masks)
        session.world.together(writer.join)
        exit_code = code or 0
        if code is None:
            proof = session.sparsifier.prove()
            summary = {
                "method": run.sparsity.name,
                "pattern": proof.pattern,
                "density": proof.density,
                "proof": str(proof),
            }
            session.world.first(lambda: _summarize(session, directory, proof, console))
        else:
            saved = "; checkpoint saved" if session.step else ", before there was anything to save"
            console.info(f"stopped by a signal after step {session.step}{saved}")
    except SparsePretrainError as error:
        exit_code = error.exit_code
        if session.world.is_main and not isinstance(error, Lost):
            directory.note_failure("train", exit_code, f"{error.label}: {error}")
        raise
    finally:
        writer.close(console.warn)
        session.batches.close()
        if probed is not None:
            probed.close()
        if stream is not None:
            stream.close(exit_code, summary)
    return exit_code


def _save_masks(masks: dict[str, Tensor], file: Path, directory: RunDirectory) -> None:
    """Packed masks (1 bit per weight) with the shapes to unpack them."""
    arrays: dict[str, np.ndarray] = {}
    for name, mask in masks.items():
        arrays[name] = pack_24(mask).cpu().numpy()
        arrays[f"{name}.shape"] = np.array(mask.shape)
    archive = io.BytesIO()
    np.savez(archive, **arrays)  # type: ignore[arg-type]
    directory.write(file, archive.getvalue())


def _announce(session: Session, directory: RunDirectory, console: Console) -> None:
    coverage = session.sparsifier.coverage()
    console.info(
        f"{directory}: {coverage.total_parameters / 1e6:.2f}M parameters, {coverage.title} on "
        f"{len(coverage.layers)} layers, {session.device}, {describe(session.run.precision)}, "
        f"steps {session.step} to {session.end}"
    )
    if session.run.sparse_matmuls != "emulate":
        console.info(coverage.chosen)
    notes = [plan.warmup_note(session.run), tf32_note(session.run.precision, session.device)]
    if session.run.sparse_matmuls != "emulate":
        notes.append(slow_version(session.device))
    for note in notes:
        if note:
            console.info(f"note: {note}")


def _summarize(session: Session, directory: RunDirectory, proof: Proof, console: Console) -> None:
    lines = directory.record()
    finite = [line for line in lines if line.get("loss") is not None]
    training = [line for line in finite if "split" not in line]
    validation = [line for line in finite if line.get("split") == "validation"]
    rows = [("steps", f"{session.step:,}"), (session.task.unit, f"{session.counters.tokens:,}")]
    if training:
        rows.append(("train loss", _course(training)))
    if validation:
        rows.append(("validation loss", _course(validation)))
        last = {k: math.nan if v is None else v for k, v in validation[-1].items()}
        hidden = ("step", "time", "tokens", "split", "loss")
        texts = {k: v if isinstance(v, str) else f"{v:.4g}" for k, v in last.items()}
        rows += [(f"validation {k}", v) for k, v in texts.items() if k not in hidden]
    flips = [line["flip_rate"] for line in training if line.get("flip_rate") is not None]
    if flips:
        rows.append(("flip rate", f"peak {max(flips):.2e}, end {flips[-1]:.2e}"))
    beside = ""
    if session.sparsifier.method.has_residual:
        beside = "; beside dense branches, without which the metrics are pruned_…"
    rows.append(("target layers", f"{len(session.sparsifier.layers)}: {proof}{beside}"))
    if proof.sparse and session.end > 1 and not any(line.get("sparse") for line in training[:-1]):
        text = "no step trained sparse"
        if session.sparsifier.method.dense_training:
            text += f": {session.sparsifier.method.dense_training}"
        if session.sparsifier.method.prunes_at_end:
            text = f"the last step pruned {training[-1]['masked_share']:.1%} of Σ|W|"
        rows.append(("note", text))
    if session.guard.skipped:
        rows.append(("skipped steps", str(session.guard.skipped)))
    console.table(f"{session.run.name}, {session.run.sparsity.name}", rows)
    if proof.sparse and not proof.holds:
        raise SparsePretrainError(
            f"the final weights are {proof}: expected {proof.pattern} and no -0.0, which "
            "weight * mask makes and masked_fill does not"
        )


def _course(lines: Sequence[dict[str, Any]]) -> str:
    """Return the first and the last loss; one number where they are the same line."""
    losses = [significant(line["loss"]) for line in (lines[0], lines[-1])[: len(lines)]]
    return " → ".join(losses)
