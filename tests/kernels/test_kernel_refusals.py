"""Options and shapes that the kernels refuse, by the words of the message."""

import pytest
import torch

from sparsepretrain import kernels

PAIRS, RANDOM = torch.zeros(2, 2, 2), {"variant": "random"}
REFUSALS = [
    ("nm_mask", (5, 3), {}, "axis -1 of shape .5, 3. is not a multiple of M = 4"),
    ("nm_mask", (), {}, "not a multiple"),
    ("nm_mask", (4,), {"n": 0}, "1 ≤ N ≤ M"),
    ("nm_mask", (4,), {"n": 5}, "1 ≤ N ≤ M"),
    ("nm_mask", (4,), {"n": -1, "m": -4}, "1 ≤ N ≤ M"),
    ("nm_mask", (4,), {"ties": "random"}, "ties must be"),
    ("nm_mask", (4,), {"backend": "triton"}, "needs a CUDA tensor"),
    ("nm_mask", (4,), {"backend": "cuda"}, "unknown backend 'cuda'"),
    ("nm_mask", (8,), {"n": 2, "m": 8, "backend": "cpu"}, "has no 2:8 kernel"),
    ("nm_prune", (2, 3), {}, "nm_prune: axis"),
    ("soft_threshold", (4,), {"gamma": -0.1}, "gamma must lie in"),
    ("soft_threshold", (4,), {"gamma": 1.1}, "gamma must lie in"),
    ("soft_threshold", (4,), {"gamma": float("nan")}, "gamma must lie in"),
    ("soft_threshold", (4,), {"n": 5}, "1 ≤ N ≤ M"),
    ("soft_threshold", (4,), {"backend": "triton"}, "needs a CUDA tensor"),
    ("transposable_mask", (6, 8), {}, "multiples of 4"),
    ("transposable_mask", (8, 6), {}, "multiples of 4"),
    ("transposable_mask", (4,), {}, "multiples of 4"),
    ("transposable_mask", (4, 4, 4), {}, "multiples of 4"),
    ("transposable_mask", (8, 12), {"n": 4, "m": 8}, "multiples of 8, got .8, 12."),
    ("transposable_mask", (8, 8), {"n": 9, "m": 8}, "1 ≤ N ≤ M"),
    ("transposable_mask", (8, 8), {"n": 4, "m": 8, "backend": "cpu"}, "no backend='cpu'"),
    ("transposable_mask", (8, 8), {"n": 4, "m": 8, "backend": "triton"}, "needs a CUDA tensor"),
    ("mvue", (2, 8), {"key": 0, "estimator": "best"}, "estimator must be"),
    ("mvue", (2, 8), {"key": 0, "order": "features_last"}, "order must be None or 'tokens_last'"),
    ("mvue", (2, 8), {}, "either uniforms or key"),
    ("mvue", (2, 8), {"key": 0, "uniforms": PAIRS}, "either uniforms or key"),
    ("mvue", (2, 8), {"uniforms": torch.zeros(2, 2, 1)}, "uniforms must have shape"),
    ("mvue", (2, 8), {"uniforms": PAIRS, "estimator": "exact"}, "uniforms must have shape"),
    ("mvue", (2, 8), {"key": 0, "backend": "triton"}, "needs a CUDA tensor"),
    ("mvue", (2, 8), {"key": 0, "n": 3, "m": 2}, "mvue: N:M needs"),
    ("mvue", (2, 8), {"key": 0, "n": 0, "m": 8}, "mvue: N:M needs"),
    ("mvue", (2, 8), {"uniforms": PAIRS, "n": 4, "m": 8}, r"uniforms must have shape .2, 1, 1."),
    ("prune_gradient", (4, 8), {"variant": "max"}, "variant must be"),
    ("prune_gradient", (4, 8), {"variant": "rescaled", "scope": "row"}, "scope must be"),
    ("prune_gradient", (4, 8), RANDOM, "either uniforms or key"),
    ("prune_gradient", (4, 8), RANDOM | {"uniforms": PAIRS}, "uniforms must have shape"),
    ("prune_gradient", (4, 8), {"n": 3, "m": 2}, "N:M needs"),
    ("quantize_fp8", (2,), {"format": "e3m4"}, "format must be"),
    ("geglu", (3,), {}, "even"),
    ("geglu", (8,), {"backend": "cpu"}, "geglu: there is no backend='cpu'; use 'reference'"),
    ("bimask_masks", (16, 24), {"permutation": torch.arange(4)}, "16 entries"),
    ("bimask_masks", (16, 24), {"permutation": torch.arange(16), "m": 16}, "multiple of M = 16"),
    ("bimask_ones", (16, 24), {"permutations": torch.zeros(30, 4)}, "bimask_ones: .* 16 entries"),
]


@pytest.mark.parametrize(("name", "shape", "options", "words"), REFUSALS)
def test_bad_options_are_refused(name, shape, options, words):
    with pytest.raises(ValueError, match=words):
        getattr(kernels, name)(torch.zeros(shape), **options)


@pytest.mark.parametrize("shapes", [((4,), (8,), (8,)), ((8,), (4,), (8,)), ((8,), (8,), (1, 8))])
def test_decay_of_different_shapes_is_refused(shapes):
    with pytest.raises(ValueError, match="shapes of grad, weight and mask differ"):
        kernels.masked_decay_(*map(torch.zeros, shapes), 1.0)


def test_other_shapes_and_backends_are_refused():
    x = torch.ones(4, 4)
    with pytest.raises(ValueError, match="needs a CUDA tensor"):
        kernels.masked_decay_(x, x, x, 1.0, backend="triton")
    with pytest.raises(ValueError, match="shapes differ"):
        kernels.flip_count(x, x[:2])
    with pytest.raises(ValueError, match="1 bytes cannot hold"):
        kernels.unpack_24(torch.zeros(1, dtype=torch.uint8), (9,))


@pytest.mark.parametrize("name", ["apply_mask", "nm_prune", "soft_prune"])
@pytest.mark.parametrize("backend", ["reference", None])
def test_out_of_another_shape_is_refused(name, backend):
    x, larger = torch.randn(8, 8), torch.full((2, 8, 8), 7.0)
    given = (x, kernels.nm_mask(x)) if name == "apply_mask" else (x,)
    with pytest.raises(ValueError, match=rf"{name}: out must have shape \(8, 8\), got \(2, 8, 8\)"):
        getattr(kernels, name)(*given, out=larger, backend=backend)
    assert larger.eq(7).all()
