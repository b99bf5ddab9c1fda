"""What every registered method must do to convolutions, with every option variant."""

import copy
import pickle

import pytest
import torch
from sparse_cases import (
    CONVOLVED,
    draw,
    everything,
    gradients,
    has_pattern,
    ids,
    into_sparse_phase,
    optimizer_for,
    sparsify,
    through_disk,
)
from tiny_runs import assert_equal_bits
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

import sparsepretrain as sp
from sparsepretrain import registry
from sparsepretrain.sparsity.layers import SparseLayer, sparse_class
from sparsepretrain.sparsity.method import DGRAD, WGRAD, G

IDS = ids(CONVOLVED)
every_case = pytest.mark.parametrize(("method", "options"), CONVOLVED, ids=IDS)


class ConvNet(nn.Module):
    """Two sparse convolutions, 5×6 positions and then 3×3, and a dense layer."""

    def __init__(self, dtype=torch.float64, seed=0):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.fc1 = nn.Conv2d(16, 16, 3, padding=1, dtype=dtype)
            self.fc2 = nn.Conv2d(16, 32, (1, 2), stride=2, padding="valid", bias=False, dtype=dtype)
            self.head = nn.Linear(32, 5, dtype=dtype)

    def forward(self, x):
        return self.head(self.fc2(torch.tanh(self.fc1(x))).flatten(2).transpose(1, 2))


def build(method, options=None, *, dtype=torch.float64, seed=0, layout=torch.contiguous_format):
    model = ConvNet(dtype, seed).to(memory_format=layout)
    sparsifier = sparsify(model, method, **options or {})
    optimizer = optimizer_for(method, model.parameters())
    sparsifier.attach(optimizer)
    return model, optimizer, sparsifier


def images(step, dtype=torch.float64, batch=4):
    return draw(batch, 16, 5, 6, seed=100 + step, dtype=dtype)


def accumulate(model, step, micro=4):
    x = images(step, next(model.parameters()).dtype)
    for i in range(0, len(x), micro):
        model(x[i : i + micro]).square().sum().backward()


def train(model, optimizer, first, last, micro=4):
    for step in range(first, last):
        accumulate(model, step, micro)
        optimizer.step()
        optimizer.zero_grad()


def at_most_n_of_m(tensor, n, m):
    """Along the input channels of every (output channel, kernel row, kernel column)."""
    groups = tensor.permute(0, 2, 3, 1).reshape(-1, m)
    return bool(((groups != 0).sum(1) <= n).all())


GEOMETRIES = {
    "same": {"kernel_size": 3, "padding": "same"},
    "even": {"kernel_size": (4, 2), "padding": "same", "dilation": (1, 3)},
    "strided": {"kernel_size": 3, "stride": (2, 1), "padding": (1, 2), "bias": False},
    "dilated": {"kernel_size": (1, 3), "dilation": 2, "padding": "valid"},
    "reflected": {"kernel_size": 3, "padding": 1, "padding_mode": "reflect"},
    "circular": {"kernel_size": 3, "padding": "same", "padding_mode": "circular", "stride": 1},
    "grouped": {"kernel_size": 2, "groups": 2},
    "pointwise": {"kernel_size": 1},
}


RULES = [
    pytest.param(method, options, geometry, id=f"{name}-{geometry}")
    for (method, options), name in zip(CONVOLVED, IDS, strict=True)
    for geometry, arguments in GEOMETRIES.items()
    if not (registry.get("method", method).mixes_outputs and "groups" in arguments)  # refused
]


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@pytest.mark.parametrize(("method", "options", "geometry"), RULES)
def test_gradient_rule_against_autograd_in_fp64(method, options, geometry):
    """The layer equals the operand table written out with ordinary autograd."""
    arguments = GEOMETRIES[geometry]
    groups = arguments.get("groups", 1)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        plain = nn.Conv2d(16 * groups, 16 * groups, dtype=torch.float64, **arguments)
    model = nn.Sequential(copy.deepcopy(plain))
    sparsifier = sparsify(model, method, **options | {"targets": "0"})
    into_sparse_phase(sparsifier)  # the rule of the sparse phase
    layer, state = model[0], model[0].sparsity
    assert type(layer) is sparse_class(nn.Conv2d)
    x = draw(2, 16 * groups, 7, 6, seed=1)
    gy = draw(*plain(x).shape, seed=2)
    projection = state.project(layer.weight)
    A = layer.weight.detach() if projection.forward is None else projection.forward
    B = A if projection.backward is None else projection.backward
    P = U = gy
    last = gy.permute(0, 2, 3, 1)  # channels last: rows are positions in (N, H, W) order
    if state.method.row.P != G:
        P = state.method.dgrad_gradient(last, state.key(DGRAD)).permute(0, 3, 1, 2)
    if state.method.row.U != G:
        positions = last.flatten(1, 2)
        filled = nn.functional.pad(positions, (0, 0, 0, -positions.shape[1] % 4))
        rows = state.method.wgrad_gradient(filled.flatten(0, 1), state.key(WGRAD))
        U = rows.view(filled.shape)[:, : positions.shape[1]].mT.reshape(gy.shape)
    expected = {}
    for name, weight, g in (("x", B, P), ("weight", A, U), ("bias", A, gy)):
        leaves = {"x": x, "weight": weight} | ({} if plain.bias is None else {"bias": plain.bias})
        leaves = {k: v.detach().clone().requires_grad_() for k, v in leaves.items()}
        if name not in leaves:
            continue
        inputs = leaves.pop("x")
        y = functional_call(plain, leaves, inputs)
        y.backward(g)
        expected[name] = (leaves | {"x": inputs})[name].grad
    if projection.wgrad_scale is not None:
        expected["weight"] = expected["weight"] * projection.wgrad_scale
    inputs = x.clone().requires_grad_()
    got = layer(inputs)
    got.backward(gy)
    for name, tensor in {"x": inputs, "weight": layer.weight, "bias": layer.bias}.items():
        if tensor is not None:
            torch.testing.assert_close(tensor.grad, expected[name], rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(got, y, rtol=1e-12, atol=1e-12)
    # a single image without the batch axis
    if projection.wgrad_scale is None and P is gy and U is gy:
        alone = [x[0].clone().requires_grad_(), x[:1].clone().requires_grad_()]
        outputs = [layer(image) for image in alone]
        assert torch.equal(outputs[0], outputs[1][0])
        outputs[0].backward(gy[0]), outputs[1].backward(gy[:1])
        torch.testing.assert_close(alone[0].grad, alone[1].grad[0], rtol=1e-12, atol=1e-12)


@every_case
def test_pattern_holds_along_input_channels_after_every_step(method, options):
    model, optimizer, sparsifier = build(method, options, dtype=torch.float32)
    for step in range(3):
        train(model, optimizer, step, step + 1)
        n, m = sparsifier.method.pattern
        for name, mask in sparsifier.masks().items():
            layer = sparsifier.layers[name]
            assert mask.dtype == torch.bool and mask.shape == layer.weight.shape
            assert at_most_n_of_m(mask, n, m)
            forward = layer.sparsity.project(layer.weight).forward
            if forward is not None and has_pattern(sparsifier):
                assert at_most_n_of_m(forward, n, m) and not forward[~mask].any()
                assert not (forward.signbit() & (forward == 0)).any()
        metrics = sparsifier.metrics(per_layer=True)
        assert ("flip_rate" in metrics) == sparsifier.method.compares
        assert 0 <= metrics.get("flip_rate", 0) <= 1 and 0 < metrics["density"] <= 1


@every_case
def test_accumulation_and_ranks_change_nothing(method, options):
    results = []
    for micro in (4, 2, 1):
        model, optimizer, sparsifier = build(method, options)
        train(model, optimizer, 0, 2, micro)
        accumulate(model, 5, micro)
        results.append((gradients(model), sparsifier.masks()))
    model.zero_grad()
    x = images(5)
    for rank in (1, 0):
        for index in (0, 1):
            sparsifier.micro_batch(index, rank, 2)
            i = 2 * index + rank
            model(x[i : i + 1]).square().sum().backward()
    results.append((gradients(model), sparsifier.masks()))
    for grads, masks in results[1:]:
        for key, expected in results[0][0].items():
            assert (grads[key] - expected).abs().max() <= 1e-12 * expected.abs().max(), key
        assert all(torch.equal(masks[k], v) for k, v in results[0][1].items())


@every_case
def test_memory_format_changes_nothing(method, options):
    results = []
    for layout in (torch.contiguous_format, torch.channels_last):
        model, optimizer, sparsifier = build(method, options, layout=layout)
        for step in range(3):
            x = images(step).to(memory_format=layout).requires_grad_()
            model(x).square().sum().backward()
            last = gradients(model) | {"x": x.grad}
            optimizer.step()
            optimizer.zero_grad()
        assert model.fc1.weight.is_contiguous(memory_format=layout)
        results.append((last, sparsifier.masks(), model.fc1.weight.detach()))
    torch.testing.assert_close(results[1], results[0], rtol=1e-9, atol=1e-12)


@every_case
def test_resumes_are_byte_equal(method, options):
    model, optimizer, sparsifier = build(method, options, dtype=torch.float32)
    train(model, optimizer, 0, 6, micro=2)
    straight = everything(model, optimizer, sparsifier)
    metrics = sparsifier.metrics(per_layer=True)
    state = None
    for part, (first, last) in enumerate([(0, 1), (1, 4), (4, 5), (5, 6)]):
        # another seed: whatever is not restored would show
        seed = 0 if state is None else part
        model, optimizer, sparsifier = build(method, options, dtype=torch.float32, seed=seed)
        if state is not None:
            saved = through_disk(state)
            model.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
            sparsifier.load_state_dict(saved[2])
        train(model, optimizer, first, last, micro=2)
        state = everything(model, optimizer, sparsifier)
    assert_equal_bits(state, straight)
    assert sparsifier.metrics(per_layer=True) == metrics


@every_case
def test_recomputation_copies_and_evaluation_are_invisible(method, options):
    class Recomputed(ConvNet):
        def forward(self, x):
            block = nn.Sequential(self.fc1, nn.Tanh(), self.fc2)
            y = checkpoint(block, x, use_reentrant=False)
            return self.head(y.flatten(2).transpose(1, 2))

    results = []
    for kind in ("plain", "recomputed", "copied", "pickled", "evaluated"):
        model = Recomputed() if kind == "recomputed" else ConvNet()
        sparsify(model, method, **options)
        accumulate(model, 0)
        model.zero_grad()  # copies have none
        if kind == "copied":
            model = copy.deepcopy(model)
        if kind == "pickled":
            model = pickle.loads(pickle.dumps(model))
        if kind == "evaluated":
            with torch.inference_mode():
                model.eval()(images(3))
            model.train()
        accumulate(model, 1)
        results.append(gradients(model))
    for other in results[1:]:
        assert_equal_bits(other, results[0])


@every_case
def test_densify_is_exact(method, options):
    model, optimizer, sparsifier = build(method, options, dtype=torch.float32)
    train(model, optimizer, 0, 3)
    model.eval()
    x = images(0, torch.float32)
    expected = model(x)
    projection = model.fc1.sparsity.project(model.fc1.weight)
    sparse = projection.forward is not None and has_pattern(sparsifier)
    sp.densify(model)
    assert type(model.fc1) is nn.Conv2d and type(model.fc2) is nn.Conv2d
    assert not any(isinstance(m, SparseLayer) or m._buffers for m in model.modules())
    assert torch.equal(model(x), expected)
    if sparse:
        assert at_most_n_of_m(model.fc1.weight, *sparsifier.method.pattern)
        assert not (model.fc1.weight.signbit() & (model.fc1.weight == 0)).any()
    clean = ConvNet(torch.float32)
    clean.load_state_dict(model.state_dict())
    assert torch.equal(clean(x), expected)


@every_case
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(method, options, dtype):
    model, optimizer, _ = build(method, options, dtype=torch.float32)
    for step in range(2):
        x = images(step, torch.float32)
        with torch.autocast("cpu", dtype=dtype):
            assert model.fc1(x).dtype == dtype
            loss = model(x).float().square().mean()
        loss.backward()
        for parameter in model.parameters():
            assert parameter.grad.dtype == torch.float32 and parameter.grad.isfinite().all()
        optimizer.step()
        optimizer.zero_grad()


class Blocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = ConvNet()

    def forward(self, x):
        return self.block(x)


@pytest.mark.parametrize("method", [name for name, options in CONVOLVED if not options])
def test_a_block_is_one_graph_and_equals_eager(method):
    torch._dynamo.reset()
    results, counter = [], CompileCounterWithBackend("eager")
    for compiled in (False, True):
        model = Blocks()
        sparsifier = sparsify(model, method, targets="*fc*")
        optimizer = optimizer_for(method, model.parameters())
        sparsifier.attach(optimizer)
        if compiled:
            model.block.compile(backend=counter, fullgraph=True)
        for step in range(3):
            for micro in range(2):
                model(images(10 * step + micro)).square().sum().backward()
            last = gradients(model)
            optimizer.step()
            optimizer.zero_grad()
        results.append((last, model.state_dict()))
    torch.testing.assert_close(results[1], results[0], rtol=1e-9, atol=1e-10)
    assert counter.frame_count == 1
    torch._dynamo.reset()
