"""Packed 2:4 matrices: sizes, products and contracts; which algorithms of a library are used."""

import itertools

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from sparsepretrain import kernels
from sparsepretrain.kernels import packed24
from sparsepretrain.kernels.cusparselt import packed24 as library

HALF, BRAIN, BYTE = torch.float16, torch.bfloat16, torch.float8_e4m3fn

FLAGS = list(itertools.product([False, True], repeat=3))


def draw(*shape, seed=0, dtype=BRAIN):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def sparse(m, k, dtype=BRAIN):
    """2:4, with groups of one and no value, and zeros with a sign."""
    x = kernels.nm_prune(draw(m, k).float())[0]
    x[0, :4], x[1, :8], x[2, 3] = 0, 0, torch.where(x[2, 3] == 0, -0.0, x[2, 3])
    return x.to(dtype)


@pytest.mark.parametrize(("dtype", "columns"), [(HALF, 36), (BRAIN, 36), (BYTE, 40)])
def test_packing_has_the_size_of_the_library_and_loses_nothing(dtype, columns):
    x = sparse(32, 64, dtype)
    packed = kernels.compress_24(x)
    assert packed.shape == (32, columns) and packed.dtype == dtype
    assert torch.equal(packed24._uncompress(packed, 64), x.float())


@pytest.mark.parametrize("dtype", [HALF, BRAIN])
@pytest.mark.parametrize("flags", FLAGS)
def test_products_are_summed_in_fp32_and_rounded_once(dtype, flags):
    transpose_dense, transpose_result, has_bias = flags
    x, dense = sparse(32, 64, dtype), draw(64, 24, seed=1, dtype=dtype)
    bias = draw(32, seed=2, dtype=dtype) if has_bias else None
    expected = x.double() @ dense.double() + (bias.double()[:, None] if has_bias else 0)
    given = dense.t().contiguous() if transpose_dense else dense
    options = {"transpose_dense": transpose_dense, "transpose_result": transpose_result}
    got = kernels.matmul_24(kernels.compress_24(x), given, bias, **options)
    assert got.is_contiguous() and got.dtype == dtype
    got = got.t() if transpose_result else got
    # half a unit in the last place, and what a sum of 64 loses in fp32
    spread = x.double().abs() @ dense.double().abs()
    slack = torch.finfo(dtype).eps / 2 * expected.abs() + 64 * 2**-24 * spread
    assert bool(((got.double() - expected).abs() <= slack).all())


def test_a_product_of_fp8_has_a_type_of_its_own():
    x, dense = sparse(32, 64, BYTE), draw(16, 64, seed=1, dtype=BYTE)
    packed = kernels.compress_24(x)
    got = kernels.matmul_24(packed, dense, transpose_dense=True, out_dtype=torch.float32)
    torch.testing.assert_close(got, x.float() @ dense.float().t())


X, DENSE = draw(32, 64), draw(64, 24)
PACKED = kernels.compress_24(sparse(32, 64))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: kernels.compress_24(X), "more than two non-zeros"),
        (lambda: kernels.compress_24(X.float()), "type float16, bfloat16, float8_e4m3fn, not"),
        (lambda: kernels.compress_24(sparse(64, 32).t()), r"contiguous, got strides \(1, 32\)"),
        (lambda: kernels.compress_24(sparse(32, 40)), r"16 divides, got \(32, 40\)"),
        (lambda: kernels.compress_24(sparse(40, 32)), r"16 divides, got \(40, 32\)"),
        (lambda: kernels.compress_24(sparse(48, 64, BYTE)), r"32 divides, got \(48, 64\)"),
        (lambda: kernels.compress_24(sparse(32, 64)[None]), "must be a matrix"),
        (lambda: kernels.compress_24(sparse(32, 64)[:0]), r"got \(0, 64\)"),
        (lambda: kernels.matmul_24(PACKED, DENSE.t().contiguous().t()), "dense must be contiguous"),
        (lambda: kernels.matmul_24(PACKED, draw(64, 48)[:, ::2]), "dense must be contiguous"),
        (lambda: kernels.matmul_24(PACKED, draw(64, 20)), r"8 divides, got \(64, 20\)"),
        (
            lambda: kernels.matmul_24(PACKED, DENSE.half()),
            "packed is .*bfloat16, dense is .*float16",
        ),
        (lambda: kernels.matmul_24(PACKED, draw(32, 24)), "no packed matrix with 32 columns"),
        (lambda: kernels.matmul_24(PACKED[:, :18], DENSE), "no packed matrix with 64 columns"),
        (lambda: kernels.matmul_24(PACKED, DENSE, draw(24)), r"bias must be \(32,\)"),
        (lambda: kernels.matmul_24(PACKED, DENSE, draw(32).float()), "in .*float32"),
        (lambda: kernels.matmul_24(PACKED, DENSE, out_dtype=torch.float32), "have that type, not"),
    ],
)
def test_what_the_library_would_compute_wrongly_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_there_is_no_factor_of_a_product():
    with pytest.raises(TypeError, match="alpha"):
        kernels.matmul_24(PACKED, DENSE, alpha=torch.ones(()))


def test_both_are_operators_with_rules_for_shapes():
    checks = ("test_schema", "test_faketensor")
    ops = torch.ops.sparsepretrain
    torch.library.opcheck(ops.compress_24, (sparse(32, 64),), test_utils=checks)
    for flags in itertools.product([False, True], repeat=2):
        dense = draw(24, 64) if flags[0] else DENSE
        torch.library.opcheck(
            ops.matmul_24, (PACKED, dense, None, *flags, BRAIN), test_utils=checks
        )
    counter = CompileCounterWithBackend("aot_eager")

    def product(x, dense, bias):
        return kernels.matmul_24(kernels.compress_24(x), dense, bias) * 2

    given = sparse(32, 64), DENSE, draw(32)
    compiled = torch.compile(product, backend=counter, fullgraph=True)(*given)
    assert torch.equal(compiled, product(*given)) and counter.frame_count == 1


class Library:
    """What torch calls cuSPARSELt with, done by the reference; some algorithms are faulty."""

    WRONG, FLICKERING, REFUSED, SLOW = 0, 2, 3, 4

    def __init__(self, monkeypatch, count=6):
        self.products, self.count = [], count
        monkeypatch.setattr(torch, "_cslt_compress", lambda x: packed24._compress(x).flatten())
        monkeypatch.setattr(torch, "_cslt_sparse_mm", self.multiply)
        monkeypatch.setattr(torch._C._cusparselt, "mm_search", self.search)
        monkeypatch.setattr(library, "seconds", lambda run, device: self.duration(run))
        library.fastest.cache_clear()
        library.unsupported.cache_clear()

    def search(self, packed, dense, bias, alpha, out_dtype, transpose_result):
        assert alpha is None
        return 5, 2, 1, self.count

    def duration(self, run):
        algorithm = run.args[1]
        return {self.SLOW: 2.0}.get(algorithm.id, 1.0 - algorithm.id / 100)

    def multiply(self, packed, dense, bias, *, out_dtype, transpose_result, alg_id, **split):
        self.products.append((alg_id, split["split_k"], split["split_k_mode"]))
        if alg_id == self.REFUSED:
            raise RuntimeError("CUDA error: operation not supported")
        # a view is taken for the transpose of a contiguous matrix, whatever its strides are
        transposed = not dense.is_contiguous()
        rows = dense.t() if transposed else dense
        types = transposed, transpose_result, out_dtype or packed.dtype
        result = packed24._matmul(packed, rows, bias, *types)
        if alg_id == self.WRONG:
            result[0, 0] += 1
        if alg_id == self.FLICKERING and len(self.products) % 7 == 0:
            result[-1, -1] = torch.nextafter(result[-1, -1], torch.full((), 100.0).to(result))
        return result


def problem(**changes):
    base = library.Problem(torch.device("cpu"), BRAIN, BRAIN, 32, 24, 64, True, True, True)
    return base._replace(**changes)


def test_only_algorithms_that_are_right_and_repeat_are_used(monkeypatch):
    fake = Library(monkeypatch)
    assert library.fastest(problem()) == (5, 2, 1), "of those that are left the fastest"
    runs = {each: fake.products.count(each) for each in set(fake.products)}
    assert runs[0, 1, -1] == 1, "a wrong one is given up at once"
    assert runs[3, 1, -1] == 1, "so is one that is refused for the size"
    assert runs[2, 1, -1] < library.REPEATS, "and one that differs, when it does"
    for each in ((1, 1, -1), (4, 1, -1), (5, 1, -1), (5, 2, 1)):
        assert runs[each] == library.REPEATS == 20
    fake.products.clear()
    assert library.fastest(problem()) == (5, 2, 1) and not fake.products, "tested once"


@pytest.mark.parametrize("layout", FLAGS)
def test_products_of_the_library_are_those_of_the_reference(monkeypatch, layout):
    Library(monkeypatch)
    transpose_dense, transpose_result, has_bias = layout
    dense = draw(24, 64) if transpose_dense else DENSE
    bias = draw(32, seed=3) if has_bias else None
    given = kernels.compress_24(sparse(32, 64)), dense, bias, transpose_dense, transpose_result
    packed = library.compress_24(sparse(32, 64))
    assert torch.equal(packed, given[0])
    assert torch.equal(library.matmul_24(*given, BRAIN), packed24._matmul(*given, BRAIN))


def test_a_product_without_an_algorithm_is_an_error(monkeypatch):
    Library(monkeypatch, count=1).search = None
    monkeypatch.setattr(torch._C._cusparselt, "mm_search", lambda *_: (2, 1, -1, 1))
    monkeypatch.setattr(torch.backends.cusparselt, "version", lambda: 801)
    message = "a packed 32 × 64 × 24 product in bfloat16: none of 2 algorithms of cuSPARSELt 0.8.1"
    with pytest.raises(RuntimeError, match=message):
        library.fastest(problem())


def test_a_device_is_supported_when_its_products_are_right(monkeypatch):
    cuda = torch.device("cuda", 0)
    Library(monkeypatch)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert library.unsupported(cuda) == "this machine has no CUDA device"
    library.unsupported.cache_clear()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert "on cpu, not on a CUDA device" in library.unsupported(torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert "7.5 is none of those" in library.unsupported(cuda)
    library.unsupported.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    tested = []
    monkeypatch.setattr(library, "fastest", tested.append)
    assert library.unsupported(cuda) is None
    assert {p.dtype for p in tested} == {HALF, BRAIN} and len(tested) == 6
    library.unsupported.cache_clear()
    monkeypatch.setattr(torch.backends.cusparselt, "is_available", lambda: False)
    assert library.unsupported(cuda) == "this build of torch has no cuSPARSELt"
    library.unsupported.cache_clear()


def test_versions_are_those_of_the_loaded_library(monkeypatch):
    for number, name in ((801, "0.8.1"), (602, "0.6.2"), (None, "none")):
        monkeypatch.setattr(torch.backends.cusparselt, "version", lambda number=number: number)
        assert library.version() == name


def test_nothing_is_tested_while_a_graph_is_captured(monkeypatch):
    Library(monkeypatch)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="run it once before a CUDA graph is captured"):
        library.fastest(problem())
