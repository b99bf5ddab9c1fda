"""Packed 2:4 matrices: sizes, products and contracts; which algorithms of a library are used."""

import ctypes
import itertools
import json
import math
import os

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

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


def library_bytes(m, k):
    """Size of a packed matrix of 16-bit entries, as the library has it on Ampere and Hopper."""
    return m * k + math.ceil(m / 64) * math.ceil(k / 64) * 512


@pytest.mark.parametrize(("dtype", "columns"), [(HALF, 72), (BRAIN, 72), (BYTE, 80)])
def test_packing_is_lossless_and_has_the_size_of_the_library(dtype, columns):
    x = sparse(64, 128, dtype)
    packed = kernels.compress_24(x)
    assert packed.shape == (64, columns) and packed.dtype == dtype
    assert torch.equal(packed24._uncompress(packed, 128), x.float())


def test_shapes_that_the_library_packs_differently_are_refused():
    """Beyond whole tiles torch 2.9 would let the library write past the end."""
    # packed by cuSPARSELt 0.8.0 on an H200
    measured = {(64, 32): 2560, (64, 96): 7168, (128, 128): 18432, (512, 1376): 794624}
    assert all(library_bytes(m, k) == size for (m, k), size in measured.items())
    for m, k in itertools.product((16, 64, 80, 128), (16, 32, 64, 96, 128)):
        x = torch.zeros(m, k, dtype=BRAIN)
        if m % 64 or k % 64:
            with pytest.raises(ValueError, match=rf"multiples of 64 × 64, got \({m}, {k}\)"):
                kernels.compress_24(x)
            packed = torch.zeros(m, k * 9 // 16, dtype=BRAIN)
            with pytest.raises(ValueError, match=f"{m} × {k} is an impossible product"):
                kernels.matmul_24(packed, torch.zeros(k, 8, dtype=BRAIN))
        else:
            assert kernels.compress_24(x).nbytes == library_bytes(m, k)


@pytest.mark.parametrize("dtype", [HALF, BRAIN, BYTE])
@pytest.mark.parametrize(("m", "k"), [(64, 128), (128, 256), (192, 1024)])
def test_packed_shapes_equal_those_of_fake_tensors_and_torch(m, k, dtype):
    """Compiled graphs rely on them; torch has a rule for its product, none for its packing."""
    x = sparse(m, k, dtype)
    packed = kernels.compress_24(x)
    with FakeTensorMode() as mode:
        fake = kernels.compress_24(mode.from_tensor(x))
    assert (fake.shape, fake.dtype) == (packed.shape, dtype)
    dense = torch.empty(k, 48, dtype=dtype, device="meta")
    for transposed in (False, True):
        result = torch._cslt_sparse_mm(packed.to("meta"), dense, transpose_result=transposed)
        assert result.shape == ((48, m) if transposed else (m, 48))


@pytest.mark.parametrize("dtype", [HALF, BRAIN])
@pytest.mark.parametrize("flags", FLAGS)
def test_products_are_summed_in_fp32_and_rounded_once(dtype, flags):
    transpose_dense, transpose_result, has_bias = flags
    x, dense = sparse(64, 128, dtype), draw(128, 24, seed=1, dtype=dtype)
    bias = draw(64, seed=2, dtype=dtype) if has_bias else None
    expected = x.double() @ dense.double() + (bias.double()[:, None] if has_bias else 0)
    given = dense.t().contiguous() if transpose_dense else dense
    options = {"transpose_dense": transpose_dense, "transpose_result": transpose_result}
    got = kernels.matmul_24(kernels.compress_24(x), given, bias, **options)
    assert got.is_contiguous() and got.dtype == dtype
    got = got.t() if transpose_result else got
    # half a unit in the last place, and what a sum of 128 loses in fp32
    spread = x.double().abs() @ dense.double().abs()
    slack = torch.finfo(dtype).eps / 2 * expected.abs() + 128 * 2**-24 * spread
    assert bool(((got.double() - expected).abs() <= slack).all())


def test_fp8_matmul_takes_an_output_dtype():
    x, dense = sparse(64, 128, BYTE), draw(16, 128, seed=1, dtype=BYTE)
    packed = kernels.compress_24(x)
    options = {"transpose_dense": True, "out_dtype": torch.float32}
    got = kernels.matmul_24(packed, dense, **options)
    torch.testing.assert_close(got, x.float() @ dense.float().t())
    with torch.autocast("cpu", torch.bfloat16):  # rounds nothing
        assert torch.equal(kernels.matmul_24(packed, dense, **options), got)


X, DENSE = draw(64, 128), draw(128, 24)
PACKED = kernels.compress_24(sparse(64, 128))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: kernels.compress_24(X), "more than two non-zeros"),
        (lambda: kernels.compress_24(X.float()), "type float16, bfloat16, float8_e4m3fn, not"),
        (lambda: kernels.compress_24(sparse(128, 64).t()), r"contiguous, got strides \(1, 64\)"),
        (lambda: kernels.compress_24(sparse(64, 128, BYTE)[:, :96]), r"64 × 128, got \(64, 96\)"),
        (lambda: kernels.compress_24(sparse(32, 128, BYTE)), r"64 × 128, got \(32, 128\)"),
        (lambda: kernels.compress_24(sparse(64, 128)[None]), "must be a matrix"),
        (lambda: kernels.compress_24(sparse(64, 128)[:0]), r"got \(0, 128\)"),
        (lambda: kernels.matmul_24(PACKED, DENSE.t().contiguous().t()), "dense must be contiguous"),
        (lambda: kernels.matmul_24(PACKED, draw(128, 48)[:, ::2]), "dense must be contiguous"),
        (lambda: kernels.matmul_24(PACKED, draw(128, 20)), r"8 × 8, got \(128, 20\)"),
        (lambda: kernels.matmul_24(PACKED, DENSE.half()), "is .*bfloat16, dense is .*float16"),
        (lambda: kernels.matmul_24(PACKED, draw(64, 24)), "no packed matrix with 64 columns"),
        (lambda: kernels.matmul_24(PACKED[:, :18], DENSE), "no packed matrix with 128 columns"),
        (lambda: kernels.matmul_24(PACKED, DENSE, draw(24)), r"bias must be \(64,\)"),
        (lambda: kernels.matmul_24(PACKED, DENSE, draw(64).float()), "in .*float32"),
        (lambda: kernels.matmul_24(PACKED, DENSE, out_dtype=torch.float32), "have that type, not"),
    ],
)
def test_unsupported_operands_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_operators_have_schemas_and_fake_tensor_rules():
    checks = ("test_schema", "test_faketensor")
    ops = torch.ops.sparsepretrain
    torch.library.opcheck(ops.compress_24, (sparse(64, 128),), test_utils=checks)
    for flags in itertools.product([False, True], repeat=2):
        dense = draw(24, 128) if flags[0] else DENSE
        torch.library.opcheck(
            ops.matmul_24, (PACKED, dense, None, *flags, BRAIN), test_utils=checks
        )
    counter = CompileCounterWithBackend("aot_eager")

    def product(x, dense, bias):
        return kernels.matmul_24(kernels.compress_24(x), dense, bias) * 2

    given = sparse(64, 128), DENSE, draw(64)
    compiled = torch.compile(product, backend=counter, fullgraph=True)(*given)
    assert torch.equal(compiled, product(*given)) and counter.frame_count == 1


class Library:
    """What torch calls cuSPARSELt with, done by the reference; some algorithms are faulty."""

    WRONG, FLICKERING, REFUSED, SLOW = 0, 2, 3, 4

    def __init__(self, monkeypatch, count=6):
        self.products, self.measured, self.searches, self.count = [], [], 0, count
        monkeypatch.setattr(torch, "_cslt_compress", lambda x: packed24._compress(x).flatten())
        monkeypatch.setattr(torch, "_cslt_sparse_mm", self.multiply)
        monkeypatch.setattr(torch._C._cusparselt, "mm_search", self.search)
        monkeypatch.setattr(library, "medians", self.medians)
        monkeypatch.setattr(library, "once", self.once)
        monkeypatch.setattr(library, "version", lambda: "0.8.1")
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "H100")
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
        self.restart()

    def restart(self):
        """Forget what one process remembers."""
        library._decided.clear()
        self.products.clear()
        self.measured.clear()
        self.searches = 0

    def search(self, packed, dense, bias, alpha, out_dtype, transpose_result):
        assert alpha is None
        self.searches += 1
        return 5, 2, 1, self.count

    def seconds(self, run):
        return 2.0 if run.args[1].id == self.SLOW else 1.0 - run.args[1].id / 100

    def once(self, run, device):
        run()
        return self.seconds(run)

    def medians(self, works, device):
        self.measured += [run.args[1] for run in works.values()]
        return {name: self.seconds(run) for name, run in works.items()}

    def multiply(self, packed, dense, bias, *, out_dtype, transpose_result, alg_id, **split):
        self.products.append((alg_id, split["split_k"], split["split_k_mode"]))
        if alg_id == self.REFUSED or alg_id >= self.count:
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


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """Directory of the files with chosen algorithms."""
    monkeypatch.setenv("SPARSEPRETRAIN_CACHE_DIR", str(tmp_path / "cache"))
    yield tmp_path / "cache" / "kernels" / "cusparselt"
    library._decided.clear()


@pytest.fixture
def hopper(monkeypatch):
    """A GPU of compute capability 9.0 that captures no graph."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    return torch.device("cuda", 0)


def problem(**changes):
    base = library.Problem(torch.device("cpu"), BRAIN, BRAIN, 64, 24, 128, True, True, True)
    return base._replace(**changes)


def test_only_algorithms_that_are_right_and_repeat_are_used(monkeypatch):
    fake = Library(monkeypatch)
    assert library.fastest(problem()) == (5, 2, 1), "of those that are left the fastest"
    runs = {each: fake.products.count(each) for each in set(fake.products)}
    assert runs[0, 1, -1] == 1, "a wrong one is given up at once"
    assert runs[3, 1, -1] == 1, "so is one that is refused for the size"
    assert runs[4, 1, -1] == 2, "a slow one runs for its time only"
    assert runs[2, 1, -1] < library.REPEATS + 2, "one that differs is given up when it does"
    fast = [(5, 2, 1), (5, 1, -1), (1, 1, -1)]
    assert [runs[each] for each in fast] == [library.REPEATS + 2] * 3 == [22] * 3
    assert fake.measured == fast and len(fast) == library.MEASURED
    fake.products.clear()
    assert library.fastest(problem()) == (5, 2, 1) and not fake.products, "tested once"


def test_the_measured_time_decides_between_the_best(monkeypatch):
    fake = Library(monkeypatch)
    monkeypatch.setattr(library, "medians", lambda works, device: {"": -fake.seconds(works[""])})
    assert library.fastest(problem()) == (1, 1, -1)


def test_a_choice_is_kept_for_other_processes_and_checked_once(monkeypatch, cache):
    fake = Library(monkeypatch)
    chosen = library.fastest(problem())
    assert len(list(cache.iterdir())) == 1
    fake.restart()
    assert library.fastest(problem()) == chosen
    assert fake.products == [chosen] * library.REPEATS
    assert not fake.searches and not fake.measured


def test_a_kept_choice_that_is_not_trusted_is_replaced(monkeypatch, cache):
    fake = Library(monkeypatch)
    library.fastest(problem())
    (file,) = cache.iterdir()
    content = file.read_text()
    file.write_text(json.dumps(json.loads(content) | {"algorithm": [fake.WRONG, 1, -1]}))
    fake.restart()
    assert library.fastest(problem()) == (5, 2, 1) and fake.searches == 1
    assert file.read_text() == content
    # nor does it stay where the search finds nothing
    monkeypatch.setattr(library, "trusted", lambda *_: False)
    fake.restart()
    with pytest.raises(RuntimeError, match="none of"):
        library.fastest(problem())
    assert not list(cache.iterdir())


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        "{}",
        '{"key": {}, "algorithm": [5, 2, 1]}',
        '{"key": KEY, "algorithm": [5]}',
        '{"key": KEY, "algorithm": [5, 2, true]}',
        '{"key": KEY, "algorithm": "521"}',
        '{"key": KEY}',
    ],
)
def test_damaged_files_cost_a_search(content, monkeypatch, cache):
    fake = Library(monkeypatch)
    library.fastest(problem())
    (file,) = cache.iterdir()
    key = json.dumps(json.loads(file.read_text())["key"])
    file.write_text(content.replace("KEY", key))
    fake.restart()
    assert library.fastest(problem()) == (5, 2, 1) and fake.searches == 1
    fake.restart()
    library.fastest(problem())
    assert not fake.searches, "the file was replaced"


def test_directories_that_cannot_be_used_cost_a_search(monkeypatch, cache):
    fake = Library(monkeypatch)
    cache.parent.parent.write_text("a file")
    for _ in range(2):
        fake.restart()
        assert library.fastest(problem()) == (5, 2, 1) and fake.searches == 1


@pytest.mark.parametrize(
    ("owner", "name", "value"),
    [
        (library, "version", lambda: "0.9.0"),
        (torch, "__version__", "9.9"),
        (torch.cuda, "get_device_name", lambda device: "H200"),
        (torch.cuda, "get_device_capability", lambda device: (10, 0)),
    ],
)
def test_another_version_or_device_searches_again(owner, name, value, monkeypatch, cache):
    fake = Library(monkeypatch)
    library.fastest(problem())
    monkeypatch.setattr(owner, name, value)
    fake.restart()
    library.fastest(problem())
    assert fake.searches == 1 and len(list(cache.iterdir())) == 2


@pytest.mark.parametrize("size", ["m", "n", "k"])
def test_new_sizes_in_training_take_the_nearest_choice(size, monkeypatch, cache):
    """Tokens are n where a weight is packed, m or k where a gradient is."""
    fake = Library(monkeypatch)
    with library.searching():
        for factor in (1, 8):
            library.fastest(problem(**{size: 192 * factor}))
    assert fake.searches == 2 and len(list(cache.iterdir())) == 2
    library._decided[problem(**{size: 192})] = near = library.Algorithm(1)
    fake.products.clear()
    assert library.fastest(problem(**{size: 384})) == near
    assert fake.products == [near] * library.REPEATS
    assert library.fastest(problem(**{size: 192 * 7})) == (5, 2, 1)
    assert fake.searches == 2 and len(fake.measured) == 6
    assert len(list(cache.iterdir())) == 2, "what was not measured is not kept"


def test_new_sizes_search_if_the_nearest_choice_is_wrong(monkeypatch):
    fake = Library(monkeypatch)
    library.fastest(problem())
    library._decided[problem()] = library.Algorithm(fake.WRONG)
    assert library.fastest(problem(n=48)) == (5, 2, 1) and fake.searches == 2


@pytest.mark.parametrize(
    "changes",
    [
        {"bias": False},
        {"dtype": HALF, "out_dtype": HALF},
        {"transpose_result": False},
        {"m": 128, "k": 192},
    ],
)
def test_other_kinds_of_problems_are_searched(changes, monkeypatch):
    fake = Library(monkeypatch)
    library.fastest(problem())
    library.fastest(problem(**changes))
    assert fake.searches == 2


@pytest.mark.parametrize("layout", FLAGS)
def test_library_matmuls_equal_the_reference(monkeypatch, layout):
    Library(monkeypatch)
    transpose_dense, transpose_result, has_bias = layout
    dense = draw(24, 128) if transpose_dense else DENSE
    bias = draw(64, seed=3) if has_bias else None
    given = kernels.compress_24(sparse(64, 128)), dense, bias, transpose_dense, transpose_result
    packed = library.compress_24(sparse(64, 128))
    assert torch.equal(packed, given[0])
    assert torch.equal(library.matmul_24(*given, BRAIN), packed24._matmul(*given, BRAIN))


def test_shape_without_a_correct_algorithm_is_an_error(monkeypatch):
    Library(monkeypatch, count=1).search = None
    monkeypatch.setattr(torch._C._cusparselt, "mm_search", lambda *_: (2, 1, -1, 1))
    message = r"64 × 128 × 24 .*bfloat16: none of 2 .*0\.8\.1"
    with pytest.raises(RuntimeError, match=message):
        library.fastest(problem())


class Loaded:
    """A loaded library of version 0.9.2."""

    def __init__(self, name, mode):
        assert name == library.LIBRARY and mode & os.RTLD_NOLOAD

    def cusparseLtGetProperty(self, which, value):
        value._obj.value = (0, 9, 2)[which]
        return 0


class Unusable(Loaded):
    def cusparseLtGetProperty(self, which, value):
        return 1


def missing(name, mode):
    raise OSError(f"{name}: cannot open shared object file")


@pytest.mark.parametrize(
    ("number", "loads", "text"),
    [
        (801, Loaded, "0.9.2"),
        (801, Unusable, "0.8.1 (built with)"),
        (801, missing, "0.8.1 (built with)"),
        (None, Loaded, "none"),
    ],
)
def test_the_version_is_that_of_the_loaded_library(number, loads, text, monkeypatch):
    monkeypatch.setattr(torch.backends.cusparselt, "version", lambda: number)
    monkeypatch.setattr(ctypes, "CDLL", loads)
    assert library.version() == text


@pytest.mark.parametrize(
    ("number", "capability", "named"),
    [
        ("0.8.0", (9, 0), True),
        ("0.8.0 (built with)", (9, 0), True),
        ("0.8.0", (8, 9), True),
        ("0.8.0", (8, 0), False),
        ("0.8.1", (9, 0), False),
        ("none", (9, 0), False),
    ],
)
def test_a_version_that_is_slow_on_a_device_is_named(number, capability, named, monkeypatch):
    monkeypatch.setattr(library, "version", lambda: number)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    line = library.slow_version(torch.device("cuda"))
    assert line is None if not named else "0.8.0 is slower" in line and "0.8.1" in line
    assert library.slow_version(torch.device("cpu")) is None


def test_algorithms_are_tried_by_number_where_the_search_refuses(monkeypatch):
    fake = Library(monkeypatch)

    def refuse(*_):
        raise RuntimeError("CUDA error: operation not supported when calling ...MatmulSearch")

    monkeypatch.setattr(torch._C._cusparselt, "mm_search", refuse)
    assert library.fastest(problem()) == (5, 1, -1)
    assert {number for number, *_ in fake.products} == {*range(library.NUMBERS)}


def fail(*_, **__):
    raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")


def refuse(*_, **__):
    raise RuntimeError("CUDA error: internal error when calling `cusparseLtMatmulSearch(...)`")


def test_error_of_the_library_that_breaks_the_device_is_raised(monkeypatch, hopper):
    """As fp16 does with rows in the result, in version 0.8.0 on an H200."""
    Library(monkeypatch)
    monkeypatch.setattr(torch._C._cusparselt, "mm_search", refuse)
    monkeypatch.setattr(torch.cuda, "synchronize", fail)
    with pytest.raises(RuntimeError, match="internal error when calling"):
        library.fastest(problem())


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (torch, "_cslt_sparse_mm"),
        (torch._C._cusparselt, "mm_search"),
        (library, "once"),
        (library, "medians"),
    ],
    ids=["multiply", "search", "once", "medians"],
)
def test_error_that_breaks_the_device_is_raised(owner, name, monkeypatch, hopper):
    Library(monkeypatch)

    def breaks(*_, **__):
        monkeypatch.setattr(torch.cuda, "synchronize", fail)  # as every call from now on
        fail()

    monkeypatch.setattr(owner, name, breaks)
    with pytest.raises(torch.AcceleratorError):
        library.fastest(problem())


def test_a_kept_choice_that_breaks_the_device_is_dropped(monkeypatch, cache, hopper):
    fake = Library(monkeypatch)
    library.fastest(problem())
    fake.restart()
    monkeypatch.setattr(torch.cuda, "synchronize", fail)
    monkeypatch.setattr(torch, "_cslt_sparse_mm", fail)
    with pytest.raises(torch.AcceleratorError):
        library.fastest(problem())
    assert not list(cache.iterdir())


def test_algorithm_whose_error_leaves_the_device_usable_is_skipped(monkeypatch):
    multiply = Library(monkeypatch).multiply

    def first(*args, **options):
        return fail() if options["alg_id"] == 5 else multiply(*args, **options)

    monkeypatch.setattr(torch, "_cslt_sparse_mm", first)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    assert library.fastest(problem()) == (1, 1, -1)


def test_unexpected_packed_size_is_an_error(monkeypatch):
    Library(monkeypatch)
    more = torch.zeros(64 * 60, dtype=BRAIN)
    monkeypatch.setattr(torch, "_cslt_compress", lambda x: more.view(64, 60))  # as torch 2.10 does
    with pytest.raises(RuntimeError, match=r"64 × 128 .*7680 .*9216"):
        library.compress_24(sparse(64, 128))


class Largest(TorchDispatchMode):
    """Entries of the largest tensor in fp64."""

    entries = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **kwargs or {})
        if isinstance(result, torch.Tensor) and result.dtype == torch.float64:
            self.entries = max(self.entries, result.numel())
        return result


@pytest.mark.parametrize("transpose_result", [False, True])
def test_references_have_at_most_2048_columns(transpose_result, monkeypatch):
    fake = Library(monkeypatch)
    large = problem(n=5000, transpose_result=transpose_result)
    with Largest() as largest:
        assert library.fastest(large) == (5, 2, 1)
    assert largest.entries <= 128 * 2048
    # a tile of eight columns that is wrong is found wherever it is
    multiply = fake.multiply

    def wrong(packed, *args, alg_id, **options):
        result = multiply(packed, *args, alg_id=alg_id, **options)
        if alg_id == 5:
            columns = result if not transpose_result else result.t()
            columns[:, 4992:] += 1
        return result

    monkeypatch.setattr(torch, "_cslt_sparse_mm", wrong)
    fake.restart()
    assert library.fastest(large) == (1, 1, -1)


def test_algorithms_are_not_tested_during_graph_capture(monkeypatch, hopper):
    Library(monkeypatch)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="before a CUDA graph"):
        library.fastest(problem())
