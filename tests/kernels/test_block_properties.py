"""Every kernel against a plain-Python oracle on more than ten thousand nasty blocks per dtype."""

import pytest
import torch
from hypothesis import strategies as st

from sparsepretrain import kernels
from support import block_oracles as oracles
from support.block_cases import (
    BACKEND,
    BLOCKS,
    PATTERNS,
    blocks_of,
    every_dtype,
    generator,
    kernel,
    layouts,
    many_blocks,
    nasty_blocks,
    place,
    places,
)
from support.same_bits import DEVICE, assert_same, lay_out

fours = st.sampled_from([(2, 4), (1, 4), (3, 4), (2, 8), (4, 8), (1, 16)])
limits = st.sampled_from([0.0, 1e-45, 1e-38, 1e-6, 1.0, 20.0])


@every_dtype
@many_blocks(pattern=st.sampled_from(PATTERNS), where=places, ties=st.sampled_from(["high", "low"]))
def test_nm_mask(dtype, seed, pattern, where, ties):
    n, m = pattern
    x, dim = place(nasty_blocks(seed, dtype, m), where)
    blocks = blocks_of(x, dim, m)
    mask = kernel("nm_mask")(x, n, m, dim=dim, ties=ties)
    assert_same(blocks_of(mask, dim, m), oracles.mask(blocks, n, ties), blocks)


@every_dtype
@many_blocks(pattern=fours, where=places, gamma=st.sampled_from([0.0, 0.2, 0.5, 1.0]))
def test_soft_threshold(dtype, seed, pattern, where, gamma):
    n, m = pattern
    x, dim = place(nasty_blocks(seed, dtype, m), where)
    blocks = blocks_of(x, dim, m)
    y = kernel("soft_threshold")(x, n, m, gamma=gamma, dim=dim)
    assert_same(blocks_of(y, dim, m), oracles.soft_threshold(blocks, n, gamma), blocks)


@every_dtype
@many_blocks(layout=layouts, columns=st.sampled_from([1, 3, 16]))
def test_transposable_mask(dtype, seed, layout, columns):
    rows = BLOCKS // columns
    x = nasty_blocks(seed, dtype, 16, count=rows * columns)
    x = x.view(rows, columns, 4, 4).transpose(1, 2).reshape(4 * rows, 4 * columns)
    x = lay_out(x.to(DEVICE), layout)

    def blocks(t):
        return t.cpu().reshape(rows, 4, columns, 4).transpose(1, 2).reshape(-1, 4, 4)

    mask = kernel("transposable_mask")(x)
    assert_same(blocks(mask), oracles.transposable_mask(blocks(x)), blocks(x))


@every_dtype
@many_blocks(pattern=fours, where=places)
def test_prune_gradient(dtype, seed, pattern, where):
    n, m = pattern
    x, dim = place(nasty_blocks(seed, dtype, m), where)
    blocks = blocks_of(x, dim, m)
    y = kernel("prune_gradient")(x, n, m, dim=dim)
    kept = oracles.mask(blocks, n, "low")
    assert_same(blocks_of(y, dim, m), torch.where(kept, blocks, 0.0), blocks)
    draws = torch.randint(2**24, x.shape, generator=generator(seed)).to(DEVICE) * 2.0**-24
    kept = oracles.mask(blocks_of(draws, dim, m), n)
    for rescale in (False, True):
        options = {"variant": "random", "uniforms": draws, "rescale": rescale, "dim": dim}
        y = kernel("prune_gradient")(x, n, m, **options)
        wide = blocks.to(torch.promote_types(dtype, torch.float32)) * (m / n if rescale else 1)
        want = torch.where(kept, wide.to(dtype), 0.0)
        assert_same(blocks_of(y, dim, m), want, blocks)


@every_dtype
@pytest.mark.parametrize("scope", ["channel", "group", "tensor"])
@many_blocks(pattern=fours, where=places)
def test_prune_gradient_restores_the_norm(dtype, scope, seed, pattern, where):
    """Sums depend on their order: the restored norm is compared, the selection exactly."""
    n, m = pattern
    # 16-bit results must not overflow
    x, dim = place(nasty_blocks(seed, dtype, m, finite=True).clamp(-100, 100), where)
    y = kernel("prune_gradient")(x, n, m, variant="rescaled", scope=scope, dim=dim)
    blocks = blocks_of(x, dim, m)
    kept = torch.where(oracles.mask(blocks, n, "low"), blocks, 0.0)
    got = blocks_of(y, dim, m)
    assert not got[kept == 0].any() and (got.signbit() == kept.signbit())[got != 0].all()
    x, y, dim = x.cpu().double(), y.cpu().double(), dim % x.dim()
    zeroed = torch.where(y == 0, 0.0, x)
    if scope == "channel":  # per item and channel, or per channel of a matrix
        axes = [0] if (x.dim(), dim) == (2, 1) else [a for a in range(1, x.dim()) if a != dim]
    else:
        axes = list(range(x.dim()))
    if scope == "group":
        x, zeroed, y = (t.unflatten(dim, (-1, m)) for t in (x, zeroed, y))
        axes = [dim + 1]
    before, left, after = (t.abs().sum(axes) if axes else t.abs() for t in (x, zeroed, y))
    info = torch.finfo(torch.promote_types(dtype, torch.float32) if dtype.itemsize > 2 else dtype)
    slack = max(1e-5, info.eps) * before + x.numel() * info.smallest_normal
    assert (after <= before + slack).all()
    # the authors add 1e-4 to the pruned norm
    assert (after >= before * left / (left + 1e-4).clamp(min=1e-4) - slack).all()


@every_dtype
@many_blocks(where=places, decay=st.sampled_from([6e-5, 0.25, -0.5, 0.0]), as_tensor=st.booleans())
def test_masked_decay(dtype, seed, where, decay, as_tensor):
    *here, layout = where
    grad, dim = place(
        nasty_blocks(seed, dtype), (*here, "contiguous" if layout == "expanded" else layout)
    )
    master = torch.promote_types(dtype, torch.float32)
    weight, _ = place(nasty_blocks(seed + 1, master), where)
    mask = kernel("nm_mask")(weight, dim=dim)
    want = oracles.masked_decay(grad.cpu(), weight.cpu(), mask.cpu(), decay)
    before = grad.cpu().clone()
    factor = torch.tensor(decay, dtype=torch.float64, device=DEVICE) if as_tensor else decay
    assert kernel("masked_decay_")(grad, weight, mask, factor) is grad
    assert_same(grad, want, before, signed_zero=False)
    if layout in ("sliced", "strided"):  # neighbors in memory are untouched
        assert int((grad._base == 77.0).sum() - (want == 77.0).sum()) == (
            grad._base.numel() - grad.numel()
        )


@many_blocks(layout=layouts, shape=st.sampled_from([(4, -1), (7, -1), (-1, 12), (-1,)]))
def test_packing_and_flips(seed, layout, shape):
    g = generator(seed)
    count = BLOCKS * 4 - BLOCKS * 4 % 84 + (0 if len(shape) > 1 else seed % 84)
    masks = [(torch.rand(count, generator=g) < p).view(shape) for p in (0.5, 0.9)]
    a, b = (lay_out(mask.to(DEVICE), layout) for mask in masks)
    code = kernel("pack_24")(a)
    assert code.dtype == torch.uint8 and code.tolist() == oracles.pack(a.cpu())
    assert_same(kernel("unpack_24")(code, a.shape), a)
    flips = sum(p != q for p, q in zip(a.flatten().tolist(), b.flatten().tolist(), strict=True))
    for one, other in ((a, b), (a.float(), b.to(torch.uint8))):
        counted = kernel("flip_count")(one, other)
        assert counted.dtype == torch.int64 and counted.dim() == 0 and int(counted) == flips
    assert int(kernel("packed_flip_count")(code, kernel("pack_24")(b))) == flips


@every_dtype
@pytest.mark.parametrize("format", ["e4m3", "e5m2"])
@many_blocks(where=places, limit=limits)
def test_quantize_fp8(dtype, format, seed, where, limit):
    # one tensor holds a limited range, or all but its largest entries would become zero
    x, _ = place(nasty_blocks(seed, dtype, finite=True).clamp(-limit, limit), where)
    q, scale = kernel("quantize_fp8")(x, format)
    codes, expected = oracles.quantize_fp8(x.cpu(), format)
    assert_same(scale, expected)
    assert_same(q.view(torch.uint8), codes, x)
    back = kernel("dequantize_fp8")(q, scale).cpu()
    assert back.dtype == torch.float32
    assert_same(back, q.cpu().float() / scale.cpu())
    assert not back[x.cpu() == 0].any(), "zeros stay zero"


@every_dtype
@pytest.mark.parametrize("format", ["e4m3", "e5m2"])
@many_blocks(size=st.integers(1, 9))
def test_quantize_fp8_propagates_non_finite_values(dtype, format, seed, size):
    for x in nasty_blocks(seed, dtype)[:64].to(DEVICE).split(size):
        back = kernel("dequantize_fp8")(*kernel("quantize_fp8")(x, format))
        assert not back[~x.isfinite()].isfinite().any()
        if (x.abs() < 2.0**127).all():  # q / scale of the very largest number may round to infinity
            assert back.isfinite().all()


@every_dtype
@pytest.mark.parametrize("estimator", ["approximate", "exact"])
@many_blocks(where=places, grid=st.booleans())
def test_mvue(dtype, estimator, seed, where, grid):
    x, dim = place(nasty_blocks(seed, dtype), where)
    blocks = blocks_of(x, dim, 4)
    draws = 2 if estimator == "approximate" else 1
    shape = (*x.movedim(dim, -1).shape[:-1], x.shape[dim] // 4, draws)
    u = torch.randint(2**24, shape, generator=generator(seed)) * 2.0**-24
    u = (u * 8).floor() / 8 if grid else u  # eighths hit the ends of intervals
    options = {"dim": dim, "estimator": estimator}
    y = kernel("mvue")(x, **options, uniforms=u.to(DEVICE))
    if BACKEND == "triton":
        assert_same(y, kernels.mvue(x.cpu(), **options, uniforms=u, backend="reference"))
    check_mvue(blocks, u.reshape(-1, draws), blocks_of(y, dim, 4), estimator, clear=not grid)


def check_mvue(blocks, draws, got, estimator, *, clear):
    """Compare samples (groups, 4) with the law; ``clear``: few draws lie near ends of intervals."""
    dtype = blocks.dtype
    info = torch.finfo(dtype)
    finite = blocks.isfinite().all(1)
    assert torch.equal(got.isfinite().all(1), finite), "finite stays finite, the rest is visible"
    rows, numbers = blocks[finite].double(), draws[finite].double()
    found = got[finite]
    assert ((found != 0).sum(1) <= 2).all() and not found[rows == 0].any()
    assert (found.signbit() == rows.signbit())[found != 0].all()
    few = (rows != 0).sum(1) <= 2
    assert torch.equal(found[few].double(), rows[few])
    pairs = zip(rows.tolist(), numbers.tolist(), strict=True)
    tiny = torch.finfo(torch.promote_types(dtype, torch.float32)).tiny
    law = [oracles.mvue(row, numbers, estimator, tiny) for row, numbers in pairs]
    want = torch.tensor([estimate for estimate, _ in law], dtype=torch.float64)
    want = want.clamp(-info.max, info.max)
    sure = torch.tensor([is_sure for _, is_sure in law])
    assert not clear or sure.float().mean() > 0.9
    error = (found.double() - want).abs()
    allowed = max(info.eps, 2e-6 if dtype != torch.float64 else 4e-14) * want.abs()
    wrong = (error > allowed + 2 * info.smallest_normal * info.eps) & sure[:, None]
    bad = wrong.any(1)
    assert not bad.any(), (rows[bad][0], numbers[bad][0], found[bad][0], want[bad][0])


SPANNING = {
    torch.float64: (1.3e70, 1.1e-254, 4.9e-49, -1.8e-106),
    torch.float32: (1.3e7, 1.1e-38, 4.9e-5, -1.8e-10),
    torch.bfloat16: (1.3e7, 1.1e-38, 4.9e-5, -1.8e-10),
    torch.float16: (6e4, 6e-8, 1e-3, -1e-5),
}
"""Groups whose second entry is positive, but underflows over the largest in fp64 and fp32: its
interval ends where draws of 0 lie."""


@every_dtype
@pytest.mark.parametrize("estimator", ["approximate", "exact"])
@pytest.mark.parametrize("draws", [(0.625, 0.0), (0.0, 0.0), (0.625, 1 - 2.0**-24)])
def test_mvue_of_a_group_that_spans_the_exponents(dtype, estimator, draws):
    blocks = torch.tensor([SPANNING[dtype]], dtype=dtype)
    u = torch.tensor([draws[: 2 if estimator == "approximate" else 1]], dtype=torch.float64)
    uniforms = u[:, None].to(DEVICE, torch.promote_types(dtype, torch.float32))
    y = kernel("mvue")(blocks.to(DEVICE), estimator=estimator, uniforms=uniforms)
    check_mvue(blocks, u, y.cpu(), estimator, clear=False)


def gated(x, name):
    """fp64: the activation of (value ‖ gate) and its derivatives with respect to both."""
    value, gate = x.double().chunk(2, -1)
    if name == "swiglu":
        s = torch.sigmoid(gate)
        return value * gate * s, gate * s, value * s * (1 + gate * (1 - s))
    c, k = (2 / torch.pi) ** 0.5, 0.044715
    t = torch.tanh(c * (gate + k * gate**3))
    slope = (1 - t**2) * c * (1 + 3 * k * gate**2)
    return value * gate * (1 + t) / 2, gate * (1 + t) / 2, value * (1 + t + gate * slope) / 2


@every_dtype
@pytest.mark.parametrize("name", ["geglu", "swiglu"])
@many_blocks(layout=layouts, width=st.sampled_from([1, 3, 64, 129]), expanded=st.booleans())
def test_gated_activations(dtype, name, seed, layout, width, expanded):
    x = nasty_blocks(seed, dtype, 4, finite=True).clamp(-30, 30)
    x = x.flatten()[: BLOCKS * 4 // (2 * width) * 2 * width].view(-1, 2 * width)
    x = lay_out(x.to(DEVICE), layout).detach().requires_grad_()
    y = kernel(name)(x)
    upstream = torch.randn(y.shape, generator=generator(seed)).to(DEVICE, dtype)
    if expanded:  # what Σ gives
        upstream = torch.tensor(3.0, dtype=dtype, device=DEVICE).expand(y.shape)
    (got,) = torch.autograd.grad(y, x, upstream)
    plain, g = x.detach().cpu(), upstream.cpu().double()
    want, by_value, by_gate = gated(plain, name)
    value, gate = (part.double().abs() for part in plain.chunk(2, -1))
    assert y.dtype == got.dtype == dtype and got.shape == x.shape
    eps = 8 * max(torch.finfo(dtype).eps, 1e-15)

    def close(result, exact, size):
        # 1 + tanh cancels for negative gates: the error is relative to what was canceled
        error = (result.detach().cpu().double() - exact).abs()
        assert (error <= eps * (exact.abs() + size) + torch.finfo(dtype).smallest_normal).all()

    close(y, want, value * gate)
    close(
        got,
        torch.cat([g * by_value, g * by_gate], -1),
        g.abs().repeat(1, 2) * torch.cat([gate, value * (1 + gate)], -1),
    )


@pytest.mark.parametrize("shape", [(0, 8), (8, 0), (0, 0), (3, 0, 8)])
@every_dtype
def test_empty_tensors(dtype, shape):
    x = torch.zeros(shape, dtype=dtype, device=DEVICE)
    mask = kernel("nm_mask")(x)
    assert mask.shape == x.shape and mask.dtype == torch.bool
    for y in (
        kernel("soft_threshold")(x),
        kernel("mvue")(x, key=0),
        kernel("mvue")(x, uniforms=x.new_zeros(*shape[:-1], shape[-1] // 4, 2)),
        kernel("prune_gradient")(x),
        kernel("prune_gradient")(x, variant="rescaled"),
        kernel("masked_decay_")(x, x, mask, 0.1),
    ):
        assert y.shape == x.shape and y.dtype == dtype
    if len(shape) == 2:
        assert kernel("transposable_mask")(x).shape == x.shape
    assert kernel("geglu")(x).shape == kernel("swiglu")(x).shape == (*shape[:-1], shape[-1] // 2)
    assert kernel("flip_count")(mask, mask) == 0
    code = kernel("pack_24")(mask)
    assert code.numel() == 0 and kernel("unpack_24")(code, shape).shape == x.shape
    q, scale = kernel("quantize_fp8")(x, "e5m2")
    assert q.shape == x.shape and scale == 1
