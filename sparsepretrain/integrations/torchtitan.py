"""Sparse models in torchtitan's Trainer (tested with torchtitan 0.3)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import nn
from torchtitan.protocols.model_spec import ModelSpec

from sparsepretrain.errors import ConfigError
from sparsepretrain.integrations._attaching import reattach
from sparsepretrain.sparsity import sparsifier_of, sparsify
from sparsepretrain.sparsity.engine.weights import SparseWeight


def sparse_spec(
    spec: ModelSpec,
    method: str,
    *,
    targets: str | Sequence[str],
    exclude: str | Sequence[str] = (),
    **options: Any,
) -> ModelSpec:
    """Return a ModelSpec whose models train sparse.

        config.model_spec = sparse_spec(model_registry("8B"), "sste", targets=["*.feed_forward.*"])

    Layers become sparse before the model is parallelized, on the meta device. The optimizers are
    attached after they are built; scales and masks are computed from the initialized weights. The
    checkpoints have the state of the method. ``last_save_in_hf`` writes the weights of evaluation,
    and ``sparsifier_of(part).metrics()`` of each of ``trainer.model_parts`` measures.

    Args:
        spec: of torchtitan.
        method, targets, exclude, options: see :func:`sparsepretrain.sparsify`; ``total_steps`` is
            ``training.steps`` unless given.

    Raises:
        ConfigError: (when the Trainer is built) see :func:`sparsepretrain.sparsify`, or tensor
            parallelism is on.
    """
    parts: list[nn.Module] = []

    def parallelize(model: nn.Module, *, parallel_dims: Any, training: Any, **rest: Any) -> Any:
        if parallel_dims.tp_enabled:
            raise ConfigError("tensor parallelism does not go with sparse layers: use FSDP")
        own = {"total_steps": training.steps, **options}
        sparsify(model, method, targets=targets, exclude=exclude, **own).prepare_sharding()
        return spec.parallelize_fn(model, parallel_dims=parallel_dims, training=training, **rest)

    def build_optimizers(optimizers: Any, model_parts: list[nn.Module], dims: Any) -> None:
        parts[:] = [part for part in model_parts if _is_sparse(part)]  # a seed checkpoint is dense
        for part in parts:
            sparsifier = sparsifier_of(part)
            reattach(sparsifier, optimizers)
            sparsifier.reset()
        if spec.post_optimizer_build_fn is not None:
            spec.post_optimizer_build_fn(optimizers, model_parts, dims)

    adapter: Any = spec.state_dict_adapter
    if adapter is not None:

        class SparseAdapter(adapter):
            """Converts the weights of evaluation."""

            def to_hf(self, state_dict: dict[str, Any]) -> dict[str, Any]:
                dense = dict(state_dict)
                for part in parts:
                    given = {key: dense.pop(key, None) for key in part.state_dict()}
                    for key, value in sparsifier_of(part).dense_tensors(full=False):
                        like = given[key]  # in the dtype of the export
                        dense[key] = value if like is None else value.to(like.dtype)
                converted: dict[str, Any] = super().to_hf(dense)
                return converted

        adapter = SparseAdapter
    return replace(
        spec,
        parallelize_fn=parallelize,
        post_optimizer_build_fn=build_optimizers,
        state_dict_adapter=adapter,
    )


def _is_sparse(model: nn.Module) -> bool:
    return any(isinstance(module, SparseWeight) for module in model.modules())
