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

from sparsepretrain import kernels
from sparsepretrain.sparsity.execution import EMULATE, FP8, Operands, SimulatedFP8
from sparsepretrain.sparsity.execution.base import Linear
from sparsepretrain.sparsity.execution.semi_structured import packings

OUT, IN = 3072, 768
BASES = {
    "emulate": EMULATE,
    **{f"fp8 {recipe}": FP8(name="fp8", recipe=recipe) for recipe in ("hybrid", "e4m3")},
    **{
        f"fp8_sim {recipe}": SimulatedFP8(name="fp8_sim", recipe=recipe)
        for recipe in ("hybrid", "reference", "e4m3")
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
    """Executions of all packings that ``base`` and the type of the products allow, with layouts."""
    chosen = packings(base) if base is EMULATE or isinstance(base, FP8) else {"": base}
    for (dtype, *layout), (packs, execution) in itertools.product(LAYOUTS, chosen.items()):
        both_dgrads = {"B", "P"} <= {*packs}
        if not both_dgrads and not any(base.unpackable(place, dtype) for place in packs):
            yield execution, dtype, *layout


@pytest.fixture
def hopper(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)


def test_number_of_combinations_is_unchanged():
    assert sum(len([*combinations(base)]) for base in BASES.values()) == 1824


@pytest.mark.parametrize("name", BASES)
def test_all_products_keep_the_rules_of_cuda(name, hopper):
    prepared = functools.cache(prepare)
    with FakeTensorMode(), torch.no_grad():
        for execution, dtype, dim, has_bias, tokens, two_weights in combinations(BASES[name]):
            try:
                operands = prepared(execution, dtype, dim, two_weights)
                three_products(execution, operands, dtype, dim, has_bias, tokens)
            except Exception as error:
                case = dtype, dim, has_bias, tokens, two_weights
                raise AssertionError(f"{execution!r} {case}: {error}") from error


def draw(*shape, dtype=torch.float32):
    return torch.empty(shape, device="cuda:0", dtype=dtype)


def prepare(execution, dtype, dim, two_weights):
    weight = draw(OUT, IN) if dim else draw(IN, OUT).t()
    exact = Operands(weight, weight.clone() if two_weights else None, None)
    operands = execution.prepare(exact, dtype, None)
    return execution.prepare(exact, dtype, operands)  # into the same memory, as after a step


def three_products(execution, operands, dtype, dim, has_bias, tokens):
    def estimate(grad, order=None):
        return kernels.mvue(grad.view(-1, OUT), dim=0, key=3, order=order).view(grad.shape)

    def check(result, shape):
        assert result.shape == shape and result.is_cuda, (result.shape, shape)

    how, stored = Linear(dim), (OUT, IN) if dim else (IN, OUT)
    x, grad = draw(*tokens, IN, dtype=dtype), draw(*tokens, OUT, dtype=dtype)
    bias = draw(OUT, dtype=dtype) if has_bias else None
    y, kept = execution.fprop(how, (x, x), operands, bias)
    check(y, grad.shape)
    assert y.dtype == dtype
    check(execution.dgrad(how, grad, operands, x.shape), x.shape)
    check(execution.wgrad(how, grad, estimate, kept, torch.Size(stored)), stored)
