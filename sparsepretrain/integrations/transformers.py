"""The Trainer of transformers, and Trainers built on it, such as those of TRL."""

from __future__ import annotations

import hashlib
import warnings
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from sparsepretrain.errors import ConfigError, SparsePretrainWarning
from sparsepretrain.export.library import save_pretrained
from sparsepretrain.integrations._attaching import reattach
from sparsepretrain.sparsity import sparsifier_of

STATE = "sparsity.safetensors"
"""Counters, masks and scales, in a checkpoint that holds nothing but adapters of peft."""


class SparsityCallback(TrainerCallback):
    """Attach, report and save the sparse model that a Trainer trains.

        sparsifier = sp.sparsify(model, "sste", targets=["*.mlp.*"])
        trainer = Trainer(model, arguments, train_dataset=data)
        SparsityCallback().add_to(trainer)
        trainer.train()

    It attaches to the optimizer when training starts, also when it starts again. Its metrics are
    in the Trainer's logs under ``sparsity/``. Beside the files of a checkpoint, from which training
    resumes, it writes the model with the weights of evaluation: ``checkpoint-N/sparse``.

    A Trainer saves only the adapters of a peft model. Counters and masks are then written beside
    them, and read again when training resumes.

    Args:
        save: write ``checkpoint-N/sparse``; it takes as much space as the weights. False for models
            with adapters, which have no sparse weights of their own before they are merged.
    """

    def __init__(self, *, save: bool = True) -> None:
        self.save = save
        self._is_first = False  # of the callbacks, before those that report

    def add_to(self, trainer: Trainer) -> SparsityCallback:
        """Become the first callback of ``trainer``: reporters then see the metrics."""
        callbacks = trainer.callback_handler.callbacks
        callbacks[:] = [self, *(each for each in callbacks if each is not self)]
        self._is_first = True
        return self

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        *,
        model: Any = None,
        optimizer: Any = None,
        **kwargs: Any,
    ) -> None:
        """Attach to the optimizer, which the Trainer has just made, or kept.

        Raises:
            ConfigError: the model is not sparse, or the optimizer lacks a sparse weight. Of a model
                with adapters also: ``save`` is true, or the checkpoint to resume from has no
                :data:`STATE`, or that of another run.
        """
        if not self._is_first:
            warnings.warn(
                "SparsityCallback comes after the callbacks that report, which miss its metrics: "
                "use SparsityCallback().add_to(trainer) instead of callbacks=[…]",
                SparsePretrainWarning,
                stacklevel=2,
            )
        sparsifier = sparsifier_of(model)
        if _has_adapters(model):
            if self.save:
                raise ConfigError(
                    "a model with adapters of peft is sparse after merge_and_unload only: use "
                    "SparsityCallback(save=False), and save the merged model after training"
                )
            if state.global_step:
                _read(model, Path(args.output_dir or ".", f"checkpoint-{state.global_step}"))
        reattach(sparsifier, optimizer)
        planned = sparsifier.method.schedule.total_steps
        if planned is not None and planned != state.max_steps:
            warnings.warn(
                f"sparsify was given total_steps={planned}, and the Trainer takes "
                f"{state.max_steps} steps: phases of the method are fractions of total_steps",
                SparsePretrainWarning,
                stacklevel=2,
            )

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        *,
        model: Any = None,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Add the metrics to a line of training; all processes do, as sharded models need it."""
        if logs is None or "loss" not in logs:
            return
        metrics = {f"sparsity/{k}": v for k, v in sparsifier_of(model).metrics().items()}
        logs.update(metrics)
        state.log_history[-1].update(metrics)  # a copy of the line, made before

    def on_save(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        *,
        model: Any = None,
        processing_class: Any = None,
        **kwargs: Any,
    ) -> None:
        """Write the sparse model beside the checkpoint, or what one with adapters lacks."""
        checkpoint = Path(args.output_dir or ".", f"checkpoint-{state.global_step}")
        if _has_adapters(model):
            tensors = sparsifier_of(model).method_tensors_of(model)
            if args.should_save:
                contiguous = {key: tensor.contiguous() for key, tensor in tensors.items()}
                save_file(contiguous, checkpoint / STATE, {"adapters": _digest(model)})
            return
        if not self.save or not hasattr(model, "save_pretrained"):
            return
        directory = checkpoint / "sparse"
        save_pretrained(model, directory, is_main_process=args.should_save)
        if processing_class is not None and args.should_save:
            processing_class.save_pretrained(directory)


def _has_adapters(model: Any) -> bool:
    """Return True if a Trainer saves the adapters of the model and nothing else."""
    return bool(getattr(model, "peft_config", None))


def _read(model: Any, checkpoint: Path) -> None:
    """Read what :meth:`SparsityCallback.on_save` has written of a model with adapters."""
    file = checkpoint / STATE
    if not file.is_file():
        raise ConfigError(
            f"{file} does not exist: {checkpoint.name} holds adapters alone, and training would go "
            "on without the masks and the step of the method; resume from output_dir, where "
            "SparsityCallback wrote it"
        )
    tensors = load_file(file)
    expected = sparsifier_of(model).method_tensors_of(model)
    if tensors.keys() != expected.keys():
        other = sorted(tensors.keys() ^ expected.keys())[0]
        raise ConfigError(f"{file} is of a model with other sparse layers: {other} is in one only")
    with safe_open(file, "pt") as opened:
        saved = (opened.metadata() or {}).get("adapters")
    if saved != _digest(model):
        raise ConfigError(
            f"{file} belongs to other adapters than those that training resumes from: resume from "
            f"{checkpoint}, or give the Trainer the output_dir of that run"
        )
    model.load_state_dict(tensors, strict=False)


def _digest(model: Any) -> str:
    """Return a hash of the trained parameters, which tells one checkpoint from another."""
    hashed = hashlib.sha256()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and ".sparsity." not in name:
            values = parameter.detach().contiguous().cpu()
            hashed.update(name.encode() + values.view(-1).view(torch.uint8).numpy().tobytes())
    return hashed.hexdigest()
