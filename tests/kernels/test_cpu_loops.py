"""The loops on the CPU: the reference's bits, from any thread and process, wherever Numba runs."""

import functools
import itertools
import multiprocessing
import os
from concurrent.futures import ThreadPoolExecutor

import llvmlite.binding
import numba
import pytest
import torch

from sparsepretrain import __version__, errors, kernels
from sparsepretrain.errors import SparsePretrainWarning
from sparsepretrain.kernels import dispatch
from sparsepretrain.kernels.cpu import launch
from support.same_bits import assert_same

nan, inf = float("nan"), float("inf")
KEY = kernels.NoiseKey(5, 6, 2**32 - 3)


def agree(name, *args, **options):
    """Fail unless the loops give the bits of the reference."""
    function = functools.partial(getattr(kernels, name), **options)
    copies = [a.clone() if isinstance(a, torch.Tensor) else a for a in args]
    ours, theirs = function(*args, backend="cpu"), function(*copies, backend="reference")
    pairs = zip(ours, theirs, strict=True) if isinstance(ours, tuple | list) else [(ours, theirs)]
    for got, wanted in pairs:
        assert_same(got, wanted)


def writes_out(name, x, n, **options):
    """Fail unless the loop writes values and packed mask of the reference to ``out``."""
    for kind in {x.dtype, torch.float32}:
        results = []
        for backend in ("cpu", "reference"):
            out = torch.full(x.shape, 7.0, dtype=kind)
            pruned, mask = getattr(kernels, name)(x, n, out=out, backend=backend, **options)
            assert pruned is out
            results.append((out, mask))
        for got, wanted in zip(*results, strict=True):
            assert_same(got, wanted)


def decays(grad, weight, mask, decay):
    """Fail unless the loop changes ``grad`` as the reference does."""
    results = []
    for backend in ("cpu", "reference"):
        out = grad.clone()
        assert kernels.masked_decay_(out, weight, mask, decay, backend=backend) is out
        results.append(out)
    assert_same(*results)


def inputs(dtype):
    """Tensors whose axes are multiples of 4; every special value among them."""
    g = torch.Generator().manual_seed(4)
    info = torch.finfo(dtype)
    ordinary = [0.0, -0.0, info.smallest_normal / 4, -info.tiny, 1.0, -1.0, 2.5, info.max]
    special = torch.tensor([*ordinary, nan, -nan, inf, -inf, info.max / 3], dtype=dtype)
    x = torch.randn(16, 3, 32, generator=g).to(dtype)
    wide = torch.randn(32, 80, generator=g)
    wide *= 10.0 ** (torch.rand(wide.shape, generator=g) * 8 - 4)
    holes = torch.randn(32, 48, generator=g)
    holes[torch.rand(holes.shape, generator=g) < 0.5] = 0
    layouts = [x, x.transpose(0, 2), x[..., ::2], x[:, :1].expand(16, 3, 32)]
    values = [x.mul(2).round(), wide.to(dtype), holes.to(dtype), torch.zeros(0, 16, dtype=dtype)]
    return [*layouts, *values, special[torch.randint(0, len(special), (64, 48), generator=g)]]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_loops_give_the_bits_of_the_reference(dtype):
    """Operations and options that tests/kernels/test_block_properties.py does not draw."""
    for x in inputs(dtype):
        for n, dim, ties in itertools.product((1, 2, 3), (0, -1), ("high", "low")):
            options = {"dim": dim, "ties": ties}
            agree("nm_prune", x, n, **options)
            agree("nm_mask", x, n, **options, packed=True)
            writes_out("nm_prune", x, n, **options)
            scaled = {"dim": dim, "scale": torch.tensor(-1.7)}
            for gamma in (0.0, 0.3, 1.0) if ties == "high" else ():
                agree("soft_threshold", x, n, gamma=gamma, dtype=torch.float32, **scaled)
                agree("soft_prune", x, n, gamma=gamma, dim=dim)
                writes_out("soft_prune", x, n, gamma=gamma, **scaled)
        mask, matrix = x > 0.5, x.flatten(1)
        agree("mvue", matrix.t()[:-1], dim=0, key=KEY)  # fills no group
        for kept in (mask, kernels.pack_rows(mask)):
            agree("apply_mask", x, kept)
            for kind in (torch.bfloat16, dtype):
                outs = [torch.zeros(x.shape, dtype=kind) for _ in range(2)]
                for out, backend in zip(outs, ("cpu", "reference"), strict=True):
                    assert kernels.apply_mask(x, kept, out=out, backend=backend) is out
                assert_same(*outs)
        agree("bimask_prune", matrix, torch.arange(len(matrix)).flip(0))
        agree("pack_24", mask)
        agree("flip_count", mask, x > 1)
        code, other = kernels.pack_24(mask), kernels.pack_24(x > 1)
        for old, new in ((code, other), (code[3:-1], other[3:-1]), (code[-9:], other[-9:])):
            agree("packed_flip_count", old, new)
            olds = [old.clone() for _ in range(2)]
            for previous, backend in zip(olds, ("cpu", "reference"), strict=True):
                kernels.packed_flip_count(previous, new, replace=True, backend=backend)
            assert_same(*olds)
            assert_same(olds[0], new)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_masked_decay_gives_the_bits_of_the_reference(dtype):
    for x in inputs(dtype):
        grad, mask = x.clone(memory_format=torch.contiguous_format), x > 0.5
        for weight in (x, x.float(), x.double()):
            decays(grad, weight, kernels.pack_rows(mask), 0.3)
            for decay in (0.3, -0.3, torch.tensor(0.3)):
                decays(grad, weight, mask, decay)
                if x.dim() == 2:
                    decays(grad.t(), weight.t(), mask.t(), decay)


def test_decay_on_weights_reads_what_it_writes():
    weight = torch.randn(16, 32, generator=torch.Generator().manual_seed(0))
    mask, copy = kernels.nm_mask(weight), weight.clone()
    kernels.masked_decay_(weight, weight, mask, -0.1, backend="cpu")
    assert_same(weight, kernels.masked_decay_(copy, copy.clone(), mask, -0.1, backend="reference"))


def test_loops_that_write_in_place_raise_the_version():
    """Autograd finds changed saved tensors by versions, which writes through NumPy do not raise."""
    x = torch.randn(16, 32, generator=torch.Generator().manual_seed(0))
    mask = kernels.nm_mask(x)
    for write in (
        lambda out: kernels.masked_decay_(out, x, mask, 0.1),
        lambda out: kernels.apply_mask(x, mask, out=out),
        lambda out: kernels.nm_prune(x, out=out),
        lambda out: kernels.soft_prune(x, out=out),
        lambda out: kernels.packed_flip_count(
            out.view(torch.uint8), out.view(torch.uint8) + 1, replace=True
        ),
    ):
        out = torch.zeros(16, 32)
        before = out._version
        write(out)
        assert out._version > before


def test_flips_between_masks_on_two_devices_are_refused():
    here, there = (torch.zeros(8, 2, dtype=torch.uint8, device=d) for d in ("cpu", "meta"))
    for count in (kernels.flip_count, kernels.packed_flip_count):
        with pytest.raises(ValueError, match=f"^{count.__name__}: masks are on meta and cpu; move"):
            count(there, here, backend="cpu")


def everything(scale=1.0):
    w = torch.randn(512, 768, generator=torch.Generator().manual_seed(0)) * scale
    return [
        kernels.nm_mask(w, backend="cpu"),
        kernels.nm_mask(w, dim=0, backend="cpu"),
        kernels.apply_mask(w, w > 0, backend="cpu"),
        kernels.soft_threshold(w, backend="cpu"),
        kernels.pack_24(w > 0, backend="cpu"),
        kernels.mvue(w, dim=0, key=3, backend="cpu"),
        kernels.uniform_noise(4, 100, 1000, 1, backend="cpu")[0],
    ]


def test_from_many_python_threads_at_once():
    scales = [2.0**-k for k in range(8)]
    expected = [everything(s) for s in scales]
    with ThreadPoolExecutor(4) as pool:
        for found, wanted in zip(pool.map(everything, scales), expected, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


class Batches(torch.utils.data.Dataset):
    """What a data worker computes."""

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return kernels.nm_mask(torch.full((256, 256), float(index)), backend="cpu").sum()


def checksum():
    return [float(t.double().sum()) for t in everything()]


def test_in_forked_children_and_data_workers():
    expected = checksum()
    with multiprocessing.get_context("fork").Pool(2) as pool:
        assert [job.get(timeout=60) for job in [pool.apply_async(checksum)] * 2] == [expected] * 2
    loader = torch.utils.data.DataLoader(Batches(), num_workers=2, timeout=60)
    assert torch.cat(list(loader)).tolist() == [256 * 128] * 4
    assert checksum() == expected


def double(x):
    for k in range(len(x)):
        x[k] *= 2


def compile_and_double(x):
    kernel = launch.compiled(double)
    kernel(x)
    return kernel.stats


def test_compiled_code_is_cached_in_the_users_cache_directory(tmp_path, monkeypatch):
    monkeypatch.setattr(numba.config, "CACHE_DIR", "")
    monkeypatch.setenv("SPARSEPRETRAIN_CACHE_DIR", str(tmp_path))
    x = torch.ones(3).numpy()
    assert compile_and_double(x).cache_misses and compile_and_double(x).cache_hits
    (file,) = tmp_path.rglob("*.nbc")
    processor = llvmlite.binding.get_host_cpu_name()
    assert file.parent == tmp_path / "kernels" / f"{__version__}-{processor}"
    assert not list(tmp_path.rglob("*.tmp"))
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path / "other"))
    assert compile_and_double(x).cache_misses and compile_and_double(x).cache_hits
    assert [f.parent for f in (tmp_path / "other").rglob("*.nbc")] == [tmp_path / "other"]
    assert x.tolist() == [16.0] * 3


def test_kernels_compile_in_memory_where_the_cache_cannot_be_written(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path / "file"))
    x = torch.ones(3).numpy()
    assert compile_and_double(x).cache_misses and compile_and_double(x).cache_misses
    assert x.tolist() == [4.0] * 3


def test_damaged_stale_and_foreign_code_is_compiled_again(tmp_path, monkeypatch):
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    x = torch.ones(3).numpy()
    compile_and_double(x)
    (file,) = tmp_path.rglob("*.nbc")
    file.write_bytes(b"torn")
    assert compile_and_double(x).cache_misses
    assert compile_and_double(x).cache_hits
    with monkeypatch.context() as patch:
        patch.setattr(launch.os, "geteuid", lambda: os.getuid() + 1)
        assert compile_and_double(x).cache_misses
    monkeypatch.setattr(launch, "_SOURCES", b"edited")
    assert compile_and_double(x).cache_misses
    assert x.tolist() == [32.0] * 3


def test_refusals(monkeypatch):
    x = torch.ones(8)
    with pytest.raises(ValueError, match="needs a CPU tensor, got one on meta; use 'reference'"):
        kernels.nm_mask(x.to("meta"), backend="cpu")
    with pytest.raises(ValueError, match=r"has no torch\.int32 kernel"):
        kernels.nm_mask(x.int(), backend="cpu")
    monkeypatch.setattr(numba.config, "DISABLE_JIT", 1)
    dispatch._numba_fails.cache_clear()
    with pytest.raises(ValueError, match=r"is disabled \(NUMBA_DISABLE_JIT\); use"):
        kernels.nm_mask(x, backend="cpu")
    dispatch._numba_fails.cache_clear()
    monkeypatch.setattr(dispatch, "_numba_fails", lambda: "cannot be imported (gone)")
    with pytest.raises(ValueError, match=r"cannot be imported \(gone\); use"):
        kernels.nm_mask(x, backend="cpu")
    errors.warn_once.cache_clear()
    with pytest.warns(SparsePretrainWarning, match="Numba cannot be imported") as said:
        for _ in range(2):
            assert kernels.nm_mask(x).sum() == 4
    assert len(said) == 1, "once"
