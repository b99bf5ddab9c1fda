"""What hosts do to optimizers, weights and buffers: wrap, contain, skip, attach twice, average.

Kinds: optimizers whose step torch gives no hooks (``Optimizer.__init__`` was skipped), containers
of optimizers, a second ``attach`` to the same one, weights that leave the optimizer, and averages
that are written through ``.data``, which raises no version.
"""

import copy
import pickle
import warnings
from collections import OrderedDict

import pytest
import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from timm.optim.lookahead import Lookahead
from torch import nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

import sparsepretrain as sp
from sparsepretrain.errors import ConfigError, SparsePretrainWarning
from support.small_loops import accumulate, attached, gradients, train
from support.small_models import Net, draw
from support.sparse_cases import build, sparsify
from support.tiny_runs import assert_equal_bits


class Skips(torch.optim.Optimizer):
    """SGD that does not call ``Optimizer.__init__``."""

    def __init__(self, params, lr=0.1):
        self.param_groups = [{"params": list(params), "lr": lr}]
        self.state, self.defaults = {}, {"lr": lr}
        self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks = (
            OrderedDict(),
            OrderedDict(),
        )

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for p in self.param_groups[0]["params"]:
            p.add_(p.grad, alpha=-self.param_groups[0]["lr"])
        return loss


class Container(torch.optim.Optimizer):
    """Optimizers as torchtitan holds them: groups without a learning rate."""

    def __init__(self, model, cls=torch.optim.SGD):
        self.optimizers = [
            cls(part.parameters(), lr=0.1) for part in model.children() if [*part.parameters()]
        ]
        super().__init__([{"params": list(model.parameters())}], {})

    def step(self, closure=None):
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self, set_to_none=True):
        for optimizer in self.optimizers:
            optimizer.zero_grad()


class Whole(nn.Module):
    """A network as the only child, so that one optimizer holds all sparse weights."""

    def __init__(self):
        super().__init__()
        self.block = Net()

    def forward(self, x):
        return self.block(x)


def lookahead(params):
    return Lookahead(torch.optim.SGD(params, lr=0.1), alpha=1.0)


def closures(model, optimizer, steps):
    for step in range(steps):

        def closure(step=step):
            optimizer.zero_grad()
            loss = model(draw(8, 16, seed=step)).square().mean()
            loss.backward()
            return loss

        optimizer.step(closure)


@pytest.mark.parametrize("make", [Skips, lookahead])
@pytest.mark.parametrize("scheduler", ["none", "before attach", "after attach"])
@pytest.mark.parametrize("closure", [False, True])
def test_every_step_is_counted_of_optimizers_that_skip_torchs_init(make, scheduler, closure):
    options = {"decay": 0.1}
    model, other = Net(), Net()
    handle, reference = sparsify(model, "srste", **options), sparsify(other, "srste", **options)
    optimizer = make(model.parameters())
    second = attached(reference, torch.optim.SGD(other.parameters(), lr=0.1))
    schedule = torch.optim.lr_scheduler.LambdaLR
    if scheduler == "before attach" and make is Skips:
        schedule(optimizer, lambda step: 1.0)
    handle.attach(optimizer)
    if scheduler == "after attach" and make is Skips:
        schedule(optimizer, lambda step: 1.0)
    loop = closures if closure else lambda m, o, n: train(m, o, 0, n)
    loop(model, optimizer, 3)
    loop(other, second, 3)
    assert handle.completed_steps == 3
    assert_equal_bits(dict(model.named_parameters()), dict(other.named_parameters()))
    assert torch.equal(handle.flips, reference.flips)
    handle.detach()
    loop(model, optimizer, 1)
    assert handle.completed_steps == 3
    handle.attach(optimizer)
    loop(model, optimizer, 1)
    assert handle.completed_steps == 4


def test_copies_of_wrapped_optimizers_step_their_own_weights():
    model = Net()
    optimizer = Skips(model.parameters())
    handle = sparsify(model, "ste")
    handle.attach(optimizer)
    train(model, optimizer, 0, 1)
    before = copy.deepcopy(model.state_dict())
    copied = copy.deepcopy(optimizer)
    for p in copied.param_groups[0]["params"]:
        p.grad = torch.ones_like(p)
    copied.step()
    assert_equal_bits(model.state_dict(), before)
    assert handle.completed_steps == 1
    assert "step" not in vars(pickle.loads(pickle.dumps(optimizer)))


@pytest.mark.parametrize("decay_on", ["weight", "gradient"])
def test_members_of_a_container_are_attached(decay_on):
    model, other = Whole(), Whole()
    options = {"decay": 0.1, "decay_on": decay_on}
    handle = sp.sparsify(model, "srste", targets=["block.*"], **options)
    reference = sp.sparsify(other, "srste", targets=["block.*"], **options)
    optimizer = Container(model)
    handle.attach(optimizer)
    second = attached(reference, torch.optim.SGD(other.parameters(), lr=0.1))
    train(model, optimizer, 0, 3)
    train(other, second, 0, 3)
    assert handle.completed_steps == 3
    assert_equal_bits(dict(model.named_parameters()), dict(other.named_parameters()))


def test_containers_that_divide_the_sparse_weights_are_refused():
    handle = sparsify(model := Net(), "ste")
    with pytest.raises(ConfigError, match="sparse weights are in SGD, SGD"):
        handle.attach(Container(model))


@pytest.mark.parametrize("wrapped", [False, True])
def test_attaching_again_to_the_same_optimizer_does_nothing(wrapped):
    model, optimizer, handle = build("srste", {"decay": 0.1}, cls=torch.optim.SGD, lr=0.1)
    train(model, optimizer, 0, 2)

    class Wrapper:
        def __init__(self, optimizer):
            self.optimizer = optimizer

    handle.attach(Wrapper(optimizer) if wrapped else optimizer)
    sp.sparsifier_of(model).attach(optimizer)
    train(model, optimizer, 2, 4)
    other, second, _ = build("srste", {"decay": 0.1}, cls=torch.optim.SGD, lr=0.1)
    train(other, second, 0, 4)
    assert handle.completed_steps == 4
    assert_equal_bits(model.state_dict(), other.state_dict())


def scaled(optimizer):
    """Wrap an optimizer as Accelerate does for float16, which keeps the step of the object."""
    Accelerator(cpu=True)  # its shared state
    scaler = torch.amp.GradScaler("cpu")
    return AcceleratedOptimizer(optimizer, device_placement=False, scaler=scaler)


@pytest.mark.parametrize("make", [Skips, lookahead])
def test_steps_that_a_wrapper_has_kept_cannot_be_hooked_any_more(make, monkeypatch):
    cls = Lookahead if make is lookahead else make
    if getattr(cls.step, "hooked", False):  # since a copy of one was unpickled in another test
        monkeypatch.setattr(cls, "step", cls.step.__wrapped__)
    model, other = Net(), Net()
    handle, reference = sparsify(model, "ste"), sparsify(other, "ste")
    optimizer = make(model.parameters())
    wrapped = scaled(optimizer)
    with pytest.raises(ConfigError, match=r"AcceleratedOptimizer has kept the step .* wrap it aft"):
        handle.attach(wrapped)
    handle.attach(optimizer)
    wrapped = scaled(optimizer)
    handle.attach(wrapped)  # nothing to do
    second = scaled(attached(reference, torch.optim.SGD(other.parameters(), lr=0.1)))
    for step in range(3):
        for net, outer in ((model, wrapped), (other, second)):
            loss = net(draw(8, 16, seed=step)).square().mean()
            outer.scaler.scale(loss).backward()
            outer.step()
            net.zero_grad()
    assert handle.completed_steps == reference.completed_steps == 3
    assert torch.equal(model.fc1.weight, other.fc1.weight)


def test_steps_that_torch_hooks_may_be_kept():
    model = Net()
    handle = sparsify(model, "ste")
    wrapped = scaled(torch.optim.SGD(model.parameters(), lr=0.1))
    handle.attach(wrapped)
    wrapped.scaler.scale(model(draw(8, 16)).square().mean()).backward()
    wrapped.step()
    assert handle.completed_steps == 1


def partitioned(model, optimizer):
    """Let the optimizer train one flat copy of all weights, as DeepSpeed does."""
    group = optimizer.param_groups[0]
    flat = torch.cat([p.detach().flatten() for p in group["params"]])
    group["params"] = [nn.Parameter(flat)]


def assigned(model, optimizer):
    model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)


@pytest.mark.parametrize("leave", [partitioned, assigned])
@pytest.mark.parametrize("steps", [0, 2])
def test_weights_that_left_the_optimizer_are_named_at_its_step(leave, steps):
    model, optimizer, handle = build("srste", {"decay": 0.1}, cls=torch.optim.SGD, lr=0.1)
    train(model, optimizer, 0, steps)
    leave(model, optimizer)
    with pytest.raises(
        ConfigError, match=r"'fc1' and 1 more layers trains, but .* SGD .*DeepSpeed"
    ):
        train(model, optimizer, steps, steps + 1)
    assert handle.completed_steps == steps


def averaged(method):
    """Write the average of two states of a model through ``.data``, buffers included."""
    model, optimizer, handle = build(method)
    train(model, optimizer, 0, 1)
    average = copy.deepcopy(model)
    model.eval()
    model(draw(4, 16))
    model.train()
    train(model, optimizer, 1, 4)
    with torch.no_grad():
        means = average.state_dict().values()
        for mean, value in zip(means, model.state_dict().values(), strict=True):
            mixed = mean.to(torch.float64) * 0.5 + value.to(torch.float64) * 0.5
            value.data.copy_(mixed.to(value.dtype))
    return model, optimizer, handle


READERS = {
    "prove": lambda model, handle: handle.prove(),
    "masks": lambda model, handle: handle.masks(),
    "metrics": lambda model, handle: handle.metrics(),
    "coverage": lambda model, handle: handle.coverage(),
    "densify": lambda model, handle: sp.densify(model),
    "dense_state_dict": lambda model, handle: handle.dense_state_dict(),
    "state_dict": lambda model, handle: model.state_dict(),
    "evaluation": lambda model, handle: model.eval()(draw(4, 16)),
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("method", ["tsrste", "asp", "slope", "sste", "sdgf"])
def test_averages_written_through_data_are_refused(method, reader):
    model, _, handle = averaged(method)
    before = {name: layer.weight.clone() for name, layer in handle.layers.items()}
    with pytest.raises(ConfigError, match=r"were averaged.*EMAWeightAveraging\(use_buffers=False"):
        READERS[reader](model, handle)
    for name, layer in handle.layers.items():
        assert torch.equal(layer.weight, before[name])


def test_copies_written_through_data_are_followed():
    model, optimizer, handle = build("tsrste")
    kept = copy.deepcopy(model.state_dict())
    train(model, optimizer, 0, 3)
    for key, value in model.state_dict().items():
        value.data.copy_(kept[key])
    assert handle.prove().holds and handle.completed_steps == 0


def swapped(model, other):
    """Exchange all values of two models through ``.data``, as Lightning does for an evaluation."""
    theirs = other.state_dict()
    for key, value in model.state_dict().items():
        kept = value.clone()
        value.data.copy_(theirs[key])
        theirs[key].data.copy_(kept)


@pytest.mark.parametrize("root_runs", [True, False])
@pytest.mark.parametrize("method", ["tsrste", "sdgf"])
def test_swapping_an_older_model_in_for_an_evaluation_changes_nothing_else(method, root_runs):
    model, optimizer, handle = build(method)
    other, second, reference = build(method)
    average = copy.deepcopy(model)
    train(other, second, 0, 6)
    for step in range(6):
        train(model, optimizer, step, step + 1)
        swapped(model, average)
        model.eval()
        if root_runs:
            model(draw(4, 16))
        else:  # as Lightning calls a validation step
            model.fc2(torch.relu(model.fc1(draw(4, 16))))
        assert handle.completed_steps == 0
        swapped(model, average)
        model.train()
    assert handle.completed_steps == reference.completed_steps == 6
    assert_equal_bits(model.state_dict(), other.state_dict())


def test_averages_are_refused_in_evaluations_that_bypass_the_root():
    model, _, _ = averaged("tsrste")
    model.eval()
    with pytest.raises(ConfigError, match="were averaged"):
        model.fc1(draw(4, 16))


@pytest.mark.parametrize("shape", [(512,), (0,), (256, 2)])
@pytest.mark.parametrize("when", ["before attach", "after attach"])
def test_flattened_weights_are_refused(shape, when):
    """As FullyShardedDataParallel and DeepSpeed leave them."""
    model = Net()
    handle = sparsify(model, "ste")
    if when == "after attach":
        optimizer = attached(handle, torch.optim.SGD(model.parameters(), lr=0.1))
        train(model, optimizer, 0, 1)
    model.fc1.weight.data = torch.zeros(shape, dtype=torch.float64)
    with pytest.raises(ConfigError, match=r"'fc1' has the shape .* flatten .* use fully_shard"):
        if when == "after attach":
            optimizer.step()
        else:
            handle.attach(torch.optim.SGD(model.parameters(), lr=0.1))


class Calls(torch.optim.SGD):
    """A step that calls the step of the parent class, as many do."""

    def step(self, closure=None):
        return super().step(closure)


class CallsTwice(torch.optim.SGD):
    """Two steps of the parent class, as an extragradient method takes them."""

    def step(self, closure=None):
        super().step(closure)
        return super().step()


@pytest.mark.parametrize("closure", [False, True])
@pytest.mark.parametrize("cls", [Calls, CallsTwice])
def test_a_step_that_calls_the_step_of_its_parent_counts_once(cls, closure):
    torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)  # torch hooks the parent's step too
    rate = 0.1 if cls is Calls else 0.05
    model, optimizer, handle = build("srste", {"decay": 0.1}, cls=cls, lr=rate)
    other, second, reference = build("srste", {"decay": 0.1}, cls=torch.optim.SGD, lr=0.1)
    loop = closures if closure else lambda m, o, n: train(m, o, 0, n)
    loop(model, optimizer, 4)
    loop(other, second, 4)
    assert handle.completed_steps == reference.completed_steps == 4
    for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_a_step_that_raised_does_not_make_the_next_one_a_part_of_it():
    model, optimizer, handle = build("srste", {"decay": 0.1}, cls=Calls, lr=0.1)

    def broken():
        raise RuntimeError("of the closure")

    train(model, optimizer, 0, 1)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="of the closure"):
            optimizer.step(broken)
    train(model, optimizer, 1, 3)
    assert handle.completed_steps == 3


def test_weights_in_two_optimizers_are_refused():
    model = Net()
    handle = sparsify(model, "ste")
    first, second = (cls(model.parameters(), lr=0.1) for cls in (torch.optim.SGD, torch.optim.Adam))
    with pytest.raises(ConfigError, match=r"fc1, fc2: the weight is in two optimizers \(SGD and A"):
        handle.attach(first, second)
    handle.attach(first)  # the other one is noticed when it steps
    with pytest.warns(SparsePretrainWarning, match=r"'fc1' \(ste\) was updated, but .* \(SGD\)"):
        for step in range(3):
            train(model, first, step, step + 1)
            train(model, second, step, step + 1)


@pytest.mark.parametrize("micro_batches", [1, 4, 16])
def test_noise_that_is_taken_away_before_the_step_is_no_other_optimizer(micro_batches):
    model, optimizer, handle = build("srste", {"decay": 0.1}, cls=torch.optim.SGD, lr=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("error", SparsePretrainWarning)
        for step in range(6):
            for batch in range(micro_batches):
                x = draw(8, 16, seed=step * 10 + batch)
                model(x).square().mean().backward()
                noise = [torch.randn_like(p) * 0.01 for p in model.parameters()]
                with torch.no_grad():
                    for p, n in zip(model.parameters(), noise, strict=True):
                        p.add_(n)
                model(x).square().mean().backward()
                with torch.no_grad():
                    for p, n in zip(model.parameters(), noise, strict=True):
                        p.sub_(n)
            optimizer.step()
            optimizer.zero_grad()
    assert handle.completed_steps == 6


@pytest.mark.parametrize("kind", ["linear", "other class"])
def test_a_layer_that_is_replaced_after_attach_is_named_at_the_step(kind):
    model, optimizer, handle = build("ste", {}, cls=torch.optim.SGD, lr=0.1)
    train(model, optimizer, 0, 1)
    old = model.fc1
    model.fc1 = nn.Linear(16, 32).double() if kind == "linear" else Calls32(old)
    if kind == "linear":
        model.fc1.weight, model.fc1.bias = old.weight, old.bias
        for act in (lambda: train(model, optimizer, 1, 2), handle.prove, lambda: sp.densify(model)):
            with pytest.raises(ConfigError, match="layers were replaced after sparsify: fc1"):
                act()
    else:  # a wrapper runs it
        train(model, optimizer, 1, 2)
        assert handle.completed_steps == 2 and handle.prove().holds


class Calls32(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x)


FROM_WEIGHTS = [("sste", {}), ("asp", {"at": 0.0}), ("slope", {}), ("tsrste", {})]


@pytest.mark.parametrize("when", ["before attach", "after attach"])
@pytest.mark.parametrize(("method", "options"), FROM_WEIGHTS)
def test_weights_that_are_initialized_after_sparsify_are_noticed(method, options, when):
    model = Net()
    handle = sparsify(model, method, **options)
    if when == "after attach":
        optimizer = attached(handle, torch.optim.SGD(model.parameters(), lr=0.1))
    model.apply(lambda m: nn.init.normal_(m.weight) if isinstance(m, nn.Linear) else None)
    if when == "before attach":
        optimizer = attached(handle, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.warns(SparsePretrainWarning, match=r"'fc1' and 1 more layers changed after spars"):
        train(model, optimizer, 0, 1)


@pytest.mark.parametrize("case", ["reset", "load", "half", "copy", "random", "ste", "keep_zeros"])
def test_masks_that_belong_to_the_weights_are_no_reason_to_warn(case):
    model, other = Net(), Net()
    options = {"mask": "random"} if case == "random" else {}
    handle = sparsify(model, "ste" if case == "ste" else "slope", **options)
    if case == "load":
        dense = {k: v.mul(2) for k, v in other.state_dict().items()}
        model.load_state_dict(dense, strict=False)
    elif case == "half":
        model.float()
    elif case == "copy":
        model = copy.deepcopy(model)
        handle = sp.sparsifier_of(model)
    else:
        model.apply(lambda m: nn.init.normal_(m.weight) if isinstance(m, nn.Linear) else None)
    if case == "reset":
        handle.reset()
    elif case == "keep_zeros":
        with torch.no_grad():
            for layer in handle.layers.values():
                layer.weight[:, ::2] = 0
        handle.keep_zeros()
    optimizer = attached(handle, torch.optim.SGD(model.parameters(), lr=0.1))
    with warnings.catch_warnings():
        warnings.simplefilter("error", SparsePretrainWarning)
        dtype = model.fc1.weight.dtype
        model(draw(8, 16).to(dtype)).square().mean().backward()
        optimizer.step()
    assert handle.completed_steps == 1


class Bypassed(nn.Module):
    """Reads the weight of a layer itself, as the attention of Swin and BEiT does."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(16, 16)
        self.proj = nn.Linear(16, 16)
        self.unused = nn.Linear(16, 16)

    def forward(self, x):
        return self.proj(nn.functional.linear(x, self.qkv.weight, self.qkv.bias))


@pytest.fixture
def nothing_compiled():
    """Other tests of the process leave counts, after which bypassed layers are not named."""
    torch._dynamo.utils.counters.clear()


@pytest.mark.usefixtures("nothing_compiled")
@pytest.mark.parametrize("closure", [False, True])
def test_layers_whose_weight_is_read_by_their_module_are_named(closure):
    model = Bypassed()
    handle = sp.sparsify(model, "ste", targets=["*"])
    optimizer = attached(handle, torch.optim.SGD(model.parameters(), lr=0.1))

    def loss():
        value = model(torch.ones(4, 16)).square().mean()
        value.backward()
        return value

    with pytest.warns(SparsePretrainWarning, match="'qkv' has a gradient, but its forward did"):
        optimizer.step(loss) if closure else (loss(), optimizer.step())
    with warnings.catch_warnings():
        warnings.simplefilter("error", SparsePretrainWarning)
        loss()
        optimizer.step()
    model = Bypassed()
    handle = sp.sparsify(model, "ste", targets=["proj", "unused"])
    optimizer = attached(handle, torch.optim.SGD(model.parameters(), lr=0.1))
    with warnings.catch_warnings():
        warnings.simplefilter("error", SparsePretrainWarning)
        loss()
        optimizer.step()


class Tied(nn.Module):
    """A decoder that is tied by hand: it multiplies by the stored weight, which is dense."""

    def __init__(self):
        super().__init__()
        self.enc = nn.Linear(16, 32)
        self.dec = nn.Linear(16, 16)

    def forward(self, x):
        return self.dec(nn.functional.linear(self.enc(x).relu(), self.enc.weight.t()))


PENALTIES = {
    "L1": lambda weights: sum(w.abs().sum() for w in weights),
    "L2": lambda weights: sum(w.square().sum() for w in weights),
    "group lasso": lambda weights: sum(w.norm(dim=0).sum() for w in weights),
}


@pytest.mark.parametrize("micro", [1, 3])
@pytest.mark.parametrize("method", ["ste", "srste", "tsrste", "slope", "bimask"])
def test_weights_that_something_else_multiplies_by_are_named(method, micro):
    model = Tied()
    handle = sp.sparsify(model, method, targets=["*"], total_steps=10)
    optimizer = attached(handle, torch.optim.SGD(model.parameters(), lr=0.1))

    def step():
        for seed in range(micro):
            model(draw(8, 16, seed=seed, dtype=torch.float32)).square().mean().backward()
        optimizer.step()

    with pytest.warns(SparsePretrainWarning, match="'enc' has a gradient that its forward did not"):
        step()
    with warnings.catch_warnings():
        warnings.simplefilter("error", SparsePretrainWarning)
        step()
    assert not model.enc.weight._backward_hooks


@pytest.mark.parametrize("penalty", [*PENALTIES, None])
@pytest.mark.parametrize("method", ["ste", "sste", "slope", "sdgp"])
def test_penalties_and_shared_layers_are_no_outside_reads(method, penalty):
    model = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16))
    handle = sp.sparsify(model, method, targets=["*"])
    optimizer = attached(handle, torch.optim.SGD(model.parameters(), lr=0.1))
    with warnings.catch_warnings():
        warnings.simplefilter("error", SparsePretrainWarning)
        x = draw(8, 16, dtype=torch.float32)
        for _ in range(2):
            y = checkpoint(model, model(x), use_reentrant=False)  # the layers run twice
            loss = y.square().mean()
            if penalty is not None:
                loss = loss + PENALTIES[penalty]([model[0].weight, model[2].weight])
            loss.backward()
            optimizer.step()


def eager_then_compiled(model, x):
    model(x)
    torch.compile(model, backend="aot_eager")(x).square().mean().backward()


def adversarial_example(model, x):
    model(x).square().mean().backward()
    model.eval()
    model(x + 1).square().mean().backward()
    model.train()


def inner_step_of_maml(model, x):
    named = dict(model.named_parameters())
    grads = torch.autograd.grad(model(x).square().mean(), [*named.values()])
    fast = {k: p - 0.1 * g for (k, p), g in zip(named.items(), grads, strict=True)}
    functional_call(model, fast, x).square().mean().backward()


def with_other_leaves(model, x):
    other = {k: p.detach().clone().requires_grad_() for k, p in model.named_parameters()}
    (model(x) + functional_call(model, other, x)).square().mean().backward()


def with_a_hook(model, x):
    for parameter in model.parameters():
        parameter.register_hook(lambda grad: grad.clamp(-1e-4, 1e-4))
    model(x).square().mean().backward()


def mixed_modes(model, x):
    y = model(x)
    model.eval()
    (y.square().mean() + model(x).square().mean()).backward()
    model.train()


LOOPS = (
    eager_then_compiled,
    adversarial_example,
    inner_step_of_maml,
    with_other_leaves,
    with_a_hook,
    mixed_modes,
)


@pytest.mark.parametrize("loop", LOOPS)
def test_other_loops_are_no_outside_reads(loop):
    model = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16))
    handle = sp.sparsify(model, "ste", targets=["*"])
    optimizer = attached(handle, torch.optim.SGD(model.parameters(), lr=0.1))
    with warnings.catch_warnings():
        warnings.simplefilter("error", SparsePretrainWarning)
        loop(model, draw(8, 16, dtype=torch.float32))
        optimizer.step()


@pytest.mark.parametrize("steps", [0, 1])
def test_the_watch_over_reads_ends(steps):
    model, optimizer, handle = build("srste")
    train(model, optimizer, 0, steps)
    accumulate(model, 1)
    handle.detach()
    assert not model.fc1.weight._backward_hooks and model.fc1.operands.outside is None
    handle.attach(optimizer)
    accumulate(model, 2)
    optimizer.step()
    accumulate(model, 3)
    assert not model.fc1.weight._backward_hooks and model.fc1.operands.outside is None


def test_the_watch_over_reads_changes_no_gradient():
    results = []
    for is_attached in (True, False):
        model, _, handle = build("srste")
        if not is_attached:
            handle.detach()
            handle._state.watches_reads = False
        accumulate(model, 0)
        results.append(gradients(model))
    assert_equal_bits(*results)


class WithoutRate(torch.optim.Optimizer):
    """As optimizers that compute their own rate."""

    def __init__(self, parameters, **defaults):
        super().__init__(parameters, defaults)

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sub_(parameter.grad, alpha=0.01)


@pytest.mark.parametrize("defaults", [{}, {"lr": None}], ids=["no lr", "lr=None"])
def test_optimizers_without_a_rate_step(defaults):
    model, _, handle = build("srste", {"decay": 0.1})
    handle.detach()
    handle.attach(optimizer := WithoutRate(model.parameters(), **defaults))
    train(model, optimizer, 0, 2)
    assert handle.completed_steps == 2
    model, _, handle = build("srste", {"decay": 0.1, "decay_on": "weight"})
    handle.detach()
    with pytest.raises(ConfigError, match="WithoutRate has no learning rate in its groups"):
        handle.attach(WithoutRate(model.parameters(), **defaults))


def test_adafactor_of_t5_steps():
    from transformers.optimization import Adafactor

    model, _, handle = build("ste", dtype=torch.float32)
    handle.detach()
    optimizer = Adafactor(model.parameters(), relative_step=True, warmup_init=True, lr=None)
    handle.attach(optimizer)
    train(model, optimizer, 0, 2)
    assert handle.completed_steps == 2


def test_a_weight_of_another_size_is_no_flattening():
    model, optimizer, _ = build("ste")
    model.fc1.weight = nn.Parameter(draw(64, 16))
    with pytest.raises(ConfigError, match="resize layers before sparsify"):
        optimizer.step()


class Ignores(torch.optim.SGD):
    """Takes a closure and does not call it."""

    def step(self, closure=None):
        return super().step()


@pytest.mark.parametrize("method", ["srste", "ste"])
def test_a_closure_that_is_not_called_leaves_the_decay_out(method):
    options = {"decay": 0.1} if method == "srste" else {}
    model, optimizer, _ = build(method, options, cls=Ignores, lr=0.1)
    model(draw(8, 16)).square().mean().backward()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", SparsePretrainWarning)
        optimizer.step(lambda: None)
        optimizer.step()
    told = [str(w.message) for w in caught if "did not call it" in str(w.message)]
    assert len(told) == (method == "srste")
