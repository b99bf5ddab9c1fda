"""Muon (Jordan et al., 2024) of PyTorch for the matrices of blocks, AdamW for all other tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from sparsepretrain.errors import ConfigError
from sparsepretrain.registry import register


@dataclass(slots=True, kw_only=True)
class MuonOptions:
    """Options of torch.optim.Muon and torch.optim.AdamW."""

    name: Literal["muon"]
    lr: Annotated[float, "> 0"]
    """Peak learning rate of Muon."""
    momentum: Annotated[float, "[0, 1)"]
    nesterov: bool
    ns_steps: Annotated[int, "> 0"]
    """Newton–Schulz iterations, each with the coefficients 3.4445, -4.7750, 2.0315."""
    adjust_lr_fn: Literal["match_rms_adamw", "original"]
    """Factor of the learning rate of an (a, b) matrix: 0.2·√max(a, b), with which updates have the
    RMS of AdamW's (arXiv:2502.16982), or √max(1, a/b)."""
    weight_decay: Annotated[float, "≥ 0"]
    """Decoupled, of both optimizers."""
    adamw_lr: Annotated[float, "> 0"]
    """Peak learning rate of AdamW, which follows the same schedule."""
    betas: Annotated[tuple[float, float], "[0, 1)"]
    eps: Annotated[float, "> 0"]


@register("optimizer", "muon")
class Muon:
    """torch.optim.Muon and torch.optim.AdamW."""

    Options = MuonOptions
    separates_matrices = True

    @staticmethod
    def build(groups: list[dict[str, Any]], options: MuonOptions) -> Optimizer:
        """Build the optimizer over parameter groups; Muon updates those with ``matrices``."""
        muon = {
            key: getattr(options, key)
            for key in ("lr", "momentum", "nesterov", "ns_steps", "adjust_lr_fn")
        }
        adamw = {"lr": options.adamw_lr, "betas": options.betas, "eps": options.eps, "fused": True}
        return MuonAdamW(groups, muon, adamw)


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
