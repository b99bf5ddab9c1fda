"""``compile``: what it comes to, what a block is, how many graphs there are."""

import functools

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters

from sparsepretrain import config
from sparsepretrain.config import freeze
from sparsepretrain.tasks import build_task
from sparsepretrain.training import compilation, loop, validation
from sparsepretrain.training.assembly import META, build_model

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
        ("probe=descent", CUDA, "none", False),
        *((f"compile={word}", CUDA, "none", False) for word in ("false", "off", "none")),
        ("compile=blocks", CPU, "blocks", False),
        ("compile=true", CPU, "model", False),
    ],
)
def test_every_value_decides_on_blocks_and_loss(words, device, mode, loss):
    run = config.load(words.split())
    assert compilation.mode_of(run, device) == mode
    assert compilation.compiles_loss(run, device) is loss


@pytest.mark.parametrize("model", ["gpt2_nano", "bert_nano"])
def test_training_with_a_compiled_loss_gives_the_same_losses(tiny, monkeypatch, model):
    losses = []
    for compiles in (False, True):
        monkeypatch.setattr(compilation, "compiles_loss", lambda *_, c=compiles: c)
        session = tiny.build("sparsity=sste", f"model={model}", "batch.micro=2")
        losses.append([loop.train_step(session).loss for _ in range(3)])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def test_only_compile_true_changes_the_identity():
    def identity(word):
        return freeze.identity(config.load([f"compile={word}"]))

    assert {identity(w) for w in ("auto", "none", "blocks")} == {identity("false")}
    assert identity("true") != identity("false")


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
        pytest.param("sste sparsity.mvue=weight", 1, id="sste: the projection draws"),
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
