"""Muon (Jordan et al., 2024) of PyTorch for the matrices of blocks, AdamW for all other tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from sparsepretrain.registry import register

if TYPE_CHECKING:
    from torch.optim import Optimizer


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
        from sparsepretrain.optim._muon_adamw import MuonAdamW

        muon = {
            key: getattr(options, key)
            for key in ("lr", "momentum", "nesterov", "ns_steps", "adjust_lr_fn")
        }
        adamw = {"lr": options.adamw_lr, "betas": options.betas, "eps": options.eps, "fused": True}
        return MuonAdamW(groups, muon, adamw)
