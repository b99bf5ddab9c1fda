"""``compile``: what it comes to, what a block is, how many graphs there are."""

import functools

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters

from sparsepretrain import config
from sparsepretrain.config import freeze
from sparsepretrain.console import Console
from sparsepretrain.tasks import build_task
from sparsepretrain.training import assembly, compilation, loop, validation
from sparsepretrain.training.assembly import META, build_model
from sparsepretrain.training.tracing import step_cost
from sparsepretrain.training.trainer import train

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def counter(monkeypatch):
    """What is compiled runs as eager PyTorch, and is counted."""
    torch._dynamo.reset()
    counters.clear()
    counter = CompileCounterWithBackend("eager")
    with_counter = functools.partial(compilation.compiled, backend=counter)
    monkeypatch.setattr(compilation, "compiled", with_counter)
    yield counter
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("words", "device", "mode", "loss"),
    [
        ("", CPU, "none", False),
        *((words, CUDA, "blocks", True) for words in ("", "parallel=ddp", "parallel=fsdp")),
        ("probe=estimator", CUDA, "none", False),
        ("compile=none", CUDA, "none", False),
        ("compile=blocks", CUDA, "blocks", True),
        ("compile=blocks", CPU, "blocks", False),
        ("compile=model", CPU, "model", False),
    ],
)
def test_every_value_decides_on_blocks_and_loss(words, device, mode, loss):
    run = config.load(words.split())
    assert compilation.scope_of(run, device, 1e6) == (mode, loss)


def decided(words, ranks=1):
    """What ``auto`` comes to on a GPU, and the estimated seconds of training."""
    run = config.load(words.split())
    task = build_task(run)
    seconds = step_cost(run, task, build_model(task, META)).eager_seconds(run, ranks)
    scope = compilation.scope_of(run, CUDA, seconds)
    assert scope.loss is (scope.mode == "blocks")
    return scope.mode, seconds


@pytest.mark.parametrize(
    ("words", "mode"),
    [
        ("", "none"),
        ("precision=bf16", "none"),
        ("steps=100000", "blocks"),
        ("model=gpt2_124m", "blocks"),
        ("model=gpt2_124m steps=1", "none"),
        pytest.param("model=llama_1b", "blocks", marks=pytest.mark.slow),
        pytest.param("model=llama_1b steps=1", "none", marks=pytest.mark.slow),
    ],
)
def test_auto_compiles_only_runs_that_take_minutes_on_a_gpu(words, mode):
    assert decided(words)[0] == mode


@pytest.mark.slow
def test_estimated_time_follows_micro_batches_steps_and_ranks():
    nano, steps = decided("steps=700")[1], decided("steps=1400")[1]
    assert 1 < nano < 10 and steps == pytest.approx(2 * nano)
    # a launch-bound model waits for the host in every micro-batch
    assert decided("steps=700 batch.micro=4")[1] == pytest.approx(4 * nano)
    # a large model does not
    large = [decided(f"model=gpt2_774m steps=10 batch.micro={micro}")[1] for micro in (4, 8)]
    assert large[0] == large[1]
    words = "model=gpt2_124m steps=10 parallel=ddp"
    assert decided(words, 8)[1] == pytest.approx(decided(words)[1] / 8)


def test_a_session_traces_once_and_a_resumed_one_decides_the_same(tiny, monkeypatch):
    decisions, traces = [], []

    def scope(run, device, seconds):
        decisions.append(seconds)
        return compilation.Scope("none", False)

    def trace(*given):
        traces.append(step_cost(*given))
        return traces[-1]

    monkeypatch.setattr(compilation, "scope_of", scope)
    monkeypatch.setattr(assembly, "step_cost", trace)
    run = tiny.load("steps=4")
    assert train(run, Console.silent(), stop_after=1) == 0
    assert decisions == [0.0] and not traces, "a CPU compiles nothing"
    decisions.clear()
    monkeypatch.setattr(assembly, "gpu_cost", lambda run, task, model, _: trace(run, task, model))
    for steps in (2, 4):
        assert train(run, Console.silent(), stop_after=steps) == 0
    assert len(traces) == 2 and decisions[0] == decisions[1] > 0


@pytest.mark.slow
@pytest.mark.parametrize("model", ["gpt2_nano", "bert_nano"])
def test_training_with_a_compiled_loss_gives_the_same_losses(tiny, monkeypatch, model):
    losses = []
    for compiles in (False, True):
        scope = compilation.Scope("none", compiles)
        monkeypatch.setattr(compilation, "scope_of", lambda *_, scope=scope: scope)
        session = tiny.build("sparsity=sste", f"model={model}", "batch.micro=2")
        losses.append([loop.train_step(session).loss for _ in range(3)])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def test_only_the_compiled_model_changes_the_identity():
    def identity(word):
        return freeze.identity(config.load([f"compile={word}"]))

    assert {identity(w) for w in ("auto", "blocks")} == {identity("none")}
    assert identity("model") != identity("none")


@pytest.mark.parametrize(
    ("model", "kinds"),
    [
        ("gpt2_nano", {"GPT2Block": 4}),
        ("bert_nano", {"BertLayer": 4}),
        ("transformer_nano", {"MarianEncoderLayer": 2, "MarianDecoderLayer": 2}),
        ("vit_nano", {"Block": 4}),
        ("resnet_nano", {"BasicBlock": 4}),
    ],
)
def test_blocks_are_the_repeated_layers(model, kinds):
    run = config.load([f"model={model}"])
    found = [type(m).__name__ for m in compilation.blocks(build_model(build_task(run), META))]
    assert {name: found.count(name) for name in found} == kinds


@pytest.mark.parametrize(
    ("method", "phases"),
    [
        pytest.param("sste", 1, id="sste: the backward draws"),
        pytest.param(
            "sste sparsity.mvue=weight", 1, id="sste: the projection draws", marks=pytest.mark.slow
        ),
        pytest.param("tsrste sparsity.mvue=none", 2, id="tsrste: ends with a dense phase"),
    ],
)
def test_equal_blocks_share_one_graph_per_phase(tiny, counter, method, phases):
    words = (*f"sparsity={method}".split(), "batch.micro=2", "steps=8", "model.n_layer=6")
    losses = []
    for mode in ("none", "blocks"):
        session = tiny.build(*words, f"compile={mode}")
        losses.append([loop.train_step(session).loss for _ in range(8)])
        losses[-1].append(validation.evaluate(session, "validation", 1, final=False)["loss"])
    assert losses[0] == losses[1]
    assert counter.frame_count == phases
    assert not counters["graph_break"]


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.layer = nn.Linear(4, width)

    def forward(self, x):
        return x + self.layer(x).sum(-1, keepdim=True)


@torch._dynamo.config.patch(recompile_limit=8)
def test_many_kinds_of_blocks_are_all_compiled(counter):
    """Dynamo compiles eight graphs of one function by default; ResNet-50 has that many kinds."""
    model = nn.Sequential(nn.ModuleList(Block(width) for width in range(1, 13)))
    compilation.compiled(model, "blocks")
    for block in model[0]:
        block(torch.ones(2, 4))
    assert counter.frame_count == 12
