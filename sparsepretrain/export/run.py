"""Export of a run's checkpoint to a directory for other libraries."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch

from sparsepretrain.config import freeze
from sparsepretrain.console import Console
from sparsepretrain.errors import ConfigError, cannot_write
from sparsepretrain.export import card, convert, onnx_file
from sparsepretrain.export.about import ABOUT, sparsity_of
from sparsepretrain.runs import weights
from sparsepretrain.runs.directory import RunDirectory
from sparsepretrain.runs.weights import WeightSource


def export_run(
    path: str | Path,
    *,
    average: int = 1,
    out: Path | None = None,
    onnx: bool = False,
    console: Console | None = None,
) -> Path:
    """Write a run's evaluated model as files for transformers or timm.

    Writes weights (fp32 safetensors, exact zeros, scales folded in), configuration, tokenizer,
    model card, ``sparsity.json`` and the frozen configuration. The files are reloaded and checked
    before they are moved to their path: sparse layers are N:M with +0.0, and logits equal
    evaluation's.

    Args:
        path: a run directory or one of its checkpoints.
        average: number of last checkpoints whose weights are averaged, see
            :meth:`WeightSource.model_state`.
        out: output directory; None: ``export/hf`` of the run. An earlier export of the run is
            replaced; a directory with any other file is refused.
        onnx: also write ``model.onnx``, proven N:M and compared in ONNX Runtime.
        console: prints a summary; by default to stdout.

    Returns:
        Output directory.

    Raises:
        CheckpointError, ConfigError, DataError: with a one-line message.
    """
    console = console or Console()
    if onnx:
        onnx_file.require_packages()
    source = weights.find(path, console.warn, average=average)
    if source.config is None:
        raise ConfigError(f"{path} is a Hugging Face checkpoint already: give a run")
    directory = _place(source, out)
    stage = directory.with_name(f".{directory.name}.tmp")
    shutil.rmtree(stage, ignore_errors=True)
    try:
        stage.mkdir(parents=True)
    except OSError as error:
        raise cannot_write(directory, error) from error
    try:
        converted = convert.convert(source)
        about = _write(converted, stage, directory, onnx=onnx)
        _publish(stage, directory)
    finally:
        shutil.rmtree(stage, ignore_errors=True)
    of = f"step {source.step:,}"
    if source.averaged:
        steps = [f"{step:,}" for step in source.averaged_steps]
        of = f"mean of steps {', '.join(steps)}"
    rows = [("checkpoint", f"{source.path}, {of}"), ("weights", about["weights"])]
    difference = about["largest_logit_difference"]
    equal = "equal to the bit" if not difference else f"largest difference {difference:.1e}"
    rows += [("loads as", type(converted.model).__name__), ("logits", f"evaluation's, {equal}")]
    if onnx:
        largest = about["onnx"]["largest_difference"]
        rows += [(onnx_file.FILE, f"ONNX Runtime computes the same to {largest:.1e}")]
    console.table("export", [*rows, ("written to", str(directory))])
    return directory


def _write(
    converted: convert.Converted, stage: Path, directory: Path, *, onnx: bool
) -> dict[str, Any]:
    """Write and check the files of ``directory`` in ``stage``; return the content of ``ABOUT``."""
    try:
        difference = convert.write(converted, stage)
        about = _about(converted, difference)
        if onnx:
            about["onnx"] = _write_onnx(converted, stage)
        config = converted.source.config or {}
        (stage / RunDirectory.config_file.name).write_text(freeze.to_yaml(config))
        card.write(converted, about, stage)
        about["files"] = [ABOUT, *_files(stage)]
        (stage / ABOUT).write_text(json.dumps(about, indent=1) + "\n")
        for file in stage.rglob("*.safetensors"):  # safetensors creates private files
            shutil.copymode(stage / ABOUT, file)
    except OSError as error:
        raise cannot_write(directory, error) from error
    return about


def _publish(stage: Path, directory: Path) -> None:
    """Move the files to their path, in the place of an earlier export."""
    try:
        if directory.exists():
            shutil.rmtree(directory)
        os.replace(stage, directory)
    except OSError as error:
        raise cannot_write(directory, error) from error


def _place(source: WeightSource, out: Path | None) -> Path:
    """Return the output directory: missing, empty, or an earlier export of the run alone."""
    if out is None:
        if source.run is None:
            raise ConfigError(f"{source.path} does not lie in a run directory: give --out DIR")
        out = source.run.exports / "hf"
    out = new_directory(out)
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return out
    about = _read_about(out / ABOUT)
    if "files" not in about:  # prune and save_pretrained write the file without this key
        raise ConfigError(f"{out} exists and is no export: choose another --out")
    if any(about.get(key) != value for key, value in _run_of(source).items()):
        raise ConfigError(f"{out} is the export of another run: choose another --out")
    if foreign := sorted({*_files(out)} - {*about["files"]}):
        raise ConfigError(
            f"{out} has files that export did not write ({foreign[0]}): move them, or choose "
            "another --out"
        )
    return out


def new_directory(out: Path) -> Path:
    """Return the absolute path of an output that appears, or is replaced, when it is complete."""
    absolute = out.expanduser().absolute()
    if absolute.resolve() == Path.cwd().resolve():
        raise ConfigError(
            f"--out: {out} is the current directory, which would be replaced: name another one"
        )
    return absolute


def _read_about(file: Path) -> dict[str, Any]:
    """Return the content of a ``sparsity.json``, empty if there is none that can be read."""
    try:
        about = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return about if isinstance(about, dict) else {}


def _files(directory: Path) -> list[str]:
    """Return the files below a directory, as relative paths in order."""
    found = (path for path in directory.rglob("*") if not path.is_dir() or path.is_symlink())
    return sorted(path.relative_to(directory).as_posix() for path in found)


def _run_of(source: WeightSource) -> dict[str, Any]:
    """Return the entries of ``sparsity.json`` that name the run."""
    config = source.config or {}
    return {"config_hash": freeze.identity(config), "seed": config.get("seed")}


def _about(converted: convert.Converted, difference: float) -> dict[str, Any]:
    """Return the content of ``sparsity.json``."""
    source = converted.source
    merged = "dense: adapters were added to the weights"
    weights = merged if converted.merged else str(converted.proof)
    return {
        "method": converted.method.options.name,
        **sparsity_of(converted.patterns, converted.layers, converted.left_dense, weights),
        "largest_logit_difference": difference,
        **_run_of(source),
        "step": source.step,
        "averaged_steps": source.averaged_steps,
    }


def _write_onnx(converted: convert.Converted, directory: Path) -> dict[str, Any]:
    """Write and check the file of a run's model; return its entry in ``sparsity.json``.

    Sizes of batches and sequences may change; a second batch of other sizes is compared too. Models
    of transformers get an attention mask, and segments if they have embeddings of them.
    """
    model: Any = converted.model
    inputs = dict(converted.inputs)
    if not converted.is_timm:
        inputs.setdefault("attention_mask", torch.ones_like(inputs["input_ids"]))
        if getattr(model.config, "type_vocab_size", 0) > 1:
            inputs["token_type_ids"] = torch.zeros_like(inputs["input_ids"])
    shapes = {}
    other = {}
    for name, value in inputs.items():
        shapes[name] = {0: "batch"}
        other[name] = value[-1:].expand(3, *value.shape[1:]).clone()
        if not value.is_floating_point():
            of_decoder = name.startswith("decoder")
            shapes[name][1] = "decoder_sequence" if of_decoder else "sequence"
            other[name] = other[name][:, : 5 if of_decoder else 6].contiguous()
    if "attention_mask" in other:
        other["attention_mask"][0, 5:] = 0
    if "token_type_ids" in other:
        other["token_type_ids"][1, 3:] = 1
    path = directory / onnx_file.FILE
    found = onnx_file.write(model, path, inputs, shapes, converted.patterns)
    onnx_file.prove(path, found, converted.patterns)
    return {
        "largest_difference": onnx_file.compare(path, model, [inputs, other]),
        "initializers": {layer: each._asdict() for layer, each in found.items()},
    }
