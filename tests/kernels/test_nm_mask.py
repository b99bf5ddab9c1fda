"""Hard N:M masks: golden vectors, packing, refusals; patterns: test_block_properties.py."""

import pytest
import torch
from golden_vectors import load

from sparsepretrain.kernels import nm_mask, nm_prune, pack_rows


@pytest.mark.parametrize(("n", "m"), [(2, 4), (1, 4), (2, 8), (1, 16), (4, 8)])
@pytest.mark.parametrize("prefix", ["", "ties_"])
def test_masks_equal_golden(n, m, prefix):
    g = load("hard_masks")
    mask = nm_mask(g[f"{prefix}w_{n}_{m}"], n, m)
    assert torch.equal(mask, g[f"{prefix}mask_{n}_{m}"].bool())


def test_golden_all_ties_strides_and_convolutions():
    g = load("hard_masks")
    assert torch.equal(nm_mask(g["ties24_all_w"]), g["ties24_all_mask"].bool())
    column_major = g["colmajor_w"].t().contiguous().t()
    assert not column_major.is_contiguous()
    assert torch.equal(nm_mask(column_major), g["colmajor_mask"].bool())
    assert torch.equal(nm_mask(g["conv_w"], dim=1), g["conv_mask"].bool())
    channels_last = g["conv_w"].to(memory_format=torch.channels_last)
    assert torch.equal(nm_mask(channels_last, dim=1), g["conv_mask"].bool())


def test_masks_have_no_gradient():
    mask = nm_mask(torch.tensor([3.0, -4.0, 1.0, 2.0], requires_grad=True))
    assert mask.tolist() == [True, True, False, False] and not mask.requires_grad


@pytest.mark.parametrize("n", [1, 2, 4])
@pytest.mark.parametrize(
    ("shape", "dim"), [((3, 8), 1), ((3, 12), 1), ((8, 5), 0), ((4, 8, 2, 1), 1), ((0, 8), -1)]
)
def test_packed_masks_equal_packed_rows(shape, dim, n):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).round(decimals=1)
    for backend in (None, "reference"):
        code = nm_mask(x, n, dim=dim, packed=True, backend=backend)
        assert code.dtype == torch.uint8
        assert torch.equal(code, pack_rows(nm_mask(x, n, dim=dim, backend=backend)))


@pytest.mark.parametrize(
    ("shape", "options", "words"),
    [
        ((5, 3), {}, "axis -1 of shape .5, 3. is not a multiple of M = 4"),
        ((2, 10), {}, "not a multiple"),
        ((), {}, "not a multiple"),
        ((4,), {"n": 0}, "1 ≤ N ≤ M"),
        ((4,), {"n": 5}, "1 ≤ N ≤ M"),
        ((4,), {"n": -1, "m": -4}, "1 ≤ N ≤ M"),
        ((4,), {"ties": "random"}, "ties must be"),
        ((4,), {"backend": "triton"}, "needs a CUDA tensor"),
        ((4,), {"backend": "cuda"}, "unknown backend 'cuda'"),
    ],
)
def test_bad_options_are_refused(shape, options, words):
    with pytest.raises(ValueError, match=words):
        nm_mask(torch.zeros(shape), **options)


@pytest.mark.parametrize("ties", ["high", "low"])
def test_nm_prune_returns_the_weight_and_its_mask(ties):
    x = torch.tensor([[-0.0, 1.0, -1.0, 1.0], [float("nan"), 3.0, -2.0, -0.0]])
    pruned, mask = nm_prune(x, ties=ties)
    assert torch.equal(mask, nm_mask(x, ties=ties))
    assert torch.equal(pruned[mask].nan_to_num(9.0), x[mask].nan_to_num(9.0))
    assert not pruned[~mask].any() and not pruned[~mask].signbit().any()
    with pytest.raises(ValueError, match="nm_prune: axis"):
        nm_prune(x[:, :3])
