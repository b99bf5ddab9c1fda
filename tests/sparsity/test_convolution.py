"""Convolutions: published vectors, sampling of positions, refusals, the report."""

import copy
import pickle
from itertools import pairwise

import pytest
import torch
from golden_vectors import load
from sparse_cases import draw
from torch import nn

import sparsepretrain as sp
from sparsepretrain import kernels
from sparsepretrain.errors import ConfigError
from sparsepretrain.sparsity.layer_classes import sparse_class
from sparsepretrain.sparsity.layers import SparseLayer
from sparsepretrain.sparsity.sparsifier import prove


def conv(*arguments, **options):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Conv2d(*arguments, **options))


def test_masks_equal_the_published_ones():
    g = load("hard_masks")
    out, inputs, *kernel = g["conv_w"].shape
    model = conv(inputs, out, kernel, bias=False)
    model[0].weight.data.copy_(g["conv_w"])
    sparsifier = sp.sparsify(model, "srste", targets="0")
    assert torch.equal(sparsifier.masks()["0"], g["conv_mask"].bool())
    x = draw(2, inputs, 5, 5, dtype=torch.float32)
    dense = nn.functional.conv2d(x, g["conv_w"] * g["conv_mask"])
    torch.testing.assert_close(model(x), dense)


@pytest.mark.parametrize(("variant", "name"), [("magnitude", "max"), ("rescaled", "maxnorm")])
def test_published_gradient_pruning(variant, name):
    """A 1×1 convolution with the unit matrix as weight returns P(G) itself."""
    g = load("sdgp")
    channels = g["conv_gy"].shape[1]
    model = conv(channels, channels, 1, bias=False)
    model[0].weight.data.copy_(torch.eye(channels)[..., None, None])
    sp.sparsify(model, "sdgp", targets="0", variant=variant, epsilon=1e-4)
    x = torch.zeros_like(g["conv_gy"], requires_grad=True)
    model(x).backward(g["conv_gy"])
    torch.testing.assert_close(x.grad, g[f"conv_{name}_2_4"], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("estimator", ["approximate", "exact"])
def test_sampled_weight_gradient_is_unbiased(estimator):
    model = conv(4, 3, 3, stride=2, padding=1, dtype=torch.float64)
    sparsifier = sp.sparsify(model, "sste", targets="0", seed=5, estimator=estimator)
    x, gy = draw(2, 4, 9, 5, seed=1), draw(2, 3, 5, 3, seed=2)  # 15 positions: padded to 16
    layer, draws = model[0], 800
    exact = nn.grad.conv2d_weight(x, layer.weight.shape, gy, stride=2, padding=1)
    total, square = torch.zeros_like(exact), torch.zeros_like(exact)
    for step in range(draws):
        sparsifier._state.set_step(step)
        layer.weight.grad = None
        model(x).backward(gy)
        total += layer.weight.grad
        square += layer.weight.grad**2
    mean = total / draws
    spread = (square / draws - mean**2).sqrt()
    assert (spread > 0).all(), "nothing was sampled"
    assert ((mean - exact).abs() < 5 * spread / draws**0.5).all()
    torch.testing.assert_close(layer.bias.grad / draws, gy.sum((0, 2, 3)))


def test_groups_of_positions_do_not_straddle_images():
    """One image with a gradient: no other image's positions change what is drawn for it."""
    model = conv(4, 4, 1, bias=False, dtype=torch.float64)
    sp.sparsify(model, "sste", targets="0")
    x, gy = draw(3, 4, 3, 3, seed=1), draw(3, 4, 3, 3, seed=2)
    seen = []
    for others in (0.0, 1.0):
        x[[0, 2]], gy[[0, 2]] = 0.0, others
        model[0].weight.grad = None
        model[0].sparsity.model.set_step(0)
        model(x).backward(gy)
        seen.append(model[0].weight.grad)
    assert torch.equal(*seen)


def test_masks_are_transposable_at_every_kernel_position():
    model = conv(8, 12, (2, 3))
    sparsifier = sp.sparsify(model, "tsrste", targets="0", dense_tail=0.0)
    mask = sparsifier.masks()["0"]
    for row in range(2):
        for column in range(3):
            own = mask[:, :, row, column]
            expected = kernels.transposable_mask(model[0].weight[:, :, row, column])
            assert torch.equal(own, expected)
            assert (own.view(3, 4, 8).sum(1) == 2).all() and (own.view(12, 2, 4).sum(2) == 2).all()


def test_bimask_permutes_output_channels():
    model = conv(8, 16, 2)
    sp.sparsify(model, "bimask", targets="0")
    layer = model[0]
    permutation = layer.sparsity.permutation
    assert permutation.shape == (16,) and not torch.equal(permutation, torch.arange(16))
    backward = layer.sparsity.project(layer.weight).backward
    assert ((backward[permutation] != 0).view(4, 4, 8, 2, 2).sum(1) <= 2).all()


def chain(*widths, **options):
    return nn.Sequential(*[nn.Conv2d(i, o, 1, **options) for i, o in pairwise(widths)])


class OwnForward(nn.Conv2d):
    def forward(self, x):
        return super().forward(x) + 1


class OwnConvolution(nn.Conv2d):
    def _conv_forward(self, input, weight, bias):
        return super()._conv_forward(input, weight * 2, bias)


class Named(nn.Conv2d):
    """A subclass that keeps the forward."""


OWN = "layer '0' .{}. has a forward of its own"
REFUSALS = {
    "stem": (chain(3, 8), "ste", "layer '0': in_channels = 3 "),
    "depthwise": (chain(8, 8, groups=8), "ste", "in_channels / groups = 1 "),
    "outputs": (chain(8, 6), "tsrste", "out_channels = 6 "),
    "group": (chain(8, 8, groups=4), "sdgp", "out_channels / groups = 2 "),
    "mixing": (chain(8, 8, groups=2), "bimask", "bimask"),
    "own forward": (nn.Sequential(OwnForward(8, 8, 1)), "ste", OWN.format("OwnForward")),
    "own products": (nn.Sequential(OwnConvolution(8, 8, 1)), "ste", OWN.format("OwnConvolution")),
    "lazy": (nn.Sequential(nn.LazyConv2d(8, 1)), "ste", "layer '0' has no shape yet"),
    "bare": (nn.Conv2d(8, 8, 1), "ste", "the model is a bare layer"),
    "1-d": (nn.Sequential(nn.Conv1d(8, 8, 1)), "ste", "of Conv1d, which cannot be sparse"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_unsupported_convolutions_are_refused(case):
    model, method, words = REFUSALS[case]
    model = copy.deepcopy(model)
    with pytest.raises(ConfigError, match=words) as caught:
        sp.sparsify(model, method, targets="*", total_steps=10)
    assert all("\n" not in message for message in caught.value.messages)
    assert not any(isinstance(m, SparseLayer) for m in model.modules())


def test_layers_of_equal_width_share_a_message():
    with pytest.raises(ConfigError) as caught:
        sp.sparsify(chain(6, 6, 10, 6, 6, 6, 6), "ste", targets="*")
    one, several = sorted(caught.value.messages)
    assert "layer '2': in_channels = 10" in one
    assert "layers '0', '1', '3' and 2 more: in_channels = 6" in several


def test_subclasses_and_pickles():
    model = nn.Sequential(Named(4, 8, 3), nn.Conv2d(8, 8, 1))
    sp.sparsify(model, "sste", targets="*")
    x = torch.ones(1, 4, 4, 4)
    assert type(model[1]) is sparse_class(nn.Conv2d) and isinstance(model[0], Named)
    assert "sste 2:4" in repr(model[0])
    copied = pickle.loads(pickle.dumps(model))
    assert type(copied[0]) is type(model[0]) and torch.equal(copied(x), model(x))
    sp.densify(model)
    assert type(model[0]) is Named and torch.equal(copied.eval()(x), model(x))


@pytest.mark.parametrize("method", ["sste", "sdgp"])
def test_empty_batch_has_zero_gradients(method):
    model = conv(4, 8, 3)
    sp.sparsify(model, method, targets="0")
    x = torch.ones(0, 4, 5, 5, requires_grad=True)
    y = model(x)
    y.sum().backward()
    assert y.shape == (0, 8, 3, 3) and x.grad.shape == x.shape
    assert not model[0].weight.grad.any() and not model[0].bias.grad.any()


def test_coverage_and_proof(monkeypatch):
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.Conv2d(8, 16, (3, 5), groups=2), nn.Conv2d(16, 4, 1)
    )
    sparsifier = sp.sparsify(model, "srste", targets=["1", "2"], n=1)
    coverage = sparsifier.coverage()
    assert coverage.sparse_parameters == 16 * 4 * 15 + 64 and coverage.dense_linears == ["0"]
    table = str(coverage)
    assert "16 × 4 × 3 × 5" in table and "4 × 16 × 1 × 1" in table
    proof = prove(sparsifier)
    assert proof.holds and proof.groups == (16 * 4 * 15 + 64) // 4
    # what the proof would find if the projection were wrong
    wrong = sparsifier.layers["1"].sparsity.project(model[1].weight)
    wrong.forward[0, :, 0, 0] = 1.0
    monkeypatch.setattr(sparsifier.layers["1"].sparsity, "project", lambda weight: wrong)
    assert prove(sparsifier).violations == ("1",)
