"""Every combination of precision, layout and product on fake CUDA tensors, which have no data.

torch applies its rules for CUDA to them: layouts of ``_scaled_mm``, types of ``mm``, devices. The
kernels of this package are their fake rules, so each combination has to keep the shapes that a GPU
would give.
"""

import functools
import itertools

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from sparsepretrain import kernels
from sparsepretrain.sparsity.matmuls.fp8 import fp8_matmuls
from sparsepretrain.sparsity.matmuls.geometry import Linear
from sparsepretrain.sparsity.matmuls.sparse24 import PACKED, cannot_pack, packing
from sparsepretrain.sparsity.matmuls.three import DENSE, MATMUL_OF, Estimate, MatmulCall

SIZES = {"emulate": [(3072, 768), (1376, 512), (20, 36)]}
"""(out_features, in_features): those that fit, an FFN of Llama 60M, and one below a tile."""
FP8_SIZES = [(3072, 768), (1376, 2736)]
BASES = {
    "emulate": DENSE,
    **{f"fp8 {recipe}": fp8_matmuls(recipe, False) for recipe in ("hybrid", "e4m3")},
    **{
        f"fp8_sim {recipe}": fp8_matmuls(recipe, True) for recipe in ("hybrid", "reference", "e4m3")
    },
}
LAYOUTS = list(
    itertools.product(
        (torch.bfloat16, torch.float16, torch.float32),
        (1, 0),  # nn.Linear and Conv1D
        (False, True),  # with a bias
        ((4, 1024), (3, 40), (7,)),  # tokens
        (False, True),  # with another weight for dgrad
    )
)


def combinations(base):
    """All packings that ``base`` and the dtype of the layer allow, with layouts."""
    packings = [p for k in range(4) for p in itertools.combinations(PACKED, k)]
    for (dtype, *layout), packs in itertools.product(LAYOUTS, packings):
        both_dgrads = {"B", "P"} <= {*packs}
        refused = any(cannot_pack(getattr(base, MATMUL_OF[name]), dtype) for name in packs)
        if not both_dgrads and not refused:
            yield packing(base, "".join(packs)), dtype, *layout


@pytest.fixture
def hopper(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)


@pytest.mark.parametrize(
    ("name", "sizes"), [(name, sizes) for name in BASES for sizes in SIZES.get(name, FP8_SIZES)]
)
def test_all_products_keep_the_rules_of_cuda(name, sizes, hopper):
    prepared = functools.cache(prepare)
    with FakeTensorMode(), torch.no_grad():
        for products, dtype, dim, has_bias, tokens, two_weights in combinations(BASES[name]):
            try:
                operands = prepared(products, sizes, dtype, dim, two_weights)
                three_products(products, operands, sizes, dtype, dim, has_bias, tokens)
            except Exception as error:
                case = dtype, dim, has_bias, tokens, two_weights
                raise AssertionError(f"{products!r} {case}: {error}") from error


def draw(*shape, dtype=torch.float32):
    return torch.empty(shape, device="cuda:0", dtype=dtype)


def prepare(products, sizes, dtype, dim, two_weights):
    weight = draw(*sizes) if dim else draw(*reversed(sizes)).t()
    weights = weight, weight.clone() if two_weights else None, None, dtype
    # into the same memory, as after a step
    return products.prepare(*weights, products.prepare(*weights))


def three_products(products, operands, sizes, dtype, dim, has_bias, tokens):
    out, inputs = sizes

    def estimate(grad, order):
        return kernels.mvue(grad.view(-1, out), dim=0, key=3, order=order).view(grad.shape)

    def check(result, shape):
        assert result.shape == shape and result.is_cuda, (result.shape, shape)
        assert result.is_contiguous(), result.stride()

    fprop, dgrad, wgrad = products
    how, stored = Linear(dim), sizes if dim else sizes[::-1]
    x, grad = draw(*tokens, inputs, dtype=dtype), draw(*tokens, out, dtype=dtype)
    bias = draw(out, dtype=dtype) if has_bias else None
    y = fprop(MatmulCall("fprop", how, grad.shape, dtype), fprop.prepare(x, "Xf"), operands.A, bias)
    check(y, grad.shape)
    assert y.dtype == dtype
    b = operands.A if operands.B is None else operands.B
    check(dgrad(MatmulCall("dgrad", how, x.shape, dtype), dgrad.prepare(grad, "P"), b), x.shape)
    u, kept = wgrad.prepare(Estimate(grad, estimate), "U"), wgrad.prepare(x, "Xw")
    check(wgrad(MatmulCall("wgrad", how, stored, torch.float32), u, kept), torch.Size(stored))


class Operators(TorchDispatchMode):
    """Names of the operators that return a tensor of ``size`` entries in memory of its own."""

    def __init__(self, size):
        super().__init__()
        self.size, self.names = size, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **kwargs or {})
        first = result[0] if isinstance(result, tuple) else result
        if isinstance(first, torch.Tensor) and first.numel() == self.size and not func.is_view:
            self.names.append(func._schema.name.split("::")[1])
        return result


@pytest.mark.parametrize("dim", [1, 0])
@pytest.mark.parametrize("packs", ["", "U"])
def test_fp8_wgrad_samples_quantizes_and_multiplies_g_without_copies(packs, dim, hopper):
    """The sample is drawn from G in bf16 and lies along the tokens, as both matmuls read it."""
    base = fp8_matmuls("e4m3", False)
    wgrad = (packing(base, packs) if packs else base).wgrad
    out, inputs = 3072, 768
    with FakeTensorMode(), torch.no_grad():
        grad = draw(2, 1024, out, dtype=torch.bfloat16)
        kept = wgrad.prepare(draw(2, 1024, inputs, dtype=torch.bfloat16), "Xw")

        def sample(x, order):
            rows = x.view(-1, out)
            return kernels.mvue(rows, dim=0, key=3, order=order).view(x.shape)

        stored = (out, inputs) if dim else (inputs, out)
        with Operators(grad.numel()) as found:
            prepared = wgrad.prepare(Estimate(grad, sample), "U")
            wgrad(MatmulCall("wgrad", Linear(dim), stored, torch.float32), prepared, kept)
    assert found.names == ["mvue", "quantize_fp8"]
