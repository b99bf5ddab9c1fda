"""The Trainer of transformers, and Trainers built on it, such as those of TRL."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from sparsepretrain.errors import SparsePretrainWarning
from sparsepretrain.export.library import save_pretrained
from sparsepretrain.integrations._attaching import reattach
from sparsepretrain.sparsity import sparsifier_of


class SparsityCallback(TrainerCallback):
    """Attach, report and save the sparse model that a Trainer trains.

        sparsifier = sp.sparsify(model, "sste", targets=["*.mlp.*"])
        trainer = Trainer(model, arguments, train_dataset=data)
        SparsityCallback().add_to(trainer)
        trainer.train()

    It attaches to the optimizer when training starts, also when it starts again. Its metrics are
    in the Trainer's logs under ``sparsity/``. Beside the files of a checkpoint, from which training
    resumes, it writes the model with the weights of evaluation: ``checkpoint-N/sparse``.

    Args:
        save: write ``checkpoint-N/sparse``; it takes as much space as the weights.
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
            ConfigError: the model is not sparse, or the optimizer lacks a sparse weight.
        """
        if not self._is_first:
            warnings.warn(
                "SparsityCallback comes after the callbacks that report, which miss its metrics: "
                "use SparsityCallback().add_to(trainer) instead of callbacks=[…]",
                SparsePretrainWarning,
                stacklevel=2,
            )
        sparsifier = sparsifier_of(model)
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
        """Write the sparse model beside the checkpoint."""
        if not self.save or not hasattr(model, "save_pretrained"):
            return
        directory = Path(args.output_dir or ".", f"checkpoint-{state.global_step}", "sparse")
        save_pretrained(model, directory, is_main_process=args.should_save)
        if processing_class is not None and args.should_save:
            processing_class.save_pretrained(directory)
