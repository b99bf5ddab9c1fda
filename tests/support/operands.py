"""Operands of a layer's matmuls, and their patterns."""

from torch import nn

from sparsepretrain.sparsity.operand_table import DGRAD, WGRAD, G, X


def packed(products):
    """Operands that are packed, such as ``AU``."""
    return "".join(sorted(product.packs for product in products))


def has_pattern(sparsifier):
    """Whether A(W) is N:M by now; where products train dense, evaluation uses A(W) already."""
    return sparsifier.sparse or not sparsifier.method.phase.training


def into_sparse_phase(sparsifier):
    """As after AutoSwitch."""
    sparsifier.method.scalars = dict.fromkeys(sparsifier.method.scalars, 0)
    sparsifier._state.write()


def at_most_n_of_m(tensor, n, m):
    """True if every group of ``m`` along the input channels has at most ``n`` non-zeros."""
    groups = tensor.movedim(1, -1).reshape(-1, m)
    return bool(((groups != 0).sum(1) <= n).all())


class OperandTable:
    """Operands that the row of a layer asks for, given ``x`` and an output gradient ``gy``."""

    def __init__(self, layer, x, gy):
        state, weight = layer.sparsity, layer.weight.detach()
        method = layer.operands.method
        row = method.phase.row
        projection = layer.operands.project(layer.weight)
        self.A = weight if projection.forward is None else projection.forward
        self.B = self.A if projection.backward is None else projection.backward
        self.scale = 1.0 if projection.wgrad_scale is None else projection.wgrad_scale
        self.P, self.U, self.Xf, self.Xw = gy, gy, x, x
        convolution = isinstance(layer, nn.Conv2d)
        tokens = gy.flatten(2).mT if convolution else gy

        def in_place(values):
            return values.mT.reshape(gy.shape) if convolution else values

        def by_samples(function, values, operand):
            """Pad each sample with zeros to whole groups of M tokens."""
            m = operand.pattern[1] if operand.axis == "tokens" else 4
            filled = nn.functional.pad(values, (0, 0, 0, -values.shape[-2] % m))
            rows = function(filled.reshape(-1, values.shape[-1])).view(filled.shape)
            return rows[..., : values.shape[-2], :]

        if row.P != G:
            self.P = in_place(method.dgrad_gradient(tokens, state.key(DGRAD)))
        if row.U != G:
            key = state.key(WGRAD)
            self.U = in_place(by_samples(lambda g: method.wgrad_gradient(g, key), tokens, row.U))
        if row.Xf != X:
            self.Xf = method.fprop_input(x)
        if row.Xw != X:
            self.Xw = by_samples(method.wgrad_input, x, row.Xw)
