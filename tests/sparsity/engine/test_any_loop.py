"""Loops that do what loops do: the result is right, or one line says what is wrong."""

import copy
import itertools
import warnings

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.func import functional_call
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

import sparsepretrain as sp
from sparsepretrain.errors import ConfigError, SparsePretrainWarning
from sparsepretrain.kernels import nm_mask
from support.small_loops import attached, gradients, said, through_disk, train
from support.small_models import Net, draw
from support.sparse_cases import TRAINED, build, optimizer_for, sparsify
from support.tiny_runs import assert_equal_bits


@pytest.fixture
def silent():
    """Our warnings are errors."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", SparsePretrainWarning)
        yield


def masked(weight, n=2, m=4):
    return weight * nm_mask(weight, n, m)


def plain(weights, x, project):
    """What ``Net`` computes when its two sparse layers hold ``project(weight)``."""
    model = Net()
    model.load_state_dict({k: v for k, v in weights.items() if k in model.state_dict()})
    with torch.no_grad():
        for layer in (model.fc1, model.fc2):
            layer.weight.copy_(project(layer.weight))
        return model(x)


@pytest.fixture
def one_rank(tmp_path):
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


def test_adapters_that_a_wrapper_does_not_know_are_refused(one_rank):
    """DistributedDataParallel would train them on each rank with the gradient of that rank."""
    options = {"total_steps": 4, "adapters": {"rank": 2, "start": 0.25}}
    wrapped = DistributedDataParallel(nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 16)))
    before = {*wrapped.state_dict()}
    with pytest.raises(ConfigError, match="call sparsify first"):
        sp.sparsify(wrapped, "slope", targets=["*"], **options)
    assert {*wrapped.state_dict()} == before and type(wrapped.module[0]) is nn.Linear
    assert not wrapped._forward_pre_hooks
    sp.sparsify(wrapped.module, "slope", targets=["*"], **options)
    wrapped.module(torch.ones(2, 16))  # without the wrapper
    for _ in range(2):
        with pytest.raises(ConfigError, match="call sparsify first"):
            wrapped(torch.ones(2, 16))
    ignored = nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 16))
    outer = nn.ModuleDict({"net": ignored})
    outer.forward = lambda x: outer["net"](x)
    sp.sparsify(ignored, "slope", targets=["*"], **options)
    names = [name for name, _ in outer.named_parameters() if "sparsity" in name]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(outer, names)
    DistributedDataParallel(outer)(torch.ones(2, 16))
    model = nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 16))
    handle = sp.sparsify(model, "slope", targets=["*"], **options)
    wrapped = DistributedDataParallel(model, find_unused_parameters=True)
    optimizer = attached(handle, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(3):
        wrapped(torch.ones(2, 16)).sum().backward()
        optimizer.step()
    other = DistributedDataParallel(nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 16)))
    sp.sparsify(other, "srste", targets=["*"])  # it adds no Parameter
    other(torch.ones(2, 16))


@pytest.mark.parametrize("training", [True, False])
def test_edits_through_data_take_effect(training):
    model, _, handle = build("ste")
    model.train(training)
    x = draw(4, 16)
    model(x)
    kept = {k: p.detach().clone() for k, p in model.named_parameters()}
    for parameter in model.parameters():  # how averages are swapped in; bumps no version
        parameter.data.copy_(draw(*parameter.shape, seed=7))
    swapped = dict(model.named_parameters())
    torch.testing.assert_close(model(x), plain(swapped, x, masked))
    assert torch.equal(handle.masks()["fc1"], nm_mask(model.fc1.weight))
    for key, parameter in model.named_parameters():
        parameter.data = kept[key]
    torch.testing.assert_close(model(x), plain(kept, x, masked))
    model.fc1.weight.data.mul_(-2.0)
    expected = masked(model.fc1.weight.detach())
    sp.densify(model)
    assert torch.equal(model.fc1.weight, expected), "of the weight as it is now"


def test_functional_call_projects_its_own_weights():
    model, _, _ = build("sste", {"gamma": 0.3})
    x = draw(4, 16)
    names = [k for k, _ in model.named_parameters()]
    own = model.fc1.operands
    for seed in range(50):  # temporary tensors, which share addresses
        weights = {k: draw(*model.get_parameter(k).shape, seed=seed) for k in names}
        other = Net()
        with torch.no_grad():
            for key, value in weights.items():
                layer = getattr(model, key.split(".")[0])
                sparse = key.endswith("weight") and hasattr(layer, "sparsity")
                value = layer.operands.project(value).forward if sparse else value
                other.get_parameter(key).copy_(value)
        assert torch.equal(functional_call(model, weights, x), other(x))
        del weights
    assert own._kept == {}


@pytest.mark.filterwarnings("ignore:There is a performance drop because we have not yet")
@pytest.mark.parametrize("transform", [torch.vmap, torch.func.grad])
def test_function_transforms_are_refused(transform):
    model, _, _ = build("ste")
    weights = {k: torch.stack([p.detach()] * 3) for k, p in model.named_parameters()}
    if transform is torch.func.grad:
        weights = {k: p.detach() for k, p in model.named_parameters()}
    x = draw(4, 16)
    for training in (True, False):
        model.train(training)
        with pytest.raises(RuntimeError, match=r"functorch transforms.*setup_context"):
            transform(lambda w: functional_call(model, w, x).sum())(weights)


@pytest.mark.parametrize("phase", ["dense", "sparse"])
@pytest.mark.parametrize("method", ["ste", "sste"])
def test_second_derivatives_are_correct_or_refused(method, phase):
    window = {"start": 0.5} if phase == "dense" else {}
    model, _, _ = build(method, {"window": window})
    x = draw(4, 16).requires_grad_()
    (slope,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    if phase == "sparse":
        with pytest.raises(RuntimeError, match="once_differentiable"):
            slope.square().sum().backward()
        return
    slope.square().sum().backward()
    other = Net()
    (slope,) = torch.autograd.grad(other(x).square().sum(), x, create_graph=True)
    slope.square().sum().backward()
    assert_equal_bits(gradients(model), gradients(other))


AVERAGED = [
    ("ste", {"window": {"start": 0.05}}, lambda w: masked(w)),
    ("ste", {"window": {"stop": 0.1}}, lambda w: w),
    ("sdgf", {"until": 0.1}, lambda w: masked(w)),
    ("sdgf", {"until": 0.5, "n": 1, "m": 8}, lambda w: masked(w, 7, 8)),
    ("mdgf", {"until": 0.1}, lambda w: masked(w)),
    ("step", {}, lambda w: masked(w)),
    ("tsrste", {"dense_tail": 0.9}, lambda w: w),
]
"""Method, options, and what evaluation makes of a weight after 5 of 40 steps."""


@pytest.mark.filterwarnings("ignore:StepAdamW switched")
@pytest.mark.parametrize(("method", "options", "project"), AVERAGED)
def test_averages_that_copy_buffers_follow_the_phases(method, options, project, silent):
    model, optimizer, _ = build(method, options)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    expected = {k: p.detach().clone() for k, p in model.named_parameters()}
    for step in range(5):
        train(model, optimizer, step, step + 1)
        average.update_parameters(model)
        for key, parameter in model.named_parameters():
            expected[key].lerp_(parameter.detach(), 0.5 if step else 1.0)
    x = draw(4, 16)
    average.eval()
    reference = plain(expected, x, project)
    torch.testing.assert_close(average(x), reference)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "(ste|tsrste) evaluates dense weights")
        warnings.filterwarnings("ignore", "sdgf 1:8 has not reached its pattern")
        sp.densify(average)
    torch.testing.assert_close(average(x), reference)
    assert type(average.module.fc1) is nn.Linear and type(model.fc1) is not nn.Linear


@pytest.mark.parametrize("method", ["ste", "sdgf"])
def test_averaged_counters_are_refused(method):
    model, optimizer, _ = build(method)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5), use_buffers=True)
    for step in range(3):
        train(model, optimizer, step, step + 1)
        average.update_parameters(model)
    with pytest.raises(ConfigError, match="were averaged"):
        average(draw(4, 16))
    with pytest.raises(ConfigError, match="were averaged"):
        sp.densify(average)


class Bypassed(nn.Module):
    """A sparsified module whose forward nobody calls."""

    def __init__(self):
        super().__init__()
        self.net = Net()

    def encode(self, x):
        return self.net.fc2(torch.tanh(self.net.fc1(x)))

    forward = encode


CALLS = {
    "root": lambda model, x: model(x),
    "part": lambda model, x: model.net(x),
    "method": lambda model, x: model.encode(x),
    "twice": lambda model, x: model.encode(model.encode(x)),
    "reentrant": lambda model, x: checkpoint(model.encode, x, use_reentrant=True),
    "saved": lambda model, x: checkpoint(model.encode, x, use_reentrant=False),
    "reentrant root": lambda model, x: checkpoint(model, x, use_reentrant=True),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_noise_is_equal_for_every_way_to_call_the_model(call):
    results = []
    x, g = draw(8, 8, 16).requires_grad_(), draw(8, 8, 16, seed=1)
    for size in (8, 4, 2):
        model = Bypassed()
        handle = sparsify(model, "sste", targets=["*fc*"])
        optimizer = attached(handle, torch.optim.SGD(model.parameters(), lr=0.1))
        for _ in range(2):  # the second step counts micro-batches from 0
            optimizer.zero_grad()
            for i in range(0, 8, size):
                y = call(model, x[i : i + size])
                (y * g[i : i + size, :, : y.shape[-1]]).sum().backward()
            optimizer.step()
        assert handle._state.clock.micro == 0 and handle.completed_steps == 2
        results.append([p.grad for p in (*model.net.fc1.parameters(), model.net.fc2.weight)])
    for other in results[1:]:
        torch.testing.assert_close(other, results[0], rtol=1e-9, atol=1e-11)


def test_two_sparsifiers_of_one_seed_draw_differently():
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)).double()
    model[1].load_state_dict(model[0].state_dict())
    first, second = (sp.sparsify(model, "sste", targets=[name], seed=3) for name in "01")
    x, g = draw(64, 16), draw(64, 16, seed=1)
    for layer in model:
        (layer(x) * g).sum().backward()
    assert not torch.allclose(model[0].weight.grad, model[1].weight.grad)
    names = {k for k, _ in model.named_buffers() if "." not in k}
    ends = ("", "_2")
    assert names == {f"sparsity_{kind}{end}" for kind in ("counters", "method") for end in ends}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    first.attach(optimizer)
    second.attach(optimizer)
    optimizer.step()
    assert (first.completed_steps, second.completed_steps) == (1, 1)
    with pytest.raises(ConfigError, match="2 sparse parts"):
        sp.sparsifier_of(model)


class SAM(torch.optim.Optimizer):
    """Sharpness-aware minimization, as it is usually written (arXiv:2010.01412)."""

    def __init__(self, params, base, rho=0.05, **options):
        super().__init__(params, {"rho": rho, **options})
        self.base_optimizer = base(self.param_groups, **options)
        self.param_groups = self.base_optimizer.param_groups
        self.defaults.update(self.base_optimizer.defaults)

    @torch.no_grad()
    def first_step(self):
        ps = [p for group in self.param_groups for p in group["params"]]
        norm = torch.stack([p.grad.norm() for p in ps]).norm()
        for p in ps:
            self.state[p]["old_p"] = p.data.clone()
            p.add_(p.grad * (self.param_groups[0]["rho"] / (norm + 1e-12)))
        self.zero_grad()

    @torch.no_grad()
    def second_step(self):
        for group in self.param_groups:
            for p in group["params"]:
                p.data = self.state[p]["old_p"]
        self.base_optimizer.step()
        self.zero_grad()

    @torch.no_grad()
    def step(self, closure):
        with torch.enable_grad():
            closure()
        self.first_step()
        with torch.enable_grad():
            closure()
        self.second_step()


def sam_loop(model, optimizer, style, steps=3):
    x, g = draw(8, 16), draw(8, 5, seed=1)

    def closure():
        (model(x) * g).sum().backward()

    for _ in range(steps):
        if style == "closure":
            optimizer.step(closure)
        else:
            closure()
            optimizer.first_step()
            closure()
            optimizer.second_step()
        optimizer.zero_grad()


@pytest.mark.parametrize("style", ["closure", "two_steps"])
def test_sam_equals_manual_steps_when_attached_to_its_base_optimizer(style, silent):
    model = Net()
    handle = sparsify(model, "srste", decay=0.1)
    optimizer = SAM(model.parameters(), torch.optim.SGD, lr=0.1)
    handle.attach(optimizer.base_optimizer)
    sam_loop(model, optimizer, style)
    assert handle.completed_steps == 3
    plain, sparse = Net(), ("fc1.weight", "fc2.weight")

    def slopes(weights):
        used = {k: masked(w) if k in sparse else w for k, w in weights.items()}
        used = {k: w.clone().requires_grad_() for k, w in used.items()}
        loss = (functional_call(plain, used, draw(8, 16)) * draw(8, 5, seed=1)).sum()
        return dict(zip(used, torch.autograd.grad(loss, list(used.values())), strict=True))

    weights = {k: p.detach() for k, p in plain.named_parameters()}
    for _ in range(3):
        ascent = slopes(weights)
        factor = 0.05 / (torch.stack([g.norm() for g in ascent.values()]).norm() + 1e-12)
        slope = slopes({k: w + ascent[k] * factor for k, w in weights.items()})
        for k in sparse:
            slope[k] += 0.1 * ~nm_mask(weights[k]) * weights[k]
        weights = {k: w - 0.1 * slope[k] for k, w in weights.items()}
    torch.testing.assert_close(dict(model.named_parameters()), weights)


def test_sam_may_be_attached_itself_when_it_steps_by_closure(silent):
    model = Net()
    handle = sparsify(model, "srste")
    optimizer = attached(handle, SAM(model.parameters(), torch.optim.SGD, lr=0.1))
    sam_loop(model, optimizer, "closure")
    assert handle.completed_steps == 3


def test_step_of_an_unattached_base_optimizer_warns_once(recwarn):
    model = Net()
    optimizer = SAM(model.parameters(), torch.optim.SGD, lr=0.1)
    sparsify(model, "srste").attach(optimizer)
    sam_loop(model, optimizer, "two_steps", steps=70)
    (message,) = said(recwarn)
    assert "'fc1'" in message and "SAM" in message


def test_second_optimizer_warns_once(recwarn):
    model, optimizer, handle = build("srste")
    train(model, optimizer, 0, 2)
    assert said(recwarn) == []
    second = torch.optim.SGD(model.parameters(), lr=0.1)
    train(model, second, 2, 70)
    (message,) = said(recwarn)
    assert "'fc1'" in message and "AdamW" in message and handle.completed_steps == 2


def test_unattached_copy_warns_once_and_attached_copy_equals_its_source(recwarn):
    model, optimizer, _ = build("srste", {"window": {"start": 0.1}})
    train(model, optimizer, 0, 2)
    copied = copy.deepcopy(model)
    train(copied, torch.optim.SGD(copied.parameters(), lr=0.1), 0, 3)
    (message,) = said(recwarn)
    assert "sparsifier_of(model)" in message
    right = copy.deepcopy(model)
    handle = sp.sparsifier_of(right)
    other = torch.optim.AdamW(right.parameters(), lr=1e-2)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    handle.attach(other)
    train(model, optimizer, 2, 6)
    train(right, other, 2, 6)
    assert_equal_bits(right.state_dict(), model.state_dict())
    assert handle.sparse and handle.completed_steps == 6 and len(said(recwarn)) == 1


def test_decay_is_applied_once_after_sparsifying_again(silent):
    model, optimizer, _ = build("srste", {"decay": 0.1}, cls=torch.optim.SGD, lr=0.1)
    train(model, optimizer, 0, 2)
    sp.densify(model)
    again = sparsify(model, "srste", decay=0.1)
    again.attach(optimizer)
    other = Net()
    other.load_state_dict({k: v for k, v in model.state_dict().items() if "sparsity" not in k})
    fresh = sparsify(other, "srste", decay=0.1)
    second = attached(fresh, torch.optim.SGD(other.parameters(), lr=0.1))
    train(model, optimizer, 0, 3)
    train(other, second, 0, 3)
    assert_equal_bits(dict(model.named_parameters()), dict(other.named_parameters()))
    assert again.completed_steps == 3
    for handle in (sp.sparsifier_of(model), again):
        with pytest.raises(ConfigError, match="attached to another SGD"):
            handle.attach(torch.optim.SGD(model.parameters(), lr=0.1))
    again.detach()
    assert not optimizer._optimizer_step_pre_hooks and not optimizer._optimizer_step_post_hooks


@pytest.mark.parametrize("method", [name for name in TRAINED if name != "mine"])
@pytest.mark.parametrize("held", [True, False])
def test_frozen_weights_are_sparse_and_never_written(method, held, silent):
    model = Net()
    options = {"decay": 0.1, "decay_on": "weight"} if method == "srste" else {}
    handle = sparsify(model, method, **options)
    model.fc1.weight.requires_grad_(False)
    before = model.fc1.weight.detach().clone()
    chosen = [p for p in model.parameters() if held or p.requires_grad]
    optimizer = attached(handle, optimizer_for(method, chosen, weight_decay=0.1))
    trained = model.fc2.weight.detach().clone()
    for _ in range(25):  # past every switch; data do not matter
        draw_loss(model).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert torch.equal(model.fc1.weight, before) and model.fc1.weight.grad is None
    assert not torch.equal(model.fc2.weight, trained)
    if handle.sparse and method not in ("sdgp", "act24"):
        zeros = (model.fc1.operands.project(before).forward == 0).double().mean()
        assert zeros == 0.5 or (method == "ternary" and 0.5 < zeros < 0.6)


def draw_loss(model):
    return model(draw(8, 16)).square().mean()


@pytest.mark.parametrize("method", ["srste", "sste", "tsrste"])
def test_pickled_model_trains_to_the_same_bits(method):
    model, optimizer, handle = build(method, {"window": {"start": 0.05}})
    handle.store_operands()
    train(model, optimizer, 0, 3)
    other, state = through_disk((model, optimizer.state_dict()), weights_only=False)
    again = sp.sparsifier_of(other)
    second = torch.optim.AdamW(other.parameters(), lr=1e-2)
    second.load_state_dict(state)
    again.attach(second)
    train(model, optimizer, 3, 5, micro=4)
    train(other, second, 3, 5, micro=4)
    assert_equal_bits(other.state_dict(), model.state_dict())
    for copied in (other, copy.deepcopy(model)):
        assert copied._forward_pre_hooks and copied._load_state_dict_pre_hooks
        sp.densify(copied)
        assert not copied._forward_pre_hooks and not copied._load_state_dict_pre_hooks
        assert list(copied.state_dict()) == list(Net().state_dict())
    assert model._forward_pre_hooks and again.completed_steps == handle.completed_steps


@pytest.mark.parametrize(
    ("method", "options", "part"),
    [("srste", {}, "root"), ("sste", {"mvue": "none"}, "layers"), ("bimask", {}, "root")],
)
def test_stored_operands_compile_once(method, options, part):
    results, counter = [], CompileCounterWithBackend("eager")
    torch._dynamo.reset()
    for compiled in (False, True):
        model, optimizer, handle = build(method, options, cls=torch.optim.SGD, lr=0.01)
        handle.store_operands()
        if compiled and part == "root":
            model.compile(backend=counter)
        elif compiled:
            model.fc1.compile(backend=counter, fullgraph=True)
            model.fc2.compile(backend=counter, fullgraph=True)
        train(model, optimizer, 0, 2, micro=4)
        once = counter.frame_count
        train(model, optimizer, 2, 6, micro=4)
        assert counter.frame_count == once
        results.append(dict(model.named_parameters()))
    assert once > 0
    torch.testing.assert_close(results[1], results[0], rtol=1e-9, atol=1e-11)


@pytest.mark.filterwarnings("ignore:`broadcast_buffers` is deprecated")
@pytest.mark.parametrize("broadcast", [True, False])
@pytest.mark.parametrize("method", ["sste", "tsrste"])
def test_ddp_of_one_rank_is_bit_exact(method, broadcast, group, silent):
    results = []
    for wrapped in (False, True):
        model, optimizer, handle = build(method, {"window": {"start": 0.05}})
        run = DistributedDataParallel(model, broadcast_buffers=broadcast) if wrapped else model
        train(run, optimizer, 0, 4, micro=4)
        assert handle.completed_steps == 4 and handle.sparse
        results.append(copy.deepcopy(model.state_dict()))
    assert_equal_bits(*results)


def test_calls_of_one_layer_in_a_micro_batch_draw_independently():
    """Equal calls with equal draws would double the deviation of dW instead of its square."""
    model, _, sparsifier = build("sste")
    layer, x, g = model.fc1, draw(8, 16, seed=1), draw(8, 32, seed=2)

    def wgrad(calls):
        layer.weight.grad = None
        sparsifier.micro_batch(0)
        for _ in range(calls):
            layer(x).backward(g)
        return layer.weight.grad

    first = wgrad(1)
    second = wgrad(2) - first
    assert not torch.allclose(second, first)
    assert torch.equal(wgrad(1), first), "a new micro-batch begins with the first draws"
    with torch.no_grad():
        sparsifier.micro_batch(0)
        layer(x)  # draws nothing and counts for nothing
    layer.weight.grad = None
    layer(x).backward(g)
    assert torch.equal(layer.weight.grad, first)


EVALUATED = [
    ("sdgp", {}, True),
    ("act24", {}, True),
    ("sste", {}, True),
    ("tsrste", {"dense_tail": 0.0}, True),
    ("sste", {"mvue": "none"}, False),
    ("ste", {}, False),
    ("srste", {"decay": 0.1}, False),
]
"""Method, options, and if gradients of evaluation mode differ."""


@pytest.mark.parametrize("first", [0, 2])
@pytest.mark.parametrize(("method", "options", "differs"), EVALUATED)
def test_training_in_evaluation_mode_warns_where_it_differs(
    method, options, differs, first, recwarn
):
    model, optimizer, _ = build(method, options)
    train(model, optimizer, 0, first)
    model.eval()
    train(model, optimizer, first, first + 3)
    lines = said(recwarn)
    assert len(lines) == differs, lines
    assert all("evaluation mode" in line and "call model.train()" in line for line in lines)


def test_evaluation_beside_training_does_not_warn(silent):
    """With or without gradients, between the forward and the step, and of inputs alone."""
    model, optimizer, _ = build("sdgp")
    for step in range(3):
        x, gy = model.example(step)
        model.eval()
        attacked = x.clone().requires_grad_(True)
        torch.autograd.grad(model(attacked).sum(), attacked)
        model.train()
        (model(x) * gy).sum().backward()
        model.eval()
        with torch.no_grad():
            model(x)
        model.train()
        optimizer.step()
        optimizer.zero_grad()


def test_dropout_may_be_evaluated_alone(silent):
    model = nn.ModuleDict({"net": Net(), "drop": nn.Dropout(0.5)})
    handle = sp.sparsify(model, "sdgp", targets=["*.fc1"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle.attach(optimizer)
    model["drop"].eval()
    for _ in range(2):
        model["drop"](model["net"](draw(4, 16))).sum().backward()
        optimizer.step()


@pytest.mark.parametrize("after", [False, True])
def test_adapters_that_read_the_stored_weight_are_refused(after):
    from peft import LoraConfig, get_peft_model

    def adapted(model, dora):
        return get_peft_model(model, LoraConfig(target_modules=["fc1"], use_dora=dora))

    plain_lora = adapted(Net(torch.float32), dora=False)
    sp.densify(sp.sparsify(plain_lora, "ste", targets=["*.fc2"]) and plain_lora)
    model = Net(torch.float32)
    handle = sp.sparsify(model, "ste", targets=["fc1", "fc2"])
    adapted(model, dora=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ConfigError, match=r"DoRA.*use_dora=False"):
        sp.densify(model) if after else handle.attach(optimizer)


LOADS = ("model", "optimizer", "attach")


@pytest.mark.parametrize("method", ["step", "srste", "sste", "maskllm"])
@pytest.mark.parametrize("order", list(itertools.permutations(LOADS)))
def test_model_and_optimizer_are_loaded_and_attached_in_any_order(method, order):
    def made():
        model = Net()
        handle = sparsify(model, method)
        optimizer = optimizer_for(method, model.parameters())
        optimizer.clipping = (1, 3)  # read by StepAdamW
        return model, handle, optimizer

    model, handle, optimizer = made()
    handle.attach(optimizer)
    train(model, optimizer, 0, 12)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    other, again, second = made()
    for action in order:
        if action == "model":
            other.load_state_dict(saved[0])
        elif action == "optimizer":
            second.load_state_dict(saved[1])
        else:
            again.attach(second)
    assert again.sparse == handle.sparse and handle.sparse == (method != "maskllm")
    train(model, optimizer, 12, 2)
    train(other, second, 12, 2)
    assert_equal_bits(other.state_dict(), model.state_dict())
