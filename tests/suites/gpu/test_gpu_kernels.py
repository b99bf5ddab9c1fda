"""The Triton kernels on a GPU: the reference's bits, large tensors, graphs, the same noise."""

import pytest
import torch

from harness import difference, fresh
from sparsepretrain import kernels
from support.kernel_variants import all_cases

CASES = all_cases()
GIB = 1 << 30


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_registry_parity(case, device):
    """Every case and variant on its tile-dividing shape, or a small one in rehearsal."""
    rows, columns = case.offline
    shape = (rows, columns) if device.type == "cuda" else (32, columns // 16)
    if device.type == "cuda" and case.refused and torch.cuda.get_device_capability() < (8, 9):
        from triton.errors import TritonError

        with pytest.raises(TritonError):
            case.run("triton", *case.make(shape, device))
        return
    inputs = case.make(shape, device)
    expected = case.run("reference", *fresh(inputs))
    first, again = (case.run("triton", *fresh(inputs)) for _ in range(2))
    assert difference(first, expected) <= case.tolerance
    assert difference(first, again) == 0


@pytest.mark.cuda
def test_more_elements_than_an_int32_counts(device):
    rows, columns = 2**19 + 4, 4096  # 2³¹ + 16,384
    if torch.cuda.mem_get_info()[0] < 40 * GIB:
        pytest.skip("needs a CUDA GPU with 40 GiB free")
    x = torch.empty(rows, columns, dtype=torch.bfloat16, device=device)
    x.normal_(generator=torch.Generator(device).manual_seed(0))
    ends = (slice(0, 4), slice(rows - 8, rows))
    mask = kernels.nm_mask(x)
    soft = kernels.soft_threshold(x)
    sampled = kernels.mvue(x, dim=1, key=5)
    code = kernels.pack_24(mask)
    assert torch.equal(kernels.unpack_24(code, mask.shape), mask)
    for end in ends:
        part = x[end]
        assert torch.equal(mask[end], kernels.nm_mask(part, backend="reference"))
        assert torch.equal(soft[end], kernels.soft_threshold(part, backend="reference"))
        assert ((sampled[end] != 0).unflatten(1, (-1, 4)).sum(-1) <= 2).all()
        packed = kernels.pack_24(mask[end], backend="reference")
        begin = end.start * columns // 8
        assert torch.equal(code[begin : begin + packed.numel()], packed)
    other = mask.clone()
    other[0, 0] ^= True
    other[-1, -1] ^= True
    assert kernels.flip_count(mask, other).item() == 2
    grad = torch.zeros_like(x)
    kernels.masked_decay_(grad, x, mask, 0.5)
    for end in ends:
        expected = kernels.masked_decay_(
            torch.zeros_like(x[end]), x[end], mask[end], 0.5, backend="reference"
        )
        assert torch.equal(grad[end], expected)


@pytest.mark.cuda
def test_a_replayed_graph_draws_fresh_noise(device):
    x = torch.randn(256, 512, device=device)
    clock = torch.zeros(2, dtype=torch.int64, device=device)

    def work():
        return kernels.mvue(x, dim=0, key=kernels.ClockKey(clock, 7, 0, 2, 64))

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = work()
    seen = []
    for number in (0, 1, 2, 1):
        clock.fill_(number)
        graph.replay()
        expected = kernels.mvue(x, dim=0, key=kernels.noise_key(7, number, 0, 2, 64 * number))
        assert torch.equal(captured, expected)
        seen.append(captured.clone())
    assert not torch.equal(seen[0], seen[1])
    assert not torch.equal(seen[1], seen[2])
    assert torch.equal(seen[1], seen[3])
