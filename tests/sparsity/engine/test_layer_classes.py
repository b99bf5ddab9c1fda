"""Layers with a forward of their own: a cast of the weight is accepted, everything else refused."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import sparsepretrain as sp
from sparsepretrain.errors import ConfigError


class Nanochat(nn.Linear):
    """``Linear`` of karpathy/nanochat."""

    def forward(self, x):
        return F.linear(x, self.weight.to(dtype=x.dtype))


class Casted(nn.Linear):
    """``CastedLinear`` of KellerJordan/modded-nanogpt, without its fp8 branch."""

    def __init__(self, inputs, outputs, **_):
        super().__init__(inputs, outputs, bias=False)
        self.use_fp8 = False

    def forward(self, x):
        if self.use_fp8 and self.training:
            raise NotImplementedError
        return F.linear(x, self.weight.type_as(x))


class WithBias(nn.Linear):
    def forward(self, x):
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return F.linear(x, self.weight.to(x.dtype), bias)


class Inherited(nn.Linear):
    def forward(self, x):
        return super().forward(x)


class Convolution(nn.Conv2d):
    def forward(self, x):
        weight, bias = self.weight.to(x.dtype), self.bias.to(x.dtype)
        return F.conv2d(x, weight, bias, self.stride, self.padding, self.dilation, self.groups)


class Scaled(nn.Linear):
    def forward(self, x):
        return F.linear(x, self.weight, self.bias) * 1.001


class Dropped(nn.Linear):
    def forward(self, x):
        return F.dropout(F.linear(x, self.weight, self.bias), 0.1, self.training)


class Rounded(nn.Linear):
    """The forward of quantization-aware training."""

    def forward(self, x):
        return F.linear(x, self.weight + (self.weight.round() - self.weight).detach(), self.bias)


class NoGradient(nn.Linear):
    def forward(self, x):
        return F.linear(x, self.weight.detach(), self.bias)


class LowRank(nn.Linear):
    """Equal to nn.Linear at first, as adapters are."""

    def __init__(self, inputs, outputs, **_):
        super().__init__(inputs, outputs)
        self.left = nn.Parameter(torch.zeros(outputs, 2))
        self.right = nn.Parameter(torch.randn(2, inputs))

    def forward(self, x):
        return F.linear(x, self.weight, self.bias) + x @ self.right.t() @ self.left.t()


class OwnInput(nn.Linear):
    def forward(self, x):
        return F.linear(x.relu(), self.weight, self.bias)


def network(cls, **options):
    torch.manual_seed(0)
    return nn.Sequential(cls(16, 32, **options), nn.ReLU(), cls(32, 16, **options))


CASTS = [(Nanochat, {"bias": False}), (Casted, {}), (WithBias, {}), (WithBias, {"bias": False})]


@pytest.mark.parametrize(("cls", "options"), CASTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("method", ["dense", "sste", "srste"])
def test_a_layer_that_casts_its_weight_runs_in_the_dtype_of_its_input(cls, options, dtype, method):
    dense, sparse = network(cls, **options), network(cls, **options)
    handle = sp.sparsify(sparse, method, targets=["*"], total_steps=10)
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(1)).to(dtype)
    y = sparse(x)
    assert y.dtype == dtype
    y.float().square().mean().backward()
    assert sparse[0].weight.grad.dtype == torch.float32
    if method == "dense":
        assert torch.equal(y, dense(x))
        return
    sp.densify(sparse)
    assert type(sparse[0]) is cls
    torch.testing.assert_close(sparse(x), y, rtol=2**-7, atol=2**-7)
    assert handle.method.options.name == method


@pytest.mark.parametrize("method", ["ste", "slope"])
def test_adapters_and_steps_work_in_bf16(method):
    model = network(Nanochat, bias=False)
    more = {"adapters": {"rank": 4, "start": 0.0}} if method == "slope" else {}
    handle = sp.sparsify(model, method, targets=["*"], total_steps=4, **more)
    optimizer = torch.optim.AdamW(model.parameters())
    handle.attach(optimizer)
    handle.store_operands(torch.bfloat16)
    for _ in range(2):
        model(torch.randn(8, 16, dtype=torch.bfloat16)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert handle.completed_steps == 2 and handle.prove().holds


def test_a_forward_that_calls_that_of_the_base_class_is_accepted():
    model = network(Inherited)
    sp.sparsify(model, "ste", targets=["*"])
    assert model(torch.randn(2, 16)).shape == (2, 16)


def test_a_convolution_that_casts_its_weight_is_accepted():
    model = nn.Sequential(Convolution(8, 8, 3, stride=2, padding=1, dilation=2, groups=2))
    sp.sparsify(model, "srste", targets=["*"])
    assert model(torch.randn(2, 8, 12, 12, dtype=torch.bfloat16)).dtype == torch.bfloat16


@pytest.mark.parametrize("cls", [Scaled, Dropped, Rounded, NoGradient, LowRank, OwnInput])
def test_another_forward_is_refused(cls):
    with pytest.raises(ConfigError, match=r"layer '0' \(\w+\) has a forward .*: exclude it"):
        sp.sparsify(network(cls), "ste", targets=["*"])


def test_comparing_a_forward_changes_no_state():
    before = torch.get_rng_state()
    with torch.device("meta"), torch.no_grad():
        model = nn.Sequential(Nanochat(16, 32, bias=False))
    sp.sparsify(model, "ste", targets=["*"])
    assert torch.equal(torch.get_rng_state(), before)


class CastsInput(nn.Linear):
    """In the dtype of its weight, whatever the input has."""

    def forward(self, x):
        return F.linear(x.to(self.weight.dtype), self.weight, self.bias)


class WithoutAutocast(nn.Linear):
    def forward(self, x):
        with torch.autocast(x.device.type, enabled=False):
            return F.linear(x, self.weight.to(x.dtype))


@pytest.mark.parametrize("cls", [CastsInput, WithoutAutocast])
def test_forwards_in_other_dtypes_are_refused(cls):
    with pytest.raises(ConfigError, match="a forward that is not"):
        sp.sparsify(network(cls), "ste", targets=["*"])


def test_a_forward_that_was_set_on_the_object_is_refused():
    model = nn.Sequential(nn.Linear(16, 16))
    model[0].forward = lambda x: x
    with pytest.raises(ConfigError, match="'0' \\(Linear\\) has a forward of its own object"):
        sp.sparsify(model, "ste", targets=["*"])


def test_draws_of_the_user_go_on_as_before():
    model = network(Nanochat, bias=False)
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    sp.sparsify(model, "ste", targets=["*"])
    assert torch.equal(torch.rand(3), expected)
