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

    def initial_state(self, weight, layer):
        shape = [1] * weight.dim()
        shape[1 - layer.dim] = weight.shape[1 - layer.dim]
        return {"scale": Parameter(weight.new_ones(shape))}

    def project(self, weight, layer):
        mask = nm_mask(weight, *self.pattern, dim=layer.dim)
        return Projection(weight.masked_fill(~mask, 0) * layer.scale, mask)
