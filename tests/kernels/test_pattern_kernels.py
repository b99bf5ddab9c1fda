"""Transposable masks, SDGP, fp8, gated activations and Bi-Mask against the golden vectors."""

import pytest
import torch

from sparsepretrain import kernels
from support.golden_vectors import load


def test_transposable_golden():
    g = load("transposable")
    for k in "01":
        assert torch.equal(kernels.transposable_mask(g[f"x{k}"]), g[f"mask{k}"].bool()), k
    w = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    assert torch.equal(kernels.transposable_mask(w.t()), kernels.transposable_mask(w).t())


def test_sdgp_golden():
    g = load("sdgp")
    for key in [k for k in g if k.startswith("max_")]:
        n, m = map(int, key.split("_")[1:])
        assert torch.equal(kernels.prune_gradient(g[f"gy_{n}_{m}"], n, m), g[key])
    assert torch.equal(kernels.prune_gradient(g["ties_gy"]), g["ties_max_2_4"])
    assert torch.equal(kernels.prune_gradient(g["seq_gy"]), g["seq_max_2_4"])
    rescaled = kernels.prune_gradient(g["seq_gy"], variant="rescaled")
    torch.testing.assert_close(rescaled, g["seq_maxnorm_2_4"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["e4m3", "e5m2"])
def test_fp8_golden(name):
    g = load("fp8")
    sides = []
    for side in "ab":
        q, scale = kernels.quantize_fp8(g[f"{name}_{side}"], name)
        torch.testing.assert_close(scale, g[f"{name}_scale_{side}"], rtol=1e-6, atol=0)
        assert torch.equal(q.view(torch.uint8), g[f"{name}_q{side}_bits"])
        sides.append(kernels.dequantize_fp8(q, scale))
    expected = g[f"{name}_out"]
    assert (sides[0] @ sides[1] - expected).abs().max() <= 1e-4 * expected.abs().max()


def test_geglu_golden():
    g = load("gelu_glu")
    x = g["x"].requires_grad_()
    y = kernels.geglu(x)
    torch.testing.assert_close(y, g["y"], rtol=1e-5, atol=1e-6 * float(g["y"].abs().max()))
    y.backward(g["gy"])
    torch.testing.assert_close(x.grad, g["gx"], rtol=1e-4, atol=1e-6)


def bimask_weights():
    w = torch.randn(16, 24, generator=torch.Generator().manual_seed(0))
    holes = w * (torch.rand(w.shape, generator=torch.Generator().manual_seed(1)) < 0.3)
    ties = w.mul(2).round()
    special = w.clone()
    special[::3, ::5], special[1, 1], special[2] = float("nan"), float("inf"), 0.0
    return {"plain": w, "holes": holes, "ties": ties, "special": special, "zero": w * 0}


@pytest.mark.parametrize("pattern", [(2, 4), (1, 4), (4, 8)])
@pytest.mark.parametrize("name", bimask_weights())
def test_bimask_prunes_and_counts_what_its_masks_say(name, pattern):
    w = bimask_weights()[name]
    n, m = pattern
    draws = torch.rand(30, 16, generator=torch.Generator().manual_seed(2))
    permutations = draws.argsort(dim=1)
    masks = [kernels.bimask_masks(w, order, n, m) for order in permutations]
    ones = kernels.bimask_ones(w, permutations, n, m)
    assert ones.tolist() == [int(backward.sum()) for _, backward in masks]
    assert name == "zero" or len(set(ones.tolist())) > 3, "permutations differ"
    for order, (forward, backward) in zip(permutations, masks, strict=True):
        assert (forward.view(16, -1, m).sum(2) == n).all()
        assert (backward[order].view(-1, m, 24).sum(1) <= n).all() and not (
            backward & ~forward
        ).any()
        found = kernels.bimask_prune(w, order, n, m)
        assert torch.equal(found[1], forward)
        for pruned, mask in ((found[0], forward), (found[2], backward)):
            expected = kernels.apply_mask(w, mask)
            assert torch.equal(pruned.view(torch.int32), expected.view(torch.int32))
