"""On the CPU most references run in NumPy: the same bits as in torch, whatever the threads."""

import functools
import multiprocessing
from concurrent.futures import ThreadPoolExecutor

import numpy
import pytest
import torch

from sparsepretrain import kernels
from sparsepretrain.kernels import groups, mvue24, nm, noise, sdgp, sdgp_numpy, soft, transposable

nan, inf = float("nan"), float("inf")
DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
KEY = kernels.NoiseKey(5, 6, 2**32 - 3)
MANY = 2**26
"""Bytes that no other test needs."""


@pytest.fixture
def in_torch(monkeypatch):
    """Call a function as where there is no NumPy."""

    def call(function, *args, **options):
        with monkeypatch.context() as patch:
            for module in (groups, mvue24, nm, noise, sdgp, soft, transposable):
                patch.setattr(module, "numpy_for", lambda x: None)
            return function(*args, **options)

    return call


def same(a, b):
    """Equal bits, the sign of zero among them; any NaN equals any other."""
    a, b = a.double(), b.double()
    equal = (a == b) & (a.signbit() == b.signbit())
    return a.shape == b.shape and bool((equal | (a.isnan() & b.isnan())).all())


def inputs(dtype, m=4, seed=0):
    """Tensors whose axes are multiples of m, named; every special value among them."""
    g = torch.Generator().manual_seed(seed)
    info = torch.finfo(dtype)
    ordinary = [0.0, -0.0, info.smallest_normal / 4, -info.tiny, 1.0, -1.0, 2.5, info.max]
    finite = torch.tensor(ordinary, dtype=dtype)
    special = torch.tensor([*ordinary, nan, -nan, inf, -inf, info.max / 3], dtype=dtype)
    size = m * max(1, 16 // m)
    x = torch.randn(size, 3, 2 * size, generator=g)
    wide = torch.randn(2 * size, 5 * size, generator=g)
    wide *= 10.0 ** (torch.rand(wide.shape, generator=g) * 8 - 4)
    holes = torch.randn(2 * size, 3 * size, generator=g)
    holes[torch.rand(holes.shape, generator=g) < 0.5] = 0
    return {
        "plain": x.to(dtype),
        "transposed": x.to(dtype).transpose(0, 2),
        "ties": x.mul(2).round().to(dtype),
        "wide": wide.to(dtype),
        "holes": holes.to(dtype),
        "finite": finite[torch.randint(0, len(finite), (4 * size, 3 * size), generator=g)],
        "special": special[torch.randint(0, len(special), (4 * size, 3 * size), generator=g)],
        "empty": torch.zeros(0, size, dtype=dtype),
    }


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "m"), [(2, 4), (1, 4), (3, 4), (5, 7), (2, 8), (16, 32), (2, 129)])
def test_masks(in_torch, dtype, n, m):
    for name, x in inputs(dtype, m).items():
        for dim in (0, -1):
            for ties in ("high", "low"):
                mask = kernels.nm_mask(x, n, m, dim=dim, ties=ties)
                expected = in_torch(kernels.nm_mask, x, n, m, dim=dim, ties=ties)
                assert torch.equal(mask, expected), (name, dim, ties)
                assert mask.is_contiguous()
                pruned, again = kernels.nm_prune(x, n, m, dim=dim, ties=ties)
                assert torch.equal(again, mask) and pruned.is_contiguous()
                assert same(pruned, torch.where(mask, x, torch.zeros((), dtype=dtype)))
                assert same(pruned, in_torch(kernels.nm_prune, x, n, m, dim=dim, ties=ties)[0])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gamma", [0.0, 0.3, 1.0])
@pytest.mark.parametrize(("n", "m"), [(2, 4), (1, 4), (3, 4), (5, 7), (2, 8), (7, 8), (16, 32)])
def test_soft_threshold(in_torch, dtype, gamma, n, m):
    for name, x in inputs(dtype, m).items():
        for dim in (0, -1):
            call = functools.partial(kernels.soft_threshold, x, n, m, gamma=gamma, dim=dim)
            assert same(call(), in_torch(call)), (name, dim)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scope", ["channel", "group", "tensor"])
@pytest.mark.parametrize(("n", "m"), [(2, 4), (5, 7), (16, 32), (2, 129)])
def test_rescaled_gradients(in_torch, monkeypatch, dtype, scope, n, m):
    monkeypatch.setattr(sdgp_numpy, "CHUNK", 4000)  # several items per part, several parts
    for name, x in inputs(dtype, m).items():
        for dim in range(x.dim()):
            call = functools.partial(
                kernels.prune_gradient, x, n, m, variant="rescaled", scope=scope, dim=dim
            )
            if x.shape[dim] % m == 0:
                assert same(call(), in_torch(call)), (name, dim)


def test_buffers_are_reused_on_their_thread_only(monkeypatch):
    one, two = groups.buffers(numpy, ((3, 5), numpy.float32), ((7,), numpy.int8))
    assert (one.shape, one.dtype, two.shape, two.dtype) == ((3, 5), "f4", (7,), "i1")
    one[:], two[:] = 1.0, 2
    assert (one == 1).all(), "they do not overlap"
    (again,) = groups.buffers(numpy, ((2, 2), numpy.uint64))
    assert numpy.shares_memory(again, one)
    with ThreadPoolExecutor(1) as other:
        (elsewhere,) = other.submit(groups.buffers, numpy, ((3, 5), numpy.float32)).result()
    assert not numpy.shares_memory(elsewhere, one)
    monkeypatch.setattr(groups, "MOST_KEPT", 10_000)
    (large,) = groups.buffers(numpy, ((MANY,), numpy.int8))
    (small,) = groups.buffers(numpy, ((10,), numpy.int8))
    assert not numpy.shares_memory(large, small), "what is too large is not kept"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("estimator", ["approximate", "exact"])
def test_mvue(in_torch, dtype, estimator):
    for name, x in inputs(dtype).items():
        for dim in (0, -1):
            call = functools.partial(kernels.mvue, x, dim=dim, estimator=estimator, key=KEY)
            assert same(call(), in_torch(call)), (name, dim)


@pytest.mark.parametrize("dtype", DTYPES)
def test_transposable_masks(in_torch, dtype):
    for seed in range(5):
        for name, x in inputs(dtype, seed=seed).items():
            w = x.flatten(1)
            mask = kernels.transposable_mask(w)
            assert torch.equal(mask, in_torch(kernels.transposable_mask, w)), name


@pytest.mark.parametrize("key", [KEY, kernels.NoiseKey(2**32 - 1, 2**31), 7])
@pytest.mark.parametrize("words", [1, 2])
def test_noise(in_torch, key, words):
    ours = kernels.uniform_noise(key, 70, 300, words)
    expected = in_torch(kernels.uniform_noise, key, 70, 300, words)
    assert len(ours) == len(expected) == words
    assert all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True))


def test_threads_change_nothing():
    w = torch.randn(512, 768, generator=torch.Generator().manual_seed(0))

    def everything():
        return [
            kernels.nm_mask(w),
            kernels.nm_mask(w, dim=0),
            kernels.soft_threshold(w),
            kernels.transposable_mask(w),
            kernels.mvue(w, dim=0, key=3),
            kernels.uniform_noise(4, 100, 1000, 1)[0],
        ]

    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = everything()
        torch.set_num_threads(3)
        for _ in range(3):
            assert all(torch.equal(a, b) for a, b in zip(everything(), alone, strict=True))
    finally:
        torch.set_num_threads(before)


def squares(count=1000):
    """Through the pool, without anything of torch."""
    out = numpy.zeros(count)
    groups.in_chunks(
        lambda rows: lambda a, b: out.__setitem__(slice(a, b), range(a, b)), count, 1, 7
    )
    return float((out * out).sum())


def test_a_forked_child_makes_its_own_threads(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    expected = sum(i * i for i in range(1000))
    assert squares() == expected
    with multiprocessing.get_context("fork").Pool(1) as pool:
        assert pool.apply_async(squares).get(timeout=60) == expected
    assert squares() == expected


def test_an_error_in_a_part_is_raised():
    def prepare(rows):
        def work(start, stop):
            raise RuntimeError("a part failed")

        return work

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with pytest.raises(RuntimeError, match="a part failed"):
            groups.in_chunks(prepare, 100, 1, 10)
    finally:
        torch.set_num_threads(before)
