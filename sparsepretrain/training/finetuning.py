"""The verb ``finetune``: an ordinary run whose model and initial weights are a checkpoint's."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sparsepretrain import registry
from sparsepretrain.config.compose import Request, build, catalogue, read
from sparsepretrain.config.schema import Run
from sparsepretrain.config.validate import load_request
from sparsepretrain.errors import CheckpointError, ConfigError
from sparsepretrain.runs import weights
from sparsepretrain.tracking.console import Console

BYTES = "bytes"


def load(
    checkpoint: str, overrides: Sequence[str], config_dirs: Sequence[Path], console: Console
) -> Run:
    """The checked run.

    The recipe of ``task=`` brings data, optimiser, schedule and epochs; the checkpoint brings the
    model, its tokenizer, method and precision. What is typed wins.

    Args:
        checkpoint: see :func:`sparsepretrain.runs.weights.find`.
        overrides: ``task=…`` among them.
        config_dirs: see :func:`sparsepretrain.config.compose.compose`.
        console: told which damaged checkpoints are passed over.

    Raises:
        CheckpointError: there is no checkpoint.
        ConfigError: every problem of the overrides, one message each.
    """
    request = read(with_recipe(overrides, config_dirs), config_dirs)
    if "model" in request.choices:
        raise ConfigError("model comes from the checkpoint: leave model= out (keys can be changed)")
    source = weights.find(checkpoint, console.warn)
    place = source.path.resolve() if isinstance(source.path, Path) else source.path
    settings: dict[str, Any] = {"init.path": str(place)}
    request.choices["model"] = "pretrained"
    if source.config is None:
        settings["model.path"] = str(place)
        request.choices.setdefault("sparsity", "dense")
    else:
        settings |= _from_run(source.config, request)
    method: Any = registry.get("method", request.choices["sparsity"])
    settings |= {f"sparsity.{key}": value for key, value in method.finetune_options.items()}
    _put_first(request, settings)
    if request.errors:
        return load_request(request)
    plain, _ = build(request)
    _require_fitting(plain)
    _put_first(request, _tokenizer_settings(source, plain))
    return load_request(request)


def with_recipe(overrides: Sequence[str], config_dirs: Sequence[Path]) -> list[str]:
    """``task=X`` as the choice of the recipe X; names of plain tasks stay."""
    groups = catalogue(config_dirs)
    recipes, words, chosen = groups["finetune"], [], False
    for word in overrides:
        key, equals, option = word.strip().partition("=")
        if key != "task" or not equals:
            words.append(word)
            continue
        chosen = True
        if option in recipes:
            words.append(f"finetune={option}")
        elif option in groups["task"]:
            words.append(word)
        else:
            near = registry.suggestion(option, recipes)
            raise ConfigError(f"there is no recipe to fine-tune on {option!r}{near}")
    if not chosen:
        raise ConfigError(f"task=… is missing: choose from {', '.join(recipes)}")
    return words


def _from_run(config: dict[str, Any], request: Request) -> dict[str, Any]:
    """What a run hands on: model, method, precision, plugins; its own task too, and the data."""
    request.blocks["model"] = config["model"]
    settings: dict[str, Any] = {"plugins": config["plugins"]} if config["plugins"] else {}
    if "precision" not in request.choices:
        block = config["precision"]
        request.choices["precision"] = block["name"]
        request.blocks["precision"] = block
        if block["name"] == "fp8_sim":  # dropped with MVUE
            request.choices["precision"] = block["dtype"]
            keys = ("init_scale", "growth_interval") if block["dtype"] == "fp16" else ()
            request.blocks["precision"] = {"name": block["dtype"], **{k: block[k] for k in keys}}
    if request.choices.get("task") == config["task"]["name"]:  # goes on with what the run did
        request.blocks["task"] = config["task"]
        if "data" not in request.choices:
            request.blocks["data"] = config["data"]
    before = config["sparsity"]
    source: Any = registry.get("method", before["name"])
    chosen = request.choices.get("sparsity", source.finetunes_as or before["name"])
    request.choices["sparsity"] = chosen
    settings |= {f"sparsity.{key}": before[key] for key in ("n", "m", "targets")}
    if chosen == before["name"]:
        # the window and the phases were those of pre-training
        request.blocks["sparsity"] = {**before, "window": {"start": 0.0, "stop": 1.0}}
    return settings


def _require_fitting(plain: dict[str, Any]) -> None:
    """Refuse a task that the checkpoint's model cannot do, before anything is looked for."""
    family, task = plain["model"].get("family"), plain["task"].get("name")
    recipe: Any = registry.get("model", str(family))
    if task not in recipe.tasks:
        known = ", ".join(sorted(recipe.tasks))
        raise ConfigError(f"a model of family {family} cannot do task={task}: it does {known}")


def _put_first(request: Request, settings: dict[str, Any]) -> None:
    """Set values that what was typed can still change."""
    request.values[:0] = settings.items()


def _tokenizer_settings(source: weights.Source, plain: dict[str, Any]) -> dict[str, Any]:
    """Let the task or the data read text as the checkpoint's model does."""
    if "tokenizer" in plain.get("task", {}):
        return {"task.tokenizer": _tokenizer_file(source)}
    if "tokenizer" not in plain.get("data", {}):
        return {}
    name = _tokenizer_name(source) or _tokenizer_file(source)
    return {"data.tokenizer": name, "data.vocab_size": _tokens(name)}


def _tokenizer_name(source: weights.Source) -> str | None:
    """How data names the tokenizer, if it does: prepared data is then found again."""
    from sparsepretrain.data.tokenizer import tokenizer

    if source.config is None:
        return None if isinstance(source.path, Path) else source.path
    name = source.config["data"].get("tokenizer")
    return None if name is None or tokenizer(name).is_trained else str(name)


def _tokens(name: str) -> int | None:
    """Tokens of a tokenizer; None where the configuration knows them."""
    from sparsepretrain.data.encoding import open_codec
    from sparsepretrain.data.tokenizer import tokenizer

    found = tokenizer(name)
    return None if found.vocab_size else open_codec(found.file()).vocab_size


def _tokenizer_file(source: weights.Source) -> str:
    """``bytes``, or the tokenizer.json that travels with the checkpoint."""
    from sparsepretrain.data.tokenizer import tokenizer

    if source.config is None:
        return _huggingface_tokenizer(source)
    if source.run is not None and (file := source.run.tokenizer_file).is_file():
        return str(file.resolve())
    task, data = source.config["task"], source.config["data"]
    name = task.get("tokenizer") or data.get("tokenizer")
    known = tokenizer(name) if name else None
    if known and known.is_bytes:
        return BYTES
    if known and known.is_file and Path(known.name).is_file():
        return str(Path(known.name).resolve())
    if known and known.is_remote:
        return str(known.file())
    raise CheckpointError(
        f"{source.path} has no tokenizer.json beside it: give task.tokenizer=FILE (or put the file "
        "into the run directory)"
    )


def _huggingface_tokenizer(source: weights.Source) -> str:
    from sparsepretrain.data.tokenizer import tokenizer
    from sparsepretrain.models.pretrained import Pretrained, PretrainedOptions

    if isinstance(source.path, str):
        return str(tokenizer(source.path).file())
    file = source.path / "tokenizer.json"
    if file.is_file():
        return str(file.resolve())
    options = PretrainedOptions(name="", family="pretrained", path=str(source.path))
    if Pretrained.vocabulary(options) == 256:
        return BYTES
    raise CheckpointError(
        f"{source.path} has no tokenizer.json: save a fast tokenizer there, or give "
        "task.tokenizer=FILE"
    )
