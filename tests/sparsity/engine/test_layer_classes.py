"""Layers with a forward of their own: a cast of the weight is accepted, everything else refused."""

from types import SimpleNamespace

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


class Sliced(nn.Linear):
    """Megatron's padded vocabulary."""

    def __init__(self, inputs, outputs, **_):
        super().__init__(inputs, outputs)
        self.true_out = outputs - 2

    def forward(self, x):
        return F.linear(x, self.weight, self.bias)[..., : self.true_out]


class SlicedByConstant(nn.Linear):
    def forward(self, x):
        return F.linear(x, self.weight, self.bias)[..., :30]


class Clamped(nn.Linear):
    """Against overflow in fp16."""

    def forward(self, x):
        return F.linear(x, self.weight, self.bias).clamp(-50, 50)


class ClampedWeight(nn.Linear):
    def forward(self, x):
        return F.linear(x, self.weight.clamp(-50, 50), self.bias)


class ClampedInput(nn.Linear):
    def forward(self, x):
        return F.linear(x.clamp(-10, 10), self.weight, self.bias)


class WithoutNaN(nn.Linear):
    def forward(self, x):
        return F.linear(torch.nan_to_num(x), self.weight, self.bias)


class Flattens(nn.Linear):
    def forward(self, x):
        return F.linear(x.flatten(2) if x.dim() == 4 else x, self.weight, self.bias)


class ByMatrix(nn.Linear):
    def forward(self, x):
        return torch.addmm(self.bias, x, self.weight.t())


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


OTHERS = [Scaled, Dropped, Rounded, NoGradient, LowRank, OwnInput, Sliced, SlicedByConstant]
OTHERS += [Clamped, ClampedWeight, ClampedInput, WithoutNaN, Flattens, ByMatrix]


@pytest.mark.parametrize("cls", OTHERS)
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
    with pytest.raises(ConfigError, match=r"a forward that (is not|switches autocast)"):
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


class Same(nn.Conv2d):
    """Padding that depends on the size of the image, as in timm's Conv2dSame."""

    def forward(self, x):
        pads = []
        for size, k, s in zip(
            x.shape[:-3:-1], self.kernel_size[::-1], self.stride[::-1], strict=True
        ):
            pad = max((-(-size // s) - 1) * s + k - size, 0)
            pads += [pad // 2, pad - pad // 2]
        return F.conv2d(F.pad(x, pads), self.weight, self.bias, self.stride)


@pytest.mark.parametrize("kernel", [2, 3, 4])
@pytest.mark.parametrize("stride", [1, 2, 3])
def test_padding_by_the_size_of_the_image_is_refused(kernel, stride):
    layers = [Same(8, 8, kernel, stride=stride)]
    timm = pytest.importorskip("timm.layers")
    layers.append(timm.Conv2dSame(8, 8, kernel, stride=stride))
    for layer in layers:
        with pytest.raises(ConfigError, match="a forward that is not"):
            sp.sparsify(nn.Sequential(layer), "ste", targets=["*"])


class Limits(torch.autograd.Function):
    """Limits and cleans the gradient of the output."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return torch.nan_to_num(gradient, 0.0, 1e3, -1e3).clamp(-1e3, 1e3)


class OwnBackward(nn.Linear):
    def forward(self, x):
        return Limits.apply(F.linear(x, self.weight, self.bias))


class Hooked(nn.Linear):
    def forward(self, x):
        y = F.linear(x, self.weight, self.bias)
        if y.requires_grad:
            y.register_hook(lambda gradient: gradient.clamp(-100, 100))
        return y


class LimitedInHalf(nn.Linear):
    """The guard of T5's and BART's blocks in transformers."""

    def forward(self, x):
        y = F.linear(x, self.weight.to(x.dtype), self.bias)
        return y.clamp(-60000, 60000) if y.dtype == torch.float16 else y


class RoundedInDouble(nn.Linear):
    def forward(self, x):
        y = F.linear(x, self.weight.to(x.dtype), self.bias.to(x.dtype))
        return y.float().double() if y.dtype == torch.float64 else y


class RoundedWithoutGradient(nn.Linear):
    def forward(self, x):
        weight = self.weight if torch.is_grad_enabled() else (self.weight * 8).round() / 8
        return F.linear(x, weight, self.bias)


class RarelyScaled(nn.Linear):
    def forward(self, x):
        y = F.linear(x, self.weight, self.bias)
        return y * 0.5 if x.abs().max() > 1e9 else y


class ElsewhereOnDevices(nn.Linear):
    def forward(self, x):
        y = F.linear(x, self.weight, self.bias)
        return y * 2 if x.device.type == "cuda" else y


FLAGS = {"signs": False}
SIGNS = False


class ByDictionary(nn.Linear):
    def forward(self, x):
        return F.linear(x, self.weight.sign() if FLAGS["signs"] else self.weight, self.bias)


class ByGlobal(nn.Linear):
    def forward(self, x):
        return F.linear(x, self._used(), self.bias)

    def _used(self):
        return self.weight.sign() if SIGNS else self.weight


class ByType(nn.Linear):
    signs = False

    def forward(self, x):
        return F.linear(x, self.weight.sign() if type(self).signs else self.weight, self.bias)


class ByClass(nn.Linear):
    signs = False

    def forward(self, x):
        return F.linear(x, self.weight.sign() if ByClass.signs else self.weight, self.bias)


class WithoutAutocastOnGPUs(nn.Linear):
    def forward(self, x):
        with torch.autocast("cuda", enabled=False):
            return F.linear(x, self.weight.to(x.dtype), self.bias)


class WithoutOldAutocast(nn.Linear):
    """OpenFold's, and its deprecated spelling."""

    def forward(self, x):
        if x.dtype is torch.bfloat16:
            with torch.cuda.amp.autocast(enabled=False):
                return F.linear(x, self.weight.to(x.dtype), self.bias)
        return F.linear(x, self.weight, self.bias)


class AddsBias(nn.Linear):
    """Falcon's: another dtype under autocast, where a sum is not in half precision."""

    def forward(self, x):
        y = x @ self.weight.T
        return y if self.bias is None else y + self.bias


HIDDEN = {
    WithoutAutocastOnGPUs: "switches autocast",
    WithoutOldAutocast: "switches autocast",
    AddsBias: "it calls add",
    OwnBackward: "is not",
    Hooked: "it calls register_hook",
    LimitedInHalf: "is not",
    RoundedInDouble: "is not",
    RoundedWithoutGradient: "it calls .*round",
    RarelyScaled: "it calls .*max",
    ElsewhereOnDevices: "it calls device",
    ByDictionary: "reads FLAGS, which may change",
    ByGlobal: "reads SIGNS, which may change",
    ByType: "reads type, which may change",
    ByClass: r"reads ByClass\.signs, which may change",
}


@pytest.mark.parametrize("cls", HIDDEN)
def test_what_shows_only_at_times_is_refused(cls):
    with pytest.raises(ConfigError, match=HIDDEN[cls]):
        sp.sparsify(network(cls), "ste", targets=["*"])


DTYPE = torch.bfloat16
ROWS = 16


class OldStyle(nn.Linear):
    """Constants, functions, modules and its own class are no objection."""

    def forward(self, x):
        assert x.shape[-1] == ROWS and x.dtype != torch.int64 and DTYPE is not None
        return super(OldStyle, self).forward(x)  # noqa: UP008


class ChecksForEmptyBatches(nn.Conv2d):
    """detectron2's, without normalization and activation."""

    def __init__(self, *args, norm=None, activation=None):
        super().__init__(*args)
        self.norm, self.activation = norm, activation

    def forward(self, x):
        if not torch.jit.is_scripting() and x.numel() == 0 and self.training:
            assert not isinstance(self.norm, nn.SyncBatchNorm)
        x = F.conv2d(
            x, self.weight, self.bias, self.stride, self.padding, self.dilation, self.groups
        )
        if self.norm is not None:
            x = self.norm(x)
        return x if self.activation is None else self.activation(x)


def test_a_check_for_empty_batches_is_no_objection():
    sp.sparsify(nn.Sequential(ChecksForEmptyBatches(8, 8, 3)), "ste", targets=["*"])
    with_norm = ChecksForEmptyBatches(8, 8, 3, norm=nn.BatchNorm2d(8))
    with pytest.raises(ConfigError, match="further tensors"):
        sp.sparsify(nn.Sequential(with_norm), "ste", targets=["*"])


def test_a_product_without_bias_may_be_written_as_a_matmul():
    sp.sparsify(nn.Sequential(AddsBias(16, 16, bias=False)), "ste", targets=["*"])


def test_constants_of_a_module_are_no_objection():
    sp.sparsify(nn.Sequential(OldStyle(16, 16)), "ste", targets=["*"])


class Switched(nn.Linear):
    """Attributes that the forward reads may be set later."""

    def __init__(self, inputs, outputs, **options):
        super().__init__(inputs, outputs)
        self.clip = None
        self.list = options.get("list")

    def forward(self, x):
        y = F.linear(x, self.weight, self.bias)
        if self.list is not None:
            y = y * self.list[0]
        return y if self.clip is None else y.clamp(-self.clip, self.clip)


def test_attributes_that_a_forward_reads_are_fixed():
    model = network(Switched)
    sp.sparsify(model, "ste", targets=["*"])
    model[0].clip = None
    model[0].comment = 5  # read by nobody
    with pytest.raises(ConfigError, match=r"clip of a sparse Switched is read by the forward"):
        model[0].clip = 1.0
    sp.densify(model)
    model[0].clip = 1.0
    assert model[0](torch.full((1, 16), 100.0)).abs().max() <= 1.0
    model[2].clip = 1.0
    with pytest.raises(ConfigError, match="a forward that is not"):
        sp.sparsify(model, "ste", targets=["*"])


def test_layers_that_are_alike_are_compared_once(monkeypatch):
    from sparsepretrain.sparsity.engine import own_forwards

    compared = []
    compare = own_forwards._compare
    monkeypatch.setattr(own_forwards, "_known", {})
    monkeypatch.setattr(
        own_forwards, "_compare", lambda layer: compared.append(layer) or compare(layer)
    )
    layers = [Nanochat(16, 16, bias=False) for _ in range(4)]
    sp.sparsify(nn.Sequential(*layers), "ste", targets=["*"])
    assert len(compared) == 1


class OfClass(nn.Linear):
    scale = 1.0

    def forward(self, x):
        return F.linear(x, self.weight, self.bias) * self.scale


class Configured(nn.Linear):
    def __init__(self, inputs, outputs, config):
        super().__init__(inputs, outputs)
        self.config = config

    def forward(self, x):
        return F.linear(x, self.weight, self.bias) * self.config.scale


class Plain:
    scale = 1.0


class Counts(nn.Linear):
    def forward(self, x):
        self.amax = float(x.abs().max())
        return F.linear(x, self.weight, self.bias)


class Further(nn.Linear):
    def forward(self, x, scale=1.0):
        return F.linear(x, self.weight, self.bias)


MORE = [
    (Counts(16, 16), "a forward that sets amax"),
    (Further(16, 16), r"a forward with further arguments \(scale\)"),
    (Switched(16, 16, list=[1.0]), "a forward that reads list, which may change"),
    (OfClass(16, 16), "a forward that reads scale, which may change"),
    (Configured(16, 16, Plain()), "a forward that reads config, which may change"),
    (Configured(16, 16, SimpleNamespace(scale=1.0)), "a forward that reads config, which may"),
]


@pytest.mark.parametrize(("layer", "text"), MORE)
def test_forwards_that_do_more_are_refused(layer, text):
    with pytest.raises(ConfigError, match=text):
        sp.sparsify(nn.Sequential(layer), "ste", targets=["*"])
