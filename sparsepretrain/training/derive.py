"""Derive the configuration of an evaluation or a fine-tuning run from a checkpoint."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sparsepretrain import registry
from sparsepretrain.config.compose import Overrides, amend, build, chosen_by_experiment, read
from sparsepretrain.config.places import catalog
from sparsepretrain.config.schema import Run
from sparsepretrain.config.validate import load_parsed, validate
from sparsepretrain.console import Console
from sparsepretrain.data.encoding import open_codec
from sparsepretrain.data.tokenizer import BYTES, tokenizer
from sparsepretrain.errors import CheckpointError, ConfigError, DataError
from sparsepretrain.models.pretrained import Pretrained, PretrainedOptions
from sparsepretrain.runs import weights
from sparsepretrain.runs.directory import RunDirectory
from sparsepretrain.runs.weights import WeightSource
from sparsepretrain.sparsity import Method
from sparsepretrain.training.classes import is_reordered

SET_BY_CHECKPOINT = (
    "model",
    "sparsity",
    "optim",
    "schedule",
    "teacher",
    "experiment",
    "steps",
    "epochs",
    "eval",
)
"""Groups and keys that an evaluation cannot override."""


PATTERN_KEYS = ("n", "m", "targets", "patterns")
"""Keys of ``sparsity`` that a fine-tuning takes over from a run."""


def evaluated(source: WeightSource, overrides: Sequence[str], config_dirs: Sequence[Path]) -> Run:
    """Return the run of a checkpoint with other data, task or keys.

    New text is tokenized like the run's; ``data.tokenizer`` of the new group is ignored. For a
    Hugging Face checkpoint ``overrides`` are those of ``train`` with ``model=pretrained
    sparsity=dense``, and the text is read with its tokenizer.
    """
    parsed = read(overrides, config_dirs)
    typed = {key for key, _ in parsed.values}
    if source.config is not None:
        parsed.errors += [
            f"{word}: the checkpoint decides {word.partition('.')[0]}; leave it out"
            for word in (*parsed.choices, *typed)
            if word.partition(".")[0] in SET_BY_CHECKPOINT
        ]
    if parsed.errors:
        raise ConfigError(parsed.errors)
    if source.config is None:
        parsed.choices = {"sparsity": "dense", **parsed.choices, "model": "pretrained"}
        _prepend(parsed, dict.fromkeys(("model.path", "init.path"), str(source.path)))
        plain, _ = build(parsed)
        if "tokenizer" in plain["data"] and "data.tokenizer" not in typed:
            if tokenizer_file(source) is None:
                raise ConfigError(f"{source.path} has no tokenizer.json: give data.tokenizer")
            plain["data"] |= _reading_options(source, plain["data"])
    else:
        if "plugins" not in typed:
            registry.require_imported(source.config.get("plugins"), source.path)
        plain = amend(source.config, parsed)
        # weights and masks are those of the checkpoint
        plain["init"] |= {"path": None, "mask": "magnitude"}
        old = source.config["data"]
        new = plain["data"]
        before, now = (data.get("labels", []) for data in (old, new))
        if is_reordered(before, now):
            text = f"expected the order of the run, {before}, got {now}: leave it out"
            raise ConfigError([("data.labels", f": {text}")])
        if new != old and "tokenizer" in new and "tokenizer" in old:
            if given := sorted(typed & {"data.tokenizer", "data.vocab_size"}):
                text = "token ids mean what the run's tokenizer says; leave it out"
                raise ConfigError(f"{given[0]}: {text}")
            new |= _reading_options(source, new)
    # an evaluation has one process, no global batch, and nothing to imitate
    device = plain["parallel"]["device"]
    plain["parallel"] = {"name": "single", "device": device, "reduction": "fast"}
    if "batch.micro" in typed:
        plain["batch"]["size"] = plain["batch"]["micro"]
    plain["teacher"] = {"name": "none"}
    return validate(plain)


def finetuned(
    checkpoint: str, overrides: Sequence[str], config_dirs: Sequence[Path], console: Console
) -> Run:
    """Return a run whose model and initial weights come from a checkpoint.

    The recipe of ``task=`` brings data, optimizer, schedule and epochs; the checkpoint brings the
    model, its tokenizer, method and precision. What is typed wins.
    """
    parsed = _parse_overrides(overrides, config_dirs)
    source = weights.find(checkpoint, console.warn)
    plain = _apply_checkpoint(source, parsed)
    if "tokenizer" in plain.get("task", {}):
        _prepend(parsed, {"task.tokenizer": _name(tokenizer_file(source), source)})
    elif "tokenizer" in plain.get("data", {}):
        reading = _reading_options(source, plain["data"])
        _prepend(parsed, {f"data.{key}": value for key, value in reading.items()})
    return load_parsed(parsed)


def check_finetuning(run: Run, overrides: Sequence[str], config_dirs: Sequence[Path]) -> None:
    """Refuse what :func:`finetuned` would refuse of ``run`` before that is trained.

    Its tokenizer is not known yet, so the keys of the data are not judged.
    """
    parsed = _parse_overrides(overrides, config_dirs)
    _apply_checkpoint(WeightSource(RunDirectory.of(run).path, config=run.plain), parsed)
    try:
        load_parsed(parsed)
    except ConfigError as error:
        known = [m for m in error.messages if not m.startswith(("data", "task.tokenizer"))]
        if known:
            raise ConfigError(known) from error


def _parse_overrides(overrides: Sequence[str], config_dirs: Sequence[Path]) -> Overrides:
    """Read the overrides of a fine-tuning."""
    parsed = read(with_recipe(overrides, config_dirs), config_dirs)
    if "model" in parsed.choices:
        raise ConfigError("model comes from the checkpoint: leave model= out (keys can be changed)")
    given = {key for key, _ in parsed.values}
    if paths := sorted(given & {"init.path", "model.path"}):
        raise ConfigError(
            f"{paths[0]} is the checkpoint, the first argument: leave {paths[0]}= out"
        )
    return parsed


def _apply_checkpoint(source: WeightSource, parsed: Overrides) -> dict[str, Any]:
    """Apply a checkpoint, except its tokenizer, to ``parsed``; return the composed values."""
    place = source.path.resolve() if isinstance(source.path, Path) else source.path
    settings: dict[str, Any] = {"init.path": str(place)}
    # what an experiment chooses comes before what the checkpoint's run had
    by_experiment = chosen_by_experiment(parsed)
    parsed.choices = by_experiment | parsed.choices | {"model": "pretrained"}
    if source.config is None:
        settings["model.path"] = str(place)
        parsed.choices.setdefault("sparsity", "dense")
    else:
        if not any(key == "plugins" for key, _ in parsed.values):
            registry.require_imported(source.config.get("plugins"), source.path)
        settings |= _from_run(source.config, parsed)
        if "sparsity" in by_experiment:  # with its pattern and layers
            carried = [f"sparsity.{key}" for key in PATTERN_KEYS]
            settings = {key: value for key, value in settings.items() if key not in carried}
    method: type[Method] = registry.get("method", parsed.choices["sparsity"])
    settings |= {f"sparsity.{key}": value for key, value in method.finetuning.options.items()}
    _prepend(parsed, settings)
    if parsed.errors:
        load_parsed(parsed)  # raises with all errors
    return build(parsed)[0]


def with_recipe(overrides: Sequence[str], config_dirs: Sequence[Path]) -> list[str]:
    """``task=X`` as the choice of the recipe X; names of plain tasks stay."""
    groups = catalog(config_dirs)
    recipes = groups["finetune"]
    words = []
    chosen = False
    for word in overrides:
        key, equals, option = word.strip().partition("=")
        if key == "task" and equals:
            chosen = True
            if option in recipes:
                word = f"finetune={option}"
            elif option not in groups["task"]:
                near = registry.suggestion(option, recipes)
                raise ConfigError(f"there is no recipe to fine-tune on {option!r}{near}")
        words.append(word)
    if not chosen:
        raise ConfigError(f"task=… is missing: choose from {', '.join(recipes)}")
    return words


def _from_run(config: dict[str, Any], parsed: Overrides) -> dict[str, Any]:
    """Take model, method, precision and plugins from a run; for the same task its data too."""
    parsed.blocks["model"] = config["model"]
    settings: dict[str, Any] = {"plugins": config["plugins"]} if config.get("plugins") else {}
    if "precision" not in parsed.choices:
        block = config["precision"]
        if block["name"] in ("fp8", "fp8_sim"):  # dropped with MVUE
            keys = ("init_scale", "growth_interval") if block["dtype"] == "fp16" else ()
            block = {"name": block["dtype"], **{k: block[k] for k in keys}}
        parsed.choices["precision"], parsed.blocks["precision"] = block["name"], block
    if parsed.choices.get("task") == config["task"]["name"]:  # goes on with what the run did
        parsed.blocks["task"] = config["task"]
        if "data" not in parsed.choices:
            parsed.blocks["data"] = config["data"]
    before = config["sparsity"]
    source: type[Method] = registry.get("method", before["name"])
    chosen = parsed.choices.get("sparsity", source.finetuning.method or before["name"])
    parsed.choices["sparsity"] = chosen
    settings |= {f"sparsity.{key}": before[key] for key in PATTERN_KEYS}
    if chosen == before["name"]:
        # the window and the phases were those of pre-training
        parsed.blocks["sparsity"] = {**before, "window": {"start": 0.0, "stop": 1.0}}
    return settings


def _prepend(parsed: Overrides, settings: dict[str, Any]) -> None:
    """Set values that typed overrides can still change."""
    parsed.values[:0] = settings.items()


def _reading_options(source: WeightSource, data: dict[str, Any]) -> dict[str, Any]:
    """``tokenizer`` and ``vocab_size`` with which ``data`` reads text as the checkpoint's model."""
    before = {"tokenizer": source.path} if source.config is None else source.config["data"]
    name = before.get("tokenizer")
    size = before.get("vocab_size")
    options: Any = registry.get("source", data["source"])
    # by its name, if it has one there, data that was prepared before is found again
    known = tokenizer(name) if isinstance(name, str) else None
    here_only = {"trained"} if options.Options.hub_tokenizers else {"trained", "hub"}
    if known is not None and known.origin == "file" and not Path(known.name).expanduser().is_file():
        known = None  # but the run has a copy
    if known is None or known.origin in here_only:
        name = _name(tokenizer_file(source), source)
    size = size or open_codec(tokenizer_file(source)).vocab_size
    return {"tokenizer": name, "vocab_size": size, "end_of_text": before.get("end_of_text")}


def tokenizer_file(source: WeightSource) -> Path | None:
    """tokenizer.json of a checkpoint's model; None: it reads bytes, or none is known.

    It is in the directory of the checkpoint or its run, or the configuration names it.
    """
    if source.config is None:
        if isinstance(source.path, str):
            return tokenizer(source.path).file()
        path = source.path / "tokenizer.json"
        # links stay: beside them, not beside what they lead to, are the tokenizer's settings
        return Path(os.path.abspath(path)) if path.is_file() else None
    if source.run is not None and source.run.tokenizer_file.is_file():
        return source.run.tokenizer_file.resolve()
    task = source.config["task"]
    data = source.config["data"]
    known = tokenizer(task.get("tokenizer") or data.get("tokenizer") or BYTES)
    if known.origin == "trained":
        raise DataError(f"the tokenizer of {source.path} is gone: its run had a tokenizer.json")
    file = known.file()
    return None if file is None else file.resolve()


def _name(file: Path | None, source: WeightSource) -> str:
    """Return the configuration's name of the tokenizer that :func:`tokenizer_file` found."""
    if file is not None:
        return str(file)
    if source.config is None:
        options = PretrainedOptions(name="", family="pretrained", path=str(source.path))
        if Pretrained.vocabulary(options) != 256:
            raise CheckpointError(
                f"{source.path} has no tokenizer.json: save a fast tokenizer there, or give "
                "task.tokenizer=FILE"
            )
    return BYTES
