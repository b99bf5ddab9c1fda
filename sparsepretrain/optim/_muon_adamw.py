"""Muon and AdamW as one optimizer, which has the hooks and the state of both."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from sparsepretrain.errors import ConfigError


class MuonAdamW(Optimizer):
    """torch.optim.Muon for groups with ``matrices``, torch.optim.AdamW for all others.

    Groups of AdamW have ``lr_scale``, its learning rate relative to Muon's: a schedule sets
    ``group["lr"]`` to the rate of Muon times this factor.

    Args:
        groups: parameter groups; ``matrices`` marks those with 2-D parameters for Muon.
        muon, adamw: keyword arguments of the two optimizers.
    """

    def __init__(
        self, groups: list[dict[str, Any]], muon: dict[str, Any], adamw: dict[str, Any]
    ) -> None:
        matrices: list[dict[str, Any]] = []
        others: list[dict[str, Any]] = []
        for group in groups:
            (matrices if group.pop("matrices", False) else others).append(group)
        if not matrices:
            text = ": muon needs 2-D weights in blocks, this model has none; use optim=adamw"
            raise ConfigError([("optim", text)])
        self._parts: list[Optimizer] = [torch.optim.Muon(matrices, **muon)]
        if others:  # torch refuses an optimizer without parameters
            scale = adamw["lr"] / muon["lr"]
            scaled = [group | {"lr_scale": scale} for group in others]
            self._parts.append(torch.optim.AdamW(scaled, **adamw))
        super().__init__([group for part in self._parts for group in part.param_groups], {})
        self.defaults = {"lr_scale": 1.0}
        for part in self._parts:
            self.defaults |= part.defaults
        self._share()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._share()

    def _share(self) -> None:
        """Let both optimizers work on the groups and the state of this one."""
        groups = iter(self.param_groups)
        for part in self._parts:
            part.param_groups = [next(groups) for _ in part.param_groups]
            part.state = self.state

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Take a step of both optimizers; see :class:`torch.optim.Optimizer`."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self._parts:
            part.step()
        return loss


def block_matrices(model: nn.Module) -> set[Tensor]:
    """Return the 2-D weights of layers inside lists of modules, except embeddings."""
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList | nn.Sequential)]
    layers = {layer for one in lists for layer in one.modules()}
    weights = {
        layer._parameters.get("weight")
        for layer in layers
        if not isinstance(layer, nn.Embedding | nn.EmbeddingBag)
    }
    return {weight for weight in weights if weight is not None and weight.dim() == 2}
