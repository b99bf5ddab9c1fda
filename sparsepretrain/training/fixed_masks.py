"""Fixed first masks of a run: ``init.mask``."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from sparsepretrain import registry
from sparsepretrain.config.schema import Run
from sparsepretrain.console import Console
from sparsepretrain.errors import CheckpointError, ConfigError
from sparsepretrain.pruning.mask_files import masks_file, read_masks
from sparsepretrain.pruning.methods.wanda import Wanda
from sparsepretrain.pruning.walk import Calibration, prune_model
from sparsepretrain.sparsity import Sparsifier
from sparsepretrain.sparsity.engine.banks import SparseBank
from sparsepretrain.sparsity.engine.weights import SparseWeight
from sparsepretrain.sparsity.patterns import Pattern
from sparsepretrain.tasks import Task, build_task

RULES = ("magnitude", "zeros", "wanda")
"""Values of ``init.mask`` that are not paths."""
SEQUENCES = 128
"""Sequences of calibration text, as in the papers of SparseGPT, Wanda and RIA."""
TOKENS_AT_ONCE = 8192
"""Maximum tokens of one forward of the calibration, whose logits are in memory."""


def packed(run: Run) -> Run:
    """Return a run whose samples are windows of packed text: padding is no calibration text."""
    if getattr(run.task, "documents", False):
        return dataclasses.replace(run, task=dataclasses.replace(run.task, documents=False))
    return run


def calibration_batches(
    task: Task, sequences: int, device: torch.device, *, split: str = "train"
) -> list[Tensor]:
    """Return the first ``sequences`` samples of an epoch, tokens (n, length) for each forward.

    Raises:
        ConfigError: the split has fewer.
    """
    available = task.samples(split)
    if available < sequences:
        raise ConfigError(
            f"{task.data_options.name} has {available:,} sequences of "
            f"{task.options.sequence_length} tokens in its {split} split, and calibration reads "
            f"{sequences}: give more text, or a shorter task.sequence_length"
        )
    tokens = task.batch(split, 0, range(sequences), sequences)["tokens"].to(device)
    return list(tokens.split(max(1, TOKENS_AT_ONCE // tokens.shape[1])))


def wanda_masks(
    run: Run, task: Task, model: nn.Module, patterns: Mapping[str, Pattern], console: Console
) -> dict[str, Tensor]:
    """Return masks of Wanda, calibrated on the first training samples; the model is unchanged.

    Args:
        run: has the calibration text.
        task: with opened data.
        model: dense, with the initial weights, on the device of training.
        patterns: name of a layer that will be sparse -> (N, M).
        console: shows progress.

    Raises:
        ConfigError: layers that Wanda does not prune.
    """
    device = next(model.parameters()).device
    if packed(run) is not run:
        task = build_task(packed(run))
        task.open_data(("train",), on_progress=console.progress)
    batches = calibration_batches(task, SEQUENCES, device)
    forward = functools.partial(task.recipe.logits, model)
    methods = {name: Wanda(Wanda.Options(), n, m) for name, (n, m) in patterns.items()}
    was_training = model.training
    model.eval()
    masks: dict[str, Tensor] = {}
    report = console.counter("blocks")
    calibration = Calibration(forward, batches)
    for stage in prune_model(
        model, list(patterns), methods, calibration, restore=True, progress=report
    ):
        masks |= stage.masks
    model.train(was_training)
    return masks


def require_rule(run: Run) -> None:
    """Refuse a value of ``init.mask`` that is neither a rule nor the path of masks.

    Raises:
        ConfigError: with the close rules.
    """
    mask = run.init.mask
    if mask not in RULES and not masks_file(mask).is_file():
        near = registry.suggestion(mask, RULES)
        text = f"={mask}: there is no such file, and no such rule{near}"
        raise ConfigError([("init.mask", text)])


def require_fixed_mask(run: Run, sparsifier: Sparsifier, *, sharded: bool) -> None:
    """Refuse a rule of ``init.mask`` that cannot be applied, before data is read.

    Raises:
        ConfigError: the method has no fixed mask; Wanda for another task or a sharded model.
    """
    rule = run.init.mask
    if rule == "magnitude":
        return
    problems = []
    try:
        sparsifier.require_fixed_masks()
    except ConfigError as error:
        problems += error.messages
    if rule == "wanda" and run.task.name != "causal_lm":
        problems.append(f"Wanda is for causal language models, not for task={run.task.name}")
    if rule == "wanda" and sharded:
        problems.append(
            "one rank would calibrate while the others wait: run prune first, and give its "
            "directory as init.mask"
        )
    banks = [n for n, layer in sparsifier.layers.items() if isinstance(layer, SparseBank)]
    if rule == "wanda" and banks:
        problems.append(f"Wanda has no scores for {banks[0]}, a bank: use zeros, or magnitude")
    if problems:
        raise ConfigError([("init.mask", f"={rule}: {text}") for text in problems])


def keep_fixed_masks(run: Run, sparsifier: Sparsifier, wanda: dict[str, Tensor]) -> None:
    """Apply ``init.mask`` to a sparse model with its initial weights.

    Raises:
        ConfigError: the method has no fixed mask, or groups keep more than N.
        CheckpointError: the file has no masks, or those of another model.
    """
    rule = run.init.mask
    if rule == "magnitude":
        return
    try:
        if rule == "zeros":
            sparsifier.keep_zeros()
            return
        found = wanda if rule == "wanda" else _of_file(rule, sparsifier)
        # files and calibration have (out_features, in_features), Conv1D stores the transposed
        masks = {
            name: found[name] if _is_as_stored(layer) else found[name].t()
            for name, layer in sparsifier.layers.items()
        }
        sparsifier.keep_masks(masks)
    except ConfigError as error:
        raise ConfigError([("init.mask", f"={rule}: {text}") for text in error.messages]) from error


def _is_as_stored(layer: SparseWeight) -> bool:
    """Return True if masks have the shape of the weight: those of Conv1D alone are transposed."""
    return layer.in_dim == 1 or isinstance(layer, SparseBank)


def _of_file(path: str, sparsifier: Sparsifier) -> dict[str, Tensor]:
    """Read the masks of the sparse layers; they must be those of this model."""
    masks = {}
    for name, mask in read_masks(path):
        layer = sparsifier.layers.get(name)
        if layer is None:
            continue
        expected = tuple(layer.weight.shape)[:: 1 if _is_as_stored(layer) else -1]
        if tuple(mask.shape) != expected:
            raise CheckpointError(
                f"init.mask={path} has masks of another model: {name} is {tuple(mask.shape)} "
                f"there, and {expected} here (out_features, in_features)"
            )
        masks[name] = mask
    missing = [name for name in sparsifier.layers if name not in masks]
    if missing:
        more = f" and {len(missing) - 1} more layers" if len(missing) > 1 else ""
        raise CheckpointError(
            f"init.mask={path} has no mask of {missing[0]}{more}: it belongs to another model, or "
            "other layers were pruned (sparsity.targets)"
        )
    return masks
