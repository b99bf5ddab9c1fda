"""The kernels as PyTorch operations: schemas, fake tensors, graphs, refusals."""

import pytest
import torch
from parity import nasty
from same_bits import DEVICE, assert_same

from sparsepretrain import kernels
from sparsepretrain.kernels.triton import fp8, masks, nm, soft, transposable

X = nasty((8, 16), 0, special=False)
MASK = X > 0
Q = X.to(torch.float8_e4m3fn)
ONE = torch.ones((), device=DEVICE)
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
    "unpack_24": (masks.unpack_24, (torch.arange(8, dtype=torch.uint8), [8, 8])),
    "quantize_fp8": (fp8.quantize_fp8, (X, "e4m3")),
    "dequantize_fp8": (fp8.dequantize_fp8, (Q, ONE)),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_operations_have_schemas_and_fake_rules(name):
    op, arguments = OPERATIONS[name]
    tests = ("test_schema", "test_faketensor")
    if name == "dequantize_fp8":  # opcheck itself cannot compare fp8 inputs
        tests = ("test_faketensor",)
    torch.library.opcheck(op, arguments, test_utils=tests)


@pytest.mark.parametrize("name", OPERATIONS)
def test_result_strides_equal_the_fake_ones(name):
    op, arguments = OPERATIONS[name]
    for x in (X, X.t().contiguous().t(), torch.stack([X, X], -1)[..., 0]):
        if not (isinstance(arguments[0], torch.Tensor) and arguments[0].shape == X.shape):
            continue
        converted = x.to(arguments[0].dtype)
        torch.library.opcheck(op, (converted, *arguments[1:]), test_utils=("test_faketensor",))


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


def test_fp64_and_unknown_backends_are_refused():
    with pytest.raises(ValueError, match=r"nm_mask: backend='triton' has no torch.float64 kernel"):
        kernels.nm_mask(X.double(), backend="triton")
    with pytest.raises(ValueError, match="unknown backend 'cuda'"):
        kernels.nm_mask(X, backend="cuda")
