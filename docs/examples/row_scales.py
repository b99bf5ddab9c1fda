"""Trained scales: A = a∘(M∘W) with one factor a per output feature; autograd differentiates A."""

from torch.nn import Parameter

from sparsepretrain.kernels import nm_mask
from sparsepretrain.registry import register
from sparsepretrain.sparsity import Method, Operand, Projection, Row


@register("method", "row_scales")
class RowScales(Method):
    summary = "magnitude mask and a trained scale per output feature"
    differentiable = True

    @property
    def sparse_row(self):
        return Row(A=self.nm("a∘M∘W"), J=Operand("dA"))

    def initial_state(self, weight, state):
        shape = [1] * weight.dim()
        shape[1 - state.dim] = weight.shape[1 - state.dim]
        return {"scale": Parameter(weight.new_ones(shape))}

    def project(self, weight, state):
        mask = nm_mask(weight, *self.pattern, dim=state.dim)
        return Projection(weight.masked_fill(~mask, 0) * state.scale, mask)
