"""Notice a weight that is read past its sparse layer, such as by a decoder tied by hand.

``F.linear(h, layer.weight.t())`` multiplies by the stored weight, which is dense: training and the
densified model then compute different functions, and no forward of the layer shows it. Gradients
do: in the first step, that of the weight is compared with what the layer itself gave.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparsepretrain.sparsity.engine.attachments import some_values


class OutsideReads:
    """Gradients of one weight during the first step; about 16 values of each are kept.

    Args:
        weight: leaf that requires a gradient.
    """

    def __init__(self, weight: Tensor) -> None:
        self._values = some_values(weight)
        self._given: Tensor | None = None  # by the layer, in the present backward
        self.found: Tensor | None = None
        """0-d bool: something else gave a gradient; None: no backward has run."""
        self._handle = weight.register_hook(self._compare)

    def through(self, weight: Tensor) -> Tensor:
        """Return the weight for one forward of the layer, whose gradient is then known."""
        alias = weight.view_as(weight)
        alias.register_hook(self._add)
        return alias

    def close(self) -> None:
        """End the watch."""
        self._handle.remove()

    def _add(self, grad: Tensor) -> None:
        values = some_values(grad)
        self._given = values if self._given is None else self._given + values

    def _compare(self, grad: Tensor) -> None:
        """Look at the gradient of one backward; nothing waits for the device here."""
        total = some_values(grad)
        given, self._given = self._given, None
        rest = total if given is None else total - given
        limit = torch.finfo(total.dtype).eps * 64 * total.abs().max()
        outside = rest.abs() > limit
        # penalties (L1, L2, group lasso) pull every weight towards zero, and read nothing wrong
        shrinks = (rest * self._values.to(rest) >= 0) | ~outside
        found = outside.any() & ~shrinks.all()
        self.found = found if self.found is None else self.found | found
