"""Unbiased 2:4 sampling: golden vectors, exact enumeration in fp64, statistics, extremes."""

import itertools

import pytest
import torch
from golden_vectors import load

from sparsepretrain.kernels import NoiseKey, mvue, noise_key, uniform_noise

ESTIMATORS = ["approximate", "exact"]


def exact_law(x):
    """(lengths, midpoints) of the intervals of u between the fractional parts of C_i."""
    a = x.abs()
    k = a.argmax(1, keepdim=True)
    s = a.sum(1, keepdim=True)
    rest = a.scatter(1, k, 0).sum(1, keepdim=True)
    dominated = rest < a.gather(1, k)
    p = torch.where(dominated, a / rest, 2 * a / s).clamp(max=1)
    p = torch.where((x != 0).sum(1, keepdim=True) <= 2, (x != 0).double(), p)
    c = p.cumsum(1)[:, :3] % 1
    cuts = torch.cat([torch.zeros(len(x), 1), c, torch.ones(len(x), 1)], 1).double()
    cuts = cuts.sort(1).values
    return cuts.diff(dim=1), (cuts[:, 1:] + cuts[:, :-1]) / 2, p


def test_approximate_estimates_equal_golden():
    g = load("mvue_approx")
    r = torch.stack([g["r0"], g["r1"]], 1)[:, None]
    y = mvue(g["x"], uniforms=r)
    assert torch.equal(y != 0, g["mask"].bool())
    torch.testing.assert_close(y, g["y"], rtol=3e-5, atol=0)
    kept = y != 0
    torch.testing.assert_close((g["x"] / y)[kept], g["p_incl"][kept], rtol=3e-5, atol=0)


def test_pruned_layer_gradients_equal_golden():
    g = load("mvue_approx")
    r = torch.stack([g["layer_r0"], g["layer_r1"]], -1)  # (out features, groups, 2)
    pruned = mvue(g["layer_gy"], dim=0, uniforms=r)
    torch.testing.assert_close(pruned.t(), g["layer_gyT_pruned"], rtol=3e-5, atol=0)
    assert torch.equal(mvue(g["layer_gy"].t(), uniforms=r), pruned.t())
    gw = pruned.t() @ g["layer_x"]
    torch.testing.assert_close(gw, g["layer_gw"], rtol=1e-4, atol=1e-5)


def test_exact_law_equals_golden():
    g = load("mvue_exact")
    x = g["x"].double()
    lengths, middles, p = exact_law(x)
    torch.testing.assert_close(p.float(), g["p_opt"], rtol=1e-5, atol=1e-6)
    second = torch.zeros(len(x)).double()
    mean = torch.zeros_like(x)
    for length, u in zip(lengths.t(), middles.t(), strict=True):
        y = mvue(g["x"], estimator="exact", uniforms=u[:, None, None]).double()
        second += length * ((y - x) ** 2).sum(1)
        mean += length[:, None] * y
    torch.testing.assert_close(second.float(), g["var_opt"], rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(mean, x, rtol=1e-5, atol=1e-6 * float(x.abs().max()))


def test_hard_published_groups_stay_finite():
    x = load("mvue_approx")["hard_x"]
    few = (x != 0).sum(1) <= 2
    for estimator in ESTIMATORS:
        for key in range(50):
            y = mvue(x, estimator=estimator, key=key)
            assert y.isfinite().all()
            assert torch.equal(y[few], x[few])
            assert ((y != 0).sum(1) <= 2).all()


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_finite_for_every_finite_group(estimator, dtype):
    info = torch.finfo(dtype)
    values = [0.0, -0.0, info.smallest_normal / 4, -info.tiny, 1e-3, 1.0, -8.0, info.max]
    x = torch.tensor(list(itertools.product(values, repeat=4)), dtype=dtype)  # 4096 groups
    zeros, few = x == 0, (x != 0).sum(1) <= 2
    corners = [0.0, 2.0**-24, 0.5, 1 - 2.0**-24]
    for pair in itertools.product(corners, repeat=2):
        r = torch.tensor(pair if estimator == "approximate" else pair[:1]).expand(len(x), 1, -1)
        y = mvue(x, estimator=estimator, uniforms=r)
        assert y.dtype == dtype and y.isfinite().all()
        assert not y[zeros].any(), "a zero is never drawn"
        assert torch.equal(y[few], x[few])
        assert ((y != 0).sum(1) <= 2).all()
        assert ((y == 0) | (y.signbit() == x.signbit())).all()
        assert (y.double().abs() >= x.double().abs() * (1 - 1e-2)).logical_or(y == 0).all()


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("length", [1, 2, 3, 5, 6, 10])
def test_odd_lengths_equal_zero_padding(estimator, length):
    x = torch.randn(length, 6, generator=torch.Generator().manual_seed(length))
    padded = torch.cat([x, torch.zeros(-length % 4, 6)])
    y = mvue(x, dim=0, estimator=estimator, key=2)
    assert torch.equal(y, mvue(padded, dim=0, estimator=estimator, key=2)[:length])
    tail = length - length % 4
    if length % 4 <= 2:
        assert torch.equal(y[tail:], x[tail:]), "two or fewer real tokens are kept"


def test_axes_layouts_and_counters():
    base = torch.randn(3, 8, 5, generator=torch.Generator().manual_seed(0))
    for dim in range(-3, 3):
        moved = base.movedim(dim, 0)
        flat = mvue(moved.reshape(len(moved), -1), dim=0, key=4)
        assert torch.equal(mvue(base, dim=dim, key=4), flat.view(moved.shape).movedim(0, dim))
        for backend in ("reference", "cpu"):
            turned = mvue(base, dim=dim, key=4, order="tokens_last", backend=backend)
            assert torch.equal(turned, mvue(base, dim=dim, key=4))
            assert turned.movedim(dim, -1).is_contiguous()
    transposed = base.permute(2, 1, 0).contiguous().permute(2, 1, 0)
    assert torch.equal(mvue(transposed, dim=1, key=4), mvue(base, dim=1, key=4))
    u = torch.rand(3, 5, 2, 2)
    assert mvue(base, dim=1, uniforms=u).shape == base.shape
    expanded = torch.ones(1, 1).expand(8, 6)
    assert ((mvue(expanded, dim=0, key=1) != 0).view(2, 4, 6).sum(1) == 2).all()
    for shape, dim in (((0, 8), 0), ((0, 8), 1), ((8, 0), 0), ((8, 0), 1)):
        assert mvue(torch.zeros(shape), dim=dim, key=0).shape == shape


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("inference", [False, True])
def test_chunks_threads_and_inference_mode_give_equal_draws(threads, inference):
    x = torch.randn(6000, 33, generator=torch.Generator().manual_seed(0))
    key = noise_key(1, 2, 3, 2)
    r = torch.stack(uniform_noise(key, 1500, 33, 2), -1).permute(1, 0, 2)
    expected = mvue(x, dim=0, uniforms=r)
    parts = [
        mvue(x[i : i + 2000], dim=0, key=NoiseKey(key.k0, key.k1, i // 4)) for i in (0, 2000, 4000)
    ]
    assert torch.equal(torch.cat(parts), expected)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with torch.inference_mode(inference):
            assert torch.equal(mvue(x, dim=0, key=key), expected)
    finally:
        torch.set_num_threads(before)


def test_uses_no_global_generator():
    state = torch.get_rng_state()
    mvue(torch.ones(8, 8), key=0)
    assert torch.equal(torch.get_rng_state(), state)
    assert not mvue(torch.ones(8, 8, requires_grad=True), key=0).requires_grad


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"key": 0, "estimator": "best"}, "estimator must be"),
        ({"key": 0, "order": "features_last"}, "order must be None or 'tokens_last'"),
        ({}, "either uniforms or key"),
        ({"key": 0, "uniforms": torch.zeros(2, 2, 2)}, "either uniforms or key"),
        ({"uniforms": torch.zeros(2, 2, 1)}, "uniforms must have shape"),
        ({"uniforms": torch.zeros(2, 2, 2), "estimator": "exact"}, "uniforms must have shape"),
        ({"key": 0, "backend": "triton"}, "needs a CUDA tensor"),
    ],
)
def test_bad_options_are_refused(options, words):
    with pytest.raises(ValueError, match=words):
        mvue(torch.zeros(2, 8), **options)
