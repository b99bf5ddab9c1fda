"""The kernels as PyTorch operations: schemas, fake tensors, graphs, refusals."""

import pytest
import torch

from sparsepretrain import kernels
from sparsepretrain.kernels import NoiseKey
from sparsepretrain.kernels.triton import (
    fp8,
    glu,
    masks,
    mvue24,
    nm,
    noise,
    sdgp,
    soft,
    transposable,
)
from support.parity import nasty
from support.same_bits import DEVICE, assert_same

X = nasty((8, 16), 0, special=False)
MASK = X > 0
Q = X.to(torch.float8_e4m3fn)
ONE = torch.ones((), device=DEVICE)
STEP = torch.tensor(3, device=DEVICE)
CLOCK = torch.tensor([3, 1], device=DEVICE)
NUMBERS = noise.key_parts(NoiseKey(1, 2, 3), DEVICE)
MIXED = noise.key_parts(NoiseKey(STEP, 2, STEP), DEVICE)
DERIVED = noise.key_parts(kernels.ClockKey(CLOCK, 2**62 + 1, 4, 2, 3), DEVICE)
UNIFORMS = torch.rand(16, 2, 2, device=DEVICE)
OPERATIONS = {
    "nm_mask": (nm.nm_mask_op, (X, 2, 4, 1, False)),
    "nm_code": (nm.nm_code_op, (X, 1, False)),
    "nm_prune": (nm.nm_prune_op, (X, 2, 4, 0, False)),
    "nm_mask 1:8": (nm.nm_mask_op, (X, 1, 8, 1, True)),
    "soft_threshold": (soft.soft_threshold, (X, 2, 4, 0.3, 1, ONE, torch.bfloat16)),
    "transposable_mask": (transposable.transposable_mask, (X,)),
    "apply_mask": (masks.apply_mask_op, (X, MASK)),
    "masked_decay_": (masks.masked_decay_op, (X.clone(), X, MASK, 0.1, None)),
    "differing_bits": (masks.differing_bits, (MASK.clone(), ~MASK, True)),
    "pack_24": (masks.pack_24, (MASK,)),
    "unpack_24": (masks.unpack_24, (torch.arange(8, dtype=torch.uint8, device=DEVICE), [8, 8])),
    "quantize_fp8": (fp8.quantize_fp8, (X, "e4m3")),
    "dequantize_fp8": (fp8.dequantize_fp8, (Q, ONE)),
    "uniform_noise": (noise.uniform_noise_op, (*MIXED, 3, 5, 2, torch.device(DEVICE))),
    "mvue": (mvue24.mvue_op, (X, 0, False, False, None, *NUMBERS)),
    "mvue exact": (mvue24.mvue_op, (X, 1, False, True, None, *MIXED)),
    "mvue of a clock": (mvue24.mvue_op, (X, 0, True, False, None, *DERIVED)),
    "mvue padded": (mvue24.mvue_op, (X[:7], 0, True, True, None, *MIXED)),
    "mvue uniforms": (mvue24.mvue_op, (X, 0, False, False, UNIFORMS, *NUMBERS)),
    "prune_gradient": (sdgp.prune_gradient_op, (X, 2, 4, 1, False, *NUMBERS, 1.0)),
    "prune_gradient 1:6": (sdgp.prune_gradient_op, (X[:, :12], 1, 6, 1, True, *MIXED, 6.0)),
    "gated": (glu.gated, (X, True)),
    "gated transposed": (glu.gated, (X.t().contiguous().t(), False)),
    "gated_backward": (glu.gated_backward, (X[:, :8], X, True)),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_operations_have_schemas_and_fake_rules(name):
    op, arguments = OPERATIONS[name]
    tests = ("test_schema", "test_faketensor")
    if name == "dequantize_fp8":  # opcheck itself cannot compare fp8 inputs
        tests = ("test_faketensor",)
    torch.library.opcheck(op, arguments, test_utils=tests)


@pytest.mark.parametrize("name", [name for name, (_, args) in OPERATIONS.items() if args[0] is X])
def test_result_strides_equal_the_fake_ones(name):
    op, (_, *rest) = OPERATIONS[name]
    for x in (X.t().contiguous().t(), torch.stack([X, X], -1)[..., 0]):
        torch.library.opcheck(op, (x, *rest), test_utils=("test_faketensor",))


def test_strides_of_four_axes_equal_the_fake_ones():
    deep = nasty((3, 8, 5, 4), 1, special=False)
    for order in ((0, 1, 2, 3), (0, 2, 3, 1), (3, 1, 0, 2)):
        view = deep.permute(order).contiguous().permute([order.index(i) for i in range(4)])
        for op, rest in (
            (mvue24.mvue_op, (1, False, False, None, *NUMBERS)),
            (mvue24.mvue_op, (1, True, False, None, *NUMBERS)),
            (sdgp.prune_gradient_op, (2, 4, 1, True, *NUMBERS, 1.0)),
            (glu.gated, (True,)),
        ):
            torch.library.opcheck(op, (view, *rest), test_utils=("test_faketensor",))


@pytest.mark.parametrize("gelu", [True, False])
def test_autograd_registration(gelu):
    x = X.clone().requires_grad_()
    torch.library.opcheck(glu.gated, (x, gelu))


def test_operations_compile_to_one_graph():
    def chain(w, grad):
        mask = kernels.nm_mask(w, backend="triton")
        grad = kernels.masked_decay_(grad, w, mask, 0.1, backend="triton")
        soft = kernels.soft_threshold(w, scale=w.new_ones(()), backend="triton")
        flips = kernels.flip_count(mask, soft != 0, backend="triton")
        both = kernels.transposable_mask(w, backend="triton")
        q, scale = kernels.quantize_fp8(soft, "e4m3", backend="triton")
        return grad, soft, flips, both, kernels.dequantize_fp8(q, scale, backend="triton")

    compiled = torch.compile(chain, backend="aot_eager", fullgraph=True)
    for got, expected in zip(compiled(X, X.clone()), chain(X, X.clone()), strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=0)


def test_results_follow_channels_last_weights():
    w = nasty((8, 16, 3, 3), 4).contiguous(memory_format=torch.channels_last)
    for dim in (0, 1):
        expected = kernels.nm_mask(w, dim=dim, backend="reference")
        assert_same(kernels.nm_mask(w, dim=dim, backend="triton"), expected)


def test_sampling_compiles_to_one_graph():
    def sample(x, clock):
        step = clock[0]
        key = kernels.noise_key(5, step, 2, 1, offset=step)
        derived = kernels.ClockKey(clock, 5, 2, 1, x.shape[0] // 4)
        micro = kernels.mvue(x, dim=0, key=derived, backend="triton")
        pruned = kernels.mvue(x, dim=0, key=key, backend="triton")
        exact = kernels.mvue(x, estimator="exact", key=key, backend="triton")
        random = kernels.prune_gradient(x, variant="random", key=key, backend="triton")
        largest = kernels.prune_gradient(x, variant="rescaled", backend="triton")
        noise = kernels.uniform_noise(key, 4, 6, 2, x.device, backend="triton")
        return pruned, micro, exact, random, largest, *noise

    compiled = torch.compile(sample, backend="aot_eager", fullgraph=True)
    for clock in (CLOCK, CLOCK + 1):  # one graph for all steps
        for got, expected in zip(compiled(X, clock), sample(X, clock), strict=True):
            assert_same(got, expected)
    for got, offset in zip(sample(X, CLOCK), (3, 2), strict=False):
        assert_same(got, kernels.mvue(X, dim=0, key=kernels.noise_key(5, 3, 2, 1, offset)))


@pytest.mark.parametrize("name", ["geglu", "swiglu"])
def test_gradients_in_one_graph(name):
    def loss(x):
        return (getattr(kernels, name)(x, backend="triton") ** 2).sum()

    eager, graph = X.clone().requires_grad_(), X.clone().requires_grad_()
    loss(eager).backward()
    torch.compile(loss, backend="aot_eager", fullgraph=True)(graph).backward()
    assert_same(graph.grad, eager.grad)


def test_seeds_are_keys():
    seed = 2**40 + 3
    expected = kernels.mvue(X, key=NoiseKey.from_seed(seed), backend="triton")
    assert_same(kernels.mvue(X, key=seed, backend="triton"), expected)


def test_fp64_and_unknown_backends_are_refused():
    with pytest.raises(ValueError, match=r"nm_mask: backend='triton' has no torch.float64 kernel"):
        kernels.nm_mask(X.double(), backend="triton")
    with pytest.raises(ValueError, match="unknown backend 'cuda'"):
        kernels.nm_mask(X, backend="cuda")
