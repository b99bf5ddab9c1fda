"""The Trainer of Lightning (``lightning`` or ``pytorch_lightning``)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
except ImportError:
    from pytorch_lightning import Callback, LightningModule, Trainer

from sparsepretrain.errors import ConfigError
from sparsepretrain.integrations._attaching import reattach
from sparsepretrain.sparsity import Sparsifier, sparsifier_of, sparsify
from sparsepretrain.sparsity.engine.weights import SparseWeight


class SparsityCallback(Callback):
    """Make layers of a LightningModule sparse, attach, and report to its loggers.

        trainer = Trainer(callbacks=[SparsityCallback("sste", targets=["net.*"])])
        trainer.fit(module, data)
        torch.save(sparsifier_of(module).dense_state_dict(), "sparse.pt")

    The layers become sparse before optimizers are made and checkpoints are loaded, unless the
    module is sparse already. Metrics reach the loggers every ``log_every_n_steps`` steps of the
    optimizer, under ``sparsity/``.

    Args:
        method, targets, exclude, options: see :func:`sparsepretrain.sparsify`.
    """

    def __init__(
        self,
        method: str,
        *,
        targets: str | Sequence[str],
        exclude: str | Sequence[str] = (),
        **options: Any,
    ) -> None:
        self.method = method
        self.options = {"targets": targets, "exclude": exclude, **options}
        self._logged = 0  # steps at the last report

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Make the layers sparse.

        Raises:
            ConfigError: see :func:`sparsepretrain.sparsify`.
        """
        if not any(isinstance(module, SparseWeight) for module in pl_module.modules()):
            sparsify(pl_module, self.method, **self.options)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Attach to the optimizers, which hold the state of a resumed run by now.

        Raises:
            ConfigError: a sparse weight is in none of them.
        """
        if not trainer.optimizers:
            raise ConfigError(
                "the LightningModule has no optimizer: return it in configure_optimizers"
            )
        reattach(sparsifier_of(pl_module), *trainer.optimizers)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Report the metrics; all processes do, as sharded models need it."""
        sparsifier: Sparsifier = sparsifier_of(pl_module)
        step = sparsifier.completed_steps
        every = trainer.log_every_n_steps
        if not (trainer.loggers and every) or step == self._logged or step % every:
            return
        self._logged = step
        metrics = {f"sparsity/{k}": v for k, v in sparsifier.metrics().items()}
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=trainer.global_step)
