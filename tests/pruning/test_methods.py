"""Pruning methods against oracles in NumPy fp64, written from the papers."""

import numpy as np
import pytest
import torch

from sparsepretrain import registry
from sparsepretrain.errors import ConfigError
from sparsepretrain.pruning import InputSums

PATTERNS = [(2, 4), (1, 4), (4, 8), (1, 2), (6, 8)]
OUT, IN = 24, 48


def data(seed=0, tokens=200):
    """A weight and inputs whose channels are correlated and of different size."""
    rng = np.random.default_rng(seed)
    mix = rng.normal(size=(IN, IN)) * np.exp(rng.normal(size=IN))
    return rng.normal(size=(OUT, IN)), rng.normal(size=(tokens, IN)) @ mix


def prune(method, weight, inputs, n, m, dtype=torch.float64, **options):
    cls = registry.get("pruning", method)
    sums = None
    if cls.reads != "nothing":
        sums = InputSums(IN, torch.device("cpu"), moments=cls.reads == "moments")
        for part in np.array_split(inputs, 3):  # sums do not depend on the batches
            sums.add(torch.tensor(part, dtype=dtype)[None])
    rule = cls(cls.Options(**options), n, m)
    pruned = rule.prune(torch.tensor(weight, dtype=dtype), sums)
    return pruned.weight.numpy(), pruned.mask.numpy()


def largest(score, n, m):
    """Mask of the n largest scores of every m, by sorting."""
    groups = score.reshape(len(score), -1, m)
    ranks = groups.argsort(-1).argsort(-1)
    return (ranks >= m - n).reshape(score.shape)


def magnitude(weight, inputs):
    return np.abs(weight)


def wanda(weight, inputs):
    return np.abs(weight) * np.sqrt((inputs**2).sum(0))


def ria(weight, inputs):
    size = np.abs(weight)
    relative = size / size.sum(0)[None, :] + size / size.sum(1)[:, None]
    return relative * np.sqrt((inputs**2).sum(0)) ** 0.5


@pytest.mark.parametrize("n, m", PATTERNS)
@pytest.mark.parametrize("score", [magnitude, wanda, ria])
def test_masks_keep_the_largest_published_scores(score, n, m):
    weight, inputs = data()
    pruned, mask = prune(score.__name__, weight, inputs, n, m)
    expected = largest(score(weight, inputs), n, m)
    assert (mask == expected).all()
    assert (pruned == np.where(expected, weight, 0.0)).all()
    assert not np.signbit(pruned[~expected]).any()


def surgeon(weight, inputs, n, m, damping=0.01):
    """SparseGPT without a Cholesky factor: explicit inverses of the remaining Hessian.

    Removing weight q of a row changes the others by -w_q / [H⁻¹]_qq · H⁻¹_:q (Hassibi and Stork),
    where H is that of the columns from q on.
    """
    weight = weight.copy()
    hessian = inputs.T @ inputs
    unused = np.diag(hessian) == 0
    hessian[unused, unused] = 1.0
    weight[:, unused] = 0.0
    hessian += damping * np.diag(hessian).mean() * np.eye(len(hessian))
    inverses = [np.linalg.inv(hessian[j:, j:]) for j in range(len(hessian))]
    mask = np.zeros(weight.shape, bool)
    for j, inverse in enumerate(inverses):
        if j % m == 0:
            costs = np.array([inverses[k][0, 0] for k in range(j, j + m)])
            mask[:, j : j + m] = largest(weight[:, j : j + m] ** 2 / costs, n, m)
        dropped = np.where(mask[:, j], 0.0, weight[:, j])
        weight[:, j:] -= np.outer(dropped / inverse[0, 0], inverse[0])
    return np.where(mask, weight, 0.0), mask


@pytest.mark.parametrize("block", [128, 16, 1])
@pytest.mark.parametrize("n, m", PATTERNS)
def test_sparsegpt_removes_weights_as_an_optimal_brain_surgeon(n, m, block):
    weight, inputs = data()
    pruned, mask = prune("sparsegpt", weight, inputs, n, m, block=block)
    expected, kept = surgeon(weight, inputs, n, m)
    assert (mask == kept).all()
    assert np.abs(pruned - expected).max() < 1e-9
    assert (pruned[~mask] == 0).all() and not np.signbit(pruned[~mask]).any()


def test_sparsegpt_in_fp32_has_the_masks_of_fp64():
    weight, inputs = data()
    weight, inputs = weight.astype(np.float32), inputs.astype(np.float32)
    pruned, mask = prune("sparsegpt", weight, inputs, 2, 4, torch.float32)
    expected, kept = surgeon(weight.astype(np.float64), inputs.astype(np.float64), 2, 4)
    assert (mask == kept).all()
    assert np.abs(pruned - expected).max() < 1e-4


@pytest.mark.parametrize("n, m", PATTERNS)
def test_sparsegpt_has_the_smallest_error_of_the_outputs(n, m):
    weight, inputs = data()
    outputs = inputs @ weight.T
    errors = {}
    for method in ("magnitude", "wanda", "sparsegpt"):
        pruned, _ = prune(method, weight, inputs, n, m)
        errors[method] = np.linalg.norm(outputs - inputs @ pruned.T)
    assert errors["sparsegpt"] < errors["wanda"] < errors["magnitude"]


@pytest.mark.parametrize("method", ["wanda", "ria", "sparsegpt"])
def test_channels_without_inputs_are_dropped_first(method):
    weight, inputs = data()
    inputs[:, 8:10] = 0.0
    pruned, mask = prune(method, weight, inputs, 2, 4)
    assert not pruned[:, 8:10].any() and mask[:, 10:12].all()
    if method == "sparsegpt":
        expected, _ = surgeon(weight, inputs, 2, 4)
        assert np.abs(pruned - expected).max() < 1e-9


def test_fewer_tokens_than_channels_are_damped():
    weight, inputs = data(tokens=7)
    pruned, mask = prune("sparsegpt", weight, inputs, 2, 4)
    expected, kept = surgeon(weight, inputs, 2, 4)
    assert (mask == kept).all()
    assert np.abs(pruned - expected).max() < 1e-6


@pytest.mark.parametrize("method", registry.names("pruning"))
def test_every_method_has_a_summary_and_a_source(method):
    cls = registry.get("pruning", method)
    assert cls.summary and cls.paper and cls.__doc__


def test_unknown_methods_are_refused_with_a_suggestion():
    with pytest.raises(ConfigError, match="wanda"):
        registry.get("pruning", "wand")
