"""The Trainer of transformers, and Trainers built on it, such as those of TRL."""

from __future__ import annotations

import hashlib
import warnings
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import (
    PreTrainedModel,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

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

    A Trainer saves only the adapters of a peft model, and experts under the names they have on the
    hub, which it does not find when it resumes (transformers#48805). Counters and masks are then
    written beside the checkpoint, and all of it is read when training resumes from ``output_dir``.

    Args:
        save: write ``checkpoint-N/sparse``; it takes as much space as the weights. False for models
            with adapters, which have no sparse weights of their own before they are merged.
    """

    def __init__(self, *, save: bool = True) -> None:
        self.save = save
        self._is_first = False  # of the callbacks, before those that report
        self._model: Any = None
        self._loaded: set[str] = set()

    def add_to(self, trainer: Trainer) -> SparsityCallback:
        """Become the first callback of ``trainer``: reporters then see the metrics."""
        callbacks = trainer.callback_handler.callbacks
        callbacks[:] = [self, *(each for each in callbacks if each is not self)]
        self._is_first = True
        self._watch(trainer.model)
        return self

    def on_init_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        *,
        model: Any = None,
        **kwargs: Any,
    ) -> None:
        """Do what :meth:`add_to` does, for a callback that is an argument of its Trainer."""
        self._watch(model)

    def _watch(self, model: Any) -> None:
        """Note the names that the Trainer loads into ``model``."""

        def note(module: Any, state: dict[str, Any], prefix: str, *rest: Any) -> None:
            self._loaded |= {k.removeprefix(prefix) for k in state if k.startswith(prefix)}

        if isinstance(model, PreTrainedModel) and self._model is not model:
            model.register_load_state_dict_pre_hook(note)
            self._model = model

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
            ConfigError: the model is not sparse, or the optimizer lacks a sparse weight; the
                checkpoint to resume from needs :data:`STATE`, and has none, or that of another run;
                ``save`` is true, and the model has adapters; a trial of ``hyperparameter_search``
                saves checkpoints.
        """
        if not self._is_first:
            warnings.warn(
                "SparsityCallback comes after the callbacks that report, which miss its metrics: "
                "use SparsityCallback().add_to(trainer) instead of callbacks=[…]",
                SparsePretrainWarning,
                stacklevel=2,
            )
        if state.is_hyper_param_search and args.save_strategy != "no":
            raise ConfigError(
                "hyperparameter_search saves each trial elsewhere than SparsityCallback looks: use "
                "save_strategy='no', or a Trainer for each trial"
            )
        sparsifier = sparsifier_of(model)
        if _has_adapters(model) and self.save:
            raise ConfigError(
                "a model with adapters of peft is sparse after merge_and_unload only: use "
                "SparsityCallback(save=False), and save the merged model after training"
            )
        if state.global_step:
            self._restore(model, Path(args.output_dir or ".", f"checkpoint-{state.global_step}"))
        self._loaded.clear()
        reattach(sparsifier, optimizer)
        planned = sparsifier.method.schedule.total_steps
        if planned is not None and planned != state.max_steps:
            warnings.warn(
                f"sparsify was given total_steps={planned}, and the Trainer takes "
                f"{state.max_steps} steps: phases of the method are fractions of total_steps",
                SparsePretrainWarning,
                stacklevel=2,
            )

    def on_train_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        *,
        model: Any = None,
        **kwargs: Any,
    ) -> None:
        """Complete the best model, if the Trainer has just loaded it."""
        if self._loaded and state.best_model_checkpoint:
            self._restore(model, Path(state.best_model_checkpoint))
        self._loaded.clear()

    def _restore(self, model: Any, checkpoint: Path) -> None:
        """Read what the Trainer did not find in its own checkpoint."""
        if _has_adapters(model):
            _read(model, checkpoint)
        elif self._loaded and (lacking := _lacking(model, self._loaded)):
            _read_weights(model, checkpoint, lacking)
            _read(model, checkpoint)

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
        """Write the sparse model beside the checkpoint, and what the checkpoint lacks."""
        checkpoint = Path(args.output_dir or ".", f"checkpoint-{state.global_step}")
        adapters = _has_adapters(model)
        if args.should_save and (adapters or _is_incomplete(model, checkpoint)):
            tensors = sparsifier_of(model).method_tensors_of(model)
            contiguous = {key: tensor.contiguous() for key, tensor in tensors.items()}
            save_file(contiguous, checkpoint / STATE, {"weights": _digest(model)})
        if adapters or not self.save or not hasattr(model, "save_pretrained"):
            return
        directory = checkpoint / "sparse"
        save_pretrained(model, directory, is_main_process=args.should_save)
        if processing_class is not None and args.should_save:
            processing_class.save_pretrained(directory)


def _has_adapters(model: Any) -> bool:
    """Return True if a Trainer saves the adapters of the model and nothing else."""
    return bool(getattr(model, "peft_config", None))


def _lacking(model: Any, names: set[str]) -> set[str]:
    """Return the names of the model's state that ``names`` miss; tied weights need one name."""
    own = model.state_dict(keep_vars=True)
    present = {id(own[name]) for name in names & own.keys()}
    return {name for name, value in own.items() if id(value) not in present}


def _is_incomplete(model: Any, checkpoint: Path) -> bool:
    """Return True if whole weights were written, but not under all names of the model."""
    names: set[str] = set()
    for file in checkpoint.glob("model*.safetensors"):
        with safe_open(file, "pt") as opened:
            names |= set(opened.keys())
    return bool(names and _lacking(model, names))


def _read_weights(model: Any, checkpoint: Path, lacking: set[str]) -> None:
    """Let transformers convert the weights of a checkpoint, and copy those that are lacking."""
    own = {name: p for name, p in model.named_parameters() if name in lacking}
    if not own or not (checkpoint / STATE).is_file():  # reported by _read
        return
    dtype = next(iter(own.values())).dtype
    whole, info = type(model).from_pretrained(checkpoint, dtype=dtype, output_loading_info=True)
    found = whole.state_dict()
    with torch.no_grad():
        for name in own.keys() - set(info["missing_keys"]):
            own[name].copy_(found[name])


def _read(model: Any, checkpoint: Path) -> None:
    """Read what :meth:`SparsityCallback.on_save` has written into :data:`STATE`."""
    file = checkpoint / STATE
    if not file.is_file():
        raise ConfigError(
            f"{file} does not exist: a Trainer's checkpoint of this model lacks the masks and the "
            "step of the method, and training would go on without them; resume from output_dir, "
            "where SparsityCallback wrote it"
        )
    tensors = load_file(file)
    expected = sparsifier_of(model).method_tensors_of(model)
    if tensors.keys() != expected.keys():
        other = sorted(tensors.keys() ^ expected.keys())[0]
        raise ConfigError(f"{file} is of a model with other sparse layers: {other} is in one only")
    with safe_open(file, "pt") as opened:
        saved = (opened.metadata() or {}).get("weights")
    if saved != _digest(model):
        raise ConfigError(
            f"{file} belongs to other weights than those that training resumes from: resume from "
            f"{checkpoint}, or give the Trainer the output_dir of that run"
        )
    model.load_state_dict(tensors, strict=False)


def _digest(model: Any) -> str:
    """Return a hash of the trained Parameters, which tells one checkpoint from another."""
    hashed = hashlib.sha256()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and ".sparsity." not in name:
            values = parameter.detach().contiguous().cpu()
            hashed.update(name.encode() + values.view(-1).view(torch.uint8).numpy().tobytes())
    return hashed.hexdigest()
