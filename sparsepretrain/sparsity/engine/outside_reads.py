"""Notice a weight that is read past its sparse layer, such as by a decoder tied by hand.

``F.linear(h, layer.weight.t())`` multiplies by the stored weight, which is dense: training and the
densified model then compute different functions, and no forward of the layer shows it. Gradients
do: in the first step, that of the weight is compared with the one of the layer's own forwards.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparsepretrain.sparsity.engine.attachments import some_values


class OutsideReads:
    """Gradients of one weight during the first step; about 16 values of each are kept.

    Args:
        weight: leaf that requires a gradient, without hooks, which would change it.
    """

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight
        self.found: Tensor | None = None
        """0-d bool: something else contributed to a gradient; None: no backward has shown it."""
        self._values = some_values(weight)
        self._own: Tensor | None = None  # contribution of the layer to the present backward
        self._handle = weight.register_hook(self._compare)

    def through(self) -> Tensor:
        """Return the weight for one forward of the layer, whose contribution is then known."""
        alias = self.weight.view_as(self.weight)
        alias.register_hook(self._add)
        return alias

    def close(self) -> None:
        """End the watch."""
        self._handle.remove()

    def _add(self, grad: Tensor) -> None:
        values = some_values(grad)
        self._own = values if self._own is None else self._own + values

    def _compare(self, grad: Tensor) -> None:
        """Look at the gradient of one backward; nothing waits for the device here."""
        own, self._own = self._own, None
        if own is None:  # of forwards that were not watched: compiled, captured, another weight
            return
        total = some_values(grad)
        difference = total - own
        limit = torch.finfo(total.dtype).eps * 64 * total.abs().max()
        is_other = difference.abs() > limit
        # penalties (L1, L2, group lasso) pull every weight towards zero, and read nothing wrong
        shrinks = (difference * self._values.to(difference) >= 0) | ~is_other
        found = is_other.any() & ~shrinks.all()
        self.found = found if self.found is None else self.found | found
