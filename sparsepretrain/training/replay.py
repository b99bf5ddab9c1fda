"""Steps that are computed twice: a bit that hardware got wrong never reaches the weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sparsepretrain.errors import SparsePretrainError
from sparsepretrain.kernels.common import INTEGER_OF_SIZE

if TYPE_CHECKING:
    from sparsepretrain.training.session import Session

LOSS = "the loss"


def replayed(t: Session, compute: Callable[[], Tensor]) -> Tensor:
    """What ``compute`` returns; every ``replay_every`` steps it is called twice and compared.

    All draws follow from (seed, step, micro-batch), so the second call repeats the first one bit by
    bit. Processes need not compare gradients with each other, which would miss a bit that was wrong
    before the sum. Costs a forward and a backward of every micro-batch, and no copy of a gradient.

    Args:
        t: the session, whose gradients are gone.
        compute: leaves the gradients of the step in ``.grad`` and returns losses; (any,) fp64.

    Raises:
        SparsePretrainError: on every process, where a bit differs on any.
    """
    every = t.run.replay_every
    if not every or (t.step + 1) % every:
        return compute()
    # running statistics of BatchNorm; no forward changes what is sparse
    buffers = [b for name, b in t.model.named_buffers() if "sparsity" not in name]
    before = [buffer.clone() for buffer in buffers]
    first = _sums(t, compute())
    t.optimizer.zero_grad(set_to_none=True)
    with torch.no_grad():
        for buffer, old in zip(buffers, before, strict=True):
            buffer.copy_(old)
    losses = compute()
    second = _sums(t, losses)
    mine = [name for name in second if first.get(name) != second[name]]
    told = t.world.gather(mine)
    if any(told):
        names = list(dict.fromkeys(name for own in told for name in own))
        ranks = ", ".join(str(rank) for rank, own in enumerate(told) if own)
        where = f" on rank {ranks}" if t.world.size > 1 else ""
        others = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
        raise SparsePretrainError(
            f"step {t.step + 1}, computed twice: {names[0]}{others} differs{where}; nothing was "
            "updated. The hardware computes wrong: continue elsewhere; or a kernel is not "
            "deterministic: give deterministic=true, or replay_every=0"
        )
    return losses


@torch.no_grad()
def _sums(t: Session, losses: Tensor) -> dict[str, int]:
    """Name -> sum of its bits as integers modulo 2⁶⁴, which one wrong bit always changes."""
    tensors = {LOSS: losses}
    for name, parameter in t.model.named_parameters():
        if parameter.grad is not None:
            gradient = parameter.grad
            tensors[f"the gradient of {name}"] = getattr(gradient, "_local_tensor", gradient)
    sums = [x.view(INTEGER_OF_SIZE[x.itemsize]).sum(dtype=torch.int64) for x in tensors.values()]
    return dict(zip(tensors, torch.stack(sums).tolist(), strict=True))  # one wait for the device
