"""torch.compile: one graph per block, no recompilation from step to step, eager's numbers."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from support.small_loops import attached, eager_and_compiled, gradients, train
from support.small_models import Blocks, ConvNet, Net, draw
from support.sparse_cases import TRAINED, build, sparsify

# tracing the draws takes ten seconds: once, for sste
CASES = [
    *((name, {"mvue": "none"} if name == "tsrste" else {}) for name in TRAINED),
    ("slope", {"mask": "random"}),  # drawn once
    ("maskllm", {}),
    ("proxsparse", {}),
]
FAST = ("dense", "srste", "sste", "bimask", "cast")  # one of each kind of operands
OPTIONS = [
    ("srste", {"n": 1, "m": 16, "decay_on": "weight"}),
    ("sdgp", {"variant": "random"}),
    ("dense", {"flip_rule": "transposable", "refresh": 2}),
    ("sste", {"mvue": "weight", "estimator": "exact", "gamma": 0.1, "ste_scale": "beta"}),
]


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("method", "options", "net"),
    [
        *(
            pytest.param(*case, Net, marks=() if case[0] in FAST else pytest.mark.slow)
            for case in CASES
        ),
        ("srste", {}, ConvNet),
        *(pytest.param(*case, Net, marks=pytest.mark.slow) for case in OPTIONS),
        pytest.param("tsrste", {"mvue": "none"}, ConvNet, marks=pytest.mark.slow),
        *(
            pytest.param(name, {}, ConvNet, marks=pytest.mark.slow)
            for name in ("sdgp", "bimask", "slope")
        ),
    ],
)
def test_compiled_block_is_one_graph_and_equals_eager(method, options, net):
    def run(compile):
        model = Blocks(net())
        sparsifier = sparsify(model, method, targets=["*fc*"], **options)
        kind = type(build(method, options)[1])
        optimizer = attached(sparsifier, kind(model.parameters(), lr=1e-2))
        compile(model.block)
        for step in range(5):
            for micro in range(2):
                x = model.block.example(10 * step + micro, batch=4)[0]
                model(x).square().sum().backward()
            if step == 3:
                last = gradients(model)
            optimizer.step()
            optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            model(model.block.example(0, batch=4)[0])
        return last, model.state_dict()

    eager, compiled, graphs = eager_and_compiled(run, "eager")
    torch.testing.assert_close(compiled, eager, rtol=1e-9, atol=1e-10)
    assert graphs <= 2, "training, and evaluation without gradients"


def test_phase_switch_recompiles_once():
    counter = CompileCounterWithBackend("eager")
    model = Blocks(Net())
    window = {"start": 0.05, "stop": 0.1}  # steps 2 and 3 of 40
    sparsifier = sparsify(model, "srste", targets=["*fc*"], window=window)
    optimizer = attached(sparsifier, torch.optim.SGD(model.parameters(), lr=0.1))
    model.block.compile(backend=counter, fullgraph=True)
    for step in range(6):
        assert sparsifier.method.phase.training == (2 <= step < 4)
        train(model, optimizer, step, step + 1)
    assert counter.frame_count <= 3


@pytest.mark.parametrize(
    ("method", "options", "frames"),
    [("mdgf", {"until": 0.1}, 2), ("sdgf", {"n": 1, "m": 8, "until": 0.15}, 4)],
)
def test_staged_methods_compile_once_per_stage(method, options, frames):

    def run(compile):
        model = Blocks(Net())
        handle = sparsify(model, method, targets=["*fc*"], **options)
        optimizer = attached(handle, torch.optim.SGD(model.parameters(), lr=1e-3))
        compile(model.block)
        train(model, optimizer, 0, 9)
        assert handle.sparse
        return model.state_dict()

    eager, compiled, graphs = eager_and_compiled(run, "eager")
    torch.testing.assert_close(compiled, eager, rtol=1e-9, atol=1e-10)
    assert graphs <= frames


def test_compiled_noise_follows_step_and_micro_batch():
    eager, compiled = Blocks(Net()), Blocks(Net())
    handles = [sparsify(m, "sste", targets=["*fc1"]) for m in (eager, compiled)]
    compiled.block.compile(backend="aot_eager", fullgraph=True)
    x, seen = draw(4, 8, 16), []
    for step, micro in ((0, 0), (0, 3), (7, 0), (2**33, 5)):
        for model, handle in zip((eager, compiled), handles, strict=True):
            handle._state.set_step(step)
            handle.micro_batch(micro)
            model.zero_grad()
            model(x).square().sum().backward()
        a, b = (m.block.fc1.weight.grad.clone() for m in (eager, compiled))
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)
        assert all(not torch.allclose(a, other) for other in seen), "fresh noise"
        seen.append(a)


def test_compiled_root_counts_micro_batches():
    results = []
    for compiled in (False, True):
        model = Net()
        handle = sparsify(model, "ste")
        run = torch.compile(model, backend="eager") if compiled else model
        for micro in range(3):
            run(draw(4, 8, 16, seed=micro)).square().sum().backward()
            assert handle._state.clock.micro == micro
        results.append(gradients(model))
    torch.testing.assert_close(results[1], results[0], rtol=1e-10, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("precision", [None, "fp8_sim"])
def test_inductor_equals_eager(precision):
    results = []
    for compiled in (False, True):
        model = Blocks(Net()).float() if precision else Blocks(Net())
        sparsify(model, "sste", targets=["*fc*"], gamma=0.1, precision=precision)
        if compiled:
            model.block.compile(fullgraph=True)
        for micro in range(2):
            x = draw(4, 8, 16, seed=micro, dtype=model.block.fc1.weight.dtype)
            model(x).square().sum().backward()
        results.append(gradients(model))
    rtol, atol = (1e-4, 1e-5) if precision else (1e-9, 1e-10)
    torch.testing.assert_close(results[1], results[0], rtol=rtol, atol=atol)
