"""One-shot pruning of anybody's checkpoint: a directory in, a pruned directory out."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from sparsepretrain import __version__
from sparsepretrain.config.compose import read
from sparsepretrain.config.schema import Run
from sparsepretrain.console import Console
from sparsepretrain.errors import (
    CheckpointError,
    ConfigError,
    SparsePretrainError,
    cannot_write,
)
from sparsepretrain.export import convert, prune_page
from sparsepretrain.export.about import ABOUT
from sparsepretrain.export.audit import audit
from sparsepretrain.export.perplexity import perplexities, perplexities_of
from sparsepretrain.export.run import new_directory
from sparsepretrain.files import read_json, write_atomic
from sparsepretrain.models._families import roles_of
from sparsepretrain.models.pretrained import (
    checkpoint_file,
    is_causal_lm,
    load,
    quiet,
    stored_dtypes,
)
from sparsepretrain.pruning import PruningMethod
from sparsepretrain.pruning.journal import DirectoryJournal
from sparsepretrain.pruning.layers import linear_layers, require_layers
from sparsepretrain.pruning.mask_files import NAME as MASKS
from sparsepretrain.pruning.mask_files import write_masks
from sparsepretrain.pruning.walk import Calibration, prune_model
from sparsepretrain.runs import origin, weights
from sparsepretrain.runs.ownership import exclusive
from sparsepretrain.runs.weights import WeightSource
from sparsepretrain.sparsity.selection import select_layers
from sparsepretrain.tasks import Task, build_task
from sparsepretrain.training import derive
from sparsepretrain.training.assembly import require_finite, require_known_layers, require_positions
from sparsepretrain.training.fixed_masks import calibration_batches, packed
from sparsepretrain.training.world import World

FACTS = "prune.json"
"""Settings and results beside the pruned weights."""
EVALUATED = 32_768
"""Maximum tokens of the validation split that perplexity is computed over; at least a sequence."""
CONFIG = "config.json"
STAGES = "stages"
"""Directory of finished blocks in that of unfinished work."""
KEPT = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
    "added_tokens.json",
    *origin.TOKENIZER_SETTINGS,
    origin.GENERATION,
    "preprocessor_config.json",
)
"""Files of a checkpoint besides weights and config.json that the pruned one keeps."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """Arguments of the verb ``prune``."""

    checkpoint: str
    """Hugging Face checkpoint, run, or checkpoint of a run."""
    name: str
    """Name of the method."""
    method: PruningMethod
    out: Path
    layers: Sequence[str] = ()
    """Globs of layers, or roles (ffn, attention, all); empty: all."""
    sequences: int = 128
    """Sequences of calibration text."""
    overrides: Sequence[str] = ()
    """Overrides of the data, as those of ``eval``."""
    config_dirs: Sequence[Path] = ()
    replaces: bool = False
    """Remove what prune wrote there with other settings, finished or not, instead of refusing."""

    @property
    def pattern(self) -> tuple[int, int]:
        """(N, M)."""
        return self.method.n, self.method.m

    @property
    def reads_text(self) -> bool:
        """True if the method needs calibration text."""
        return self.method.reads != "nothing"


def prune_checkpoint(request: Request, console: Console) -> Path:
    """Prune a checkpoint and write it for stock transformers, with masks and a report.

    An interrupted command goes on behind the last finished block. The result is audited and gets
    its name last.

    Returns:
        the output directory.

    Raises:
        CheckpointError, ConfigError, DataError: with a one-line message.
    """
    source = weights.find(request.checkpoint, console.warn)
    out = new_directory(request.out)
    text = _text(source, request, console)
    settings = _settings(source, request, text)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with exclusive(out):
            if not _is_finished(out, settings, console, replaces=request.replaces):
                work = _working_directory(out, settings, replaces=request.replaces)
                try:
                    _prune(source, request, text, settings, work, out, console)
                except SparsePretrainError:
                    if not any((work / STAGES).iterdir()):  # refused before any work
                        shutil.rmtree(work)
                    raise
    except (OSError, SafetensorError) as error:
        failed = error if isinstance(error, OSError) else OSError(str(error))
        raise cannot_write(out, failed) from error
    return out


@dataclass(frozen=True)
class _Text:
    """Calibration text and the text of the perplexity."""

    run: Run
    task: Task
    batches: list[Tensor]
    """Tokens of each forward."""
    held_out: list[int]
    """Tokens of validation sequences, one after another."""
    length: int
    """Tokens of a sequence."""
    device: torch.device
    """Device of the calibration."""


def _text(source: WeightSource, request: Request, console: Console) -> _Text | None:
    """Open the text of a request; None: magnitude without text."""
    typed = read(request.overrides, request.config_dirs)
    named = "data" in typed.choices or any(key.startswith("data.") for key, _ in typed.values)
    if source.config is None and not named:
        if request.reads_text:
            raise ConfigError(
                f"{request.name} needs calibration text: give data=c4_shard (what papers use), "
                "data=text_files 'data.files=[…]', data=document_files 'data.data_files=[…]', or "
                "data=python_source (offline)"
            )
        _refuse_words(request, "without data=… there is no text to read")
        return None
    task_name = "causal_lm" if source.config is None else source.config["task"]["name"]
    if task_name != "causal_lm":
        if request.reads_text:
            raise ConfigError(
                f"{request.name} is for causal language models, and {request.checkpoint} was "
                f"trained with task={task_name}: use --method magnitude"
            )
        _refuse_words(request, f"nothing is read with task={task_name}")
        return None
    run = packed(derive.evaluated(source, request.overrides, request.config_dirs))
    if run.task.name != "causal_lm":
        raise ConfigError(f"task={run.task.name}: leave it out, calibration reads running text")
    device = World.single(run.parallel.device).device
    task = build_task(run)
    require_positions(task)
    task.open_data(("train", "validation"), on_progress=console.progress)
    batches = []
    if request.reads_text:
        batches = calibration_batches(task, request.sequences, device)
    length: int = task.options.sequence_length
    count = min(max(1, EVALUATED // length), task.samples("validation"))
    held_out = task.batch("validation", 0, range(count), count)
    whole = (held_out["targets"] >= 0).all(1)  # the last window of the split may be shorter
    tokens = held_out["tokens"][whole].flatten().tolist()
    return _Text(run, task, batches, tokens, length, device)


def _refuse_words(request: Request, why: str) -> None:
    """Refuse overrides that would do nothing."""
    if request.overrides:
        raise ConfigError(f"{request.overrides[0]}: leave it out, as {why}")


def _settings(source: WeightSource, request: Request, text: _Text | None) -> dict[str, Any]:
    """Return what the result follows from, as JSON has it."""
    settings: dict[str, Any] = {
        "version": __version__,
        "checkpoint": origin.place_of(str(source.path)),
        "files": origin.fingerprint(str(source.path)),
        "method": request.name,
        "options": dataclasses.asdict(request.method.options),
        "pattern": "{}:{}".format(*request.pattern),
        "layers": [*request.layers] or ["all"],
        "overrides": [*request.overrides],
    }
    if text is not None:
        settings["text"] = {
            "data": text.run.data.name,
            "fingerprint": text.task.fingerprint,
            "seed": text.run.seed,
            "sequences": request.sequences if request.reads_text else 0,
            "sequence_length": text.length,
            "evaluated": len(text.held_out),
        }
    return settings


def _is_finished(out: Path, settings: dict[str, Any], console: Console, *, replaces: bool) -> bool:
    """Return True if the output is there already; refuse a directory with something else."""
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return False
    results = _read(out / FACTS)
    if results is not None:
        if results.get("settings") == settings:
            console.info(f"{out} is finished: nothing to do")
            return True
        if replaces:
            shutil.rmtree(out)
            return False
        raise ConfigError(f"{out} was pruned with other settings: choose another --out")
    raise ConfigError(f"{out} exists and was not made by prune: choose another --out")


def _read(file: Path) -> dict[str, Any] | None:
    """Return the content of a file of this module; None: there is none, or another one."""
    try:
        return read_json(file)
    except (OSError, ValueError):
        return None


def _working_directory(out: Path, settings: dict[str, Any], *, replaces: bool) -> Path:
    """Return the directory of unfinished work, which may be that of an interrupted command."""
    work = out.with_name(f".{out.name}.partial")
    file = work / FACTS
    if file.is_file():
        if _read(file) == settings:
            return work
        if not replaces:
            raise ConfigError(
                f"{work} has unfinished work with other settings: remove it, or choose another "
                "--out"
            )
    shutil.rmtree(work, ignore_errors=True)  # or it was killed before the settings were written
    (work / STAGES).mkdir(parents=True)
    write_atomic(file, json.dumps(settings, indent=1) + "\n")
    return work


def _prune(
    source: WeightSource,
    request: Request,
    text: _Text | None,
    settings: dict[str, Any],
    work: Path,
    out: Path,
    console: Console,
) -> None:
    path = str(source.path) if source.config is None else str(_exported(source, work))
    causal = is_causal_lm(path)
    if request.reads_text and not causal:
        raise ConfigError(
            f"{request.name} is for causal language models, and config.json of "
            f"{request.checkpoint} names another class: use --method magnitude"
        )
    n, m = request.pattern
    read = text if causal else None
    result = work / "result"
    shutil.rmtree(result, ignore_errors=True)
    result.mkdir()
    layers, blocks, before = _prune_model(request, path, read, work, result, console)
    about = {
        "method": request.name,
        "pattern": f"{n}:{m}",
        "weights": f"{n}:{m}, pruned by {request.name}",
        "layers": layers,
    }
    (result / ABOUT).write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
    audited = audit(result, require=request.pattern, layers=layers)
    if audited.fails:
        wrong = next(finding for finding in audited.findings if not finding.is_note)
        raise CheckpointError(f"{wrong.where} was not written as it is: {wrong.text}")
    after = []
    if read is not None:
        after = perplexities(result, read.held_out, [read.length], console.counter("windows"))
    results = {
        "settings": settings,
        "layers": len(layers),
        "weights": audited.entries,
        "nonzeros": audited.nonzeros,
        "perplexity": {"before": before, "after": after},
        "blocks": blocks,
    }
    (result / FACTS).write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    (result / prune_page.PAGE).write_text(prune_page.as_markdown(results), encoding="utf-8")
    for file in result.rglob("*.safetensors"):  # safetensors creates private files
        shutil.copymode(result / ABOUT, file)
    if out.exists():
        out.rmdir()
    os.replace(result, out)
    shutil.rmtree(work, ignore_errors=True)
    console.table("prune", [*prune_page.summary(results), ("written to", str(out))])


def _prune_model(
    request: Request,
    path: str,
    text: _Text | None,
    work: Path,
    result: Path,
    console: Console,
) -> tuple[list[str], dict[str, Any], list[dict[str, Any]]]:
    """Prune a checkpoint of transformers and write weights and masks.

    Returns:
        names of the pruned layers; name of a block -> facts for the report; perplexity before.
    """
    loaded = load(path, "causal_lm" if is_causal_lm(path) else "own")
    if loaded.new:
        raise CheckpointError(
            f"{path} lacks {', '.join(loaded.new[:3])} of {type(loaded.model).__name__}, which "
            "would be random: save the model with all of its weights"
        )
    model = loaded.model.float().eval()
    del loaded
    dtypes = stored_dtypes(path, model)
    require_finite(model.state_dict(), path)
    layers = _chosen(model, request.layers)
    # `prune_model` asks too, after the perplexity was measured
    require_layers(model, dict.fromkeys(layers, request.pattern[1]))
    calibration = None
    before = []
    if text is not None:
        model.to(text.device)
        report = console.counter("windows")
        before = perplexities_of(model, text.held_out, [text.length], report)
    if text is not None and text.batches:
        calibration = Calibration(functools.partial(model, use_cache=False), text.batches)
    journal = DirectoryJournal(work / STAGES)
    report = console.counter("blocks" if calibration else "layers")
    stages = prune_model(
        model,
        layers,
        request.method,
        calibration,
        dtypes=dtypes,
        journal=journal,
        progress=report,
    )
    with quiet():
        blocks = {stage.name: stage.facts for stage in stages}
    console.stop()
    _write_model(model, dtypes, path, result)
    write_masks(result / MASKS, _masks(journal, list(blocks)), request.pattern)
    return layers, blocks, before


def _exported(source: WeightSource, work: Path) -> Path:
    """Write a run as a directory of transformers, which is pruned like any other one."""
    directory = work / "source"
    if directory.is_dir():
        return directory
    converted = convert.convert(source)
    if converted.is_timm:
        raise ConfigError(
            f"{source.path} is a model of timm, and prune writes for transformers: `finetune RUN "
            "sparsity=asp sparsity.at=0` prunes it by magnitude"
        )
    stage = work / "source.tmp"
    shutil.rmtree(stage, ignore_errors=True)
    stage.mkdir()
    convert.write(converted, stage)
    os.replace(stage, directory)
    return directory


def _chosen(model: nn.Module, words: Sequence[str]) -> list[str]:
    """Return the names of the layers that globs or roles name, all linear layers by default."""
    roles = roles_of(linear_layers(model))
    words = words or ["all"]
    globs = [word.removeprefix("!") for word in words if word not in roles]
    patterns: list[str] = []
    excluded: list[str] = []
    try:
        for word in words:
            if word in roles:
                require_known_layers(word, roles, model, globs)
                patterns += roles[word]
            elif word.startswith("!"):
                excluded.append(word.removeprefix("!"))
            else:
                patterns.append(word)
        return list(select_layers(model, patterns, excluded))
    except ConfigError as error:
        texts = [text.removeprefix("targets").lstrip(": ") for text in error.messages]
        raise ConfigError([f"--layers: {text}" for text in texts]) from error


def _masks(journal: DirectoryJournal, stages: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
    """Yield layers and masks from the files of finished stages, one stage in memory at a time."""
    for name in stages:
        stage = journal.load(name)
        if stage is None:
            raise CheckpointError(f"{journal.directory} has lost {name}: run the command again")
        yield from stage.masks.items()


@torch.no_grad()
def _write_model(model: Any, dtypes: dict[str, torch.dtype], source: str, directory: Path) -> None:
    """Write weights in the types of the source, and its configuration and tokenizer as they are."""
    model.to("cpu")
    for name, parameter in model.named_parameters():  # in place: tied weights stay tied
        parameter.data = parameter.data.to(dtypes[name])
    with quiet():
        model.save_pretrained(directory)
    config_file = checkpoint_file(source, CONFIG)
    assert config_file is not None
    config = read_json(config_file)
    config.setdefault("architectures", read_json(directory / CONFIG)["architectures"])
    (directory / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    (directory / origin.GENERATION).unlink(missing_ok=True)  # that of the source is copied
    for name in KEPT:
        file = checkpoint_file(source, name)
        if file is not None:
            shutil.copyfile(file, directory / name)
