"""Copies of sparse layers and models: refused where nothing would update their masks and phases."""

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

import sparsepretrain as sp
from sparsepretrain.errors import ConfigError, SparsePretrainWarning
from support.small_loops import said, train
from support.small_models import Net, draw
from support.sparse_cases import build


def copied_beside(model):
    model.further = copy.deepcopy(model.fc1)


def copied_in_place(model):
    model.fc2 = copy.deepcopy(model.fc2)


def saved_modules_of_peft(model):
    model.fc1 = nn.ModuleDict({"original": model.fc1, "copy": copy.deepcopy(model.fc1)})


@pytest.mark.parametrize("copies", [copied_beside, saved_modules_of_peft])
@pytest.mark.parametrize("act", ["attach", "step", "densify"])
def test_a_copy_of_a_layer_in_its_own_model_is_refused(copies, act):
    model, optimizer, handle = build("asp", {"at": 0.5})
    if act == "attach":
        handle.detach()
    elif act == "densify":
        train(model, optimizer, 0, 1)
    copies(model)
    with pytest.raises(ConfigError, match="copy"):
        if act == "attach":
            handle.attach(optimizer)
        elif act == "step":
            optimizer.step()
        else:
            sp.densify(model)


def test_a_layer_that_its_copy_replaced_is_refused():
    model, optimizer, _ = build("asp", {"at": 0.5})
    copied_in_place(model)
    with pytest.raises(ConfigError, match="replaced after sparsify: fc2"):
        optimizer.step()


def test_a_container_of_the_layers_themselves_can_be_densified():
    """The backbone of a classifier: nn.Sequential(*list(model.children())[:-1])."""
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(3)))
    sp.sparsify(model, "ste", targets=["*"])
    x = draw(4, 16, dtype=torch.float32)
    backbone = nn.Sequential(*list(model.children())[:-1])
    before = backbone(x), model(x)
    assert sp.densify(backbone) is backbone and type(backbone[0]) is nn.Linear
    torch.testing.assert_close((backbone(x), model(x)), before, rtol=0, atol=0)
    assert [*sp.sparsifier_of(model).layers] == ["2"]
    copied = nn.Sequential(*(nn.Linear(16, 16) for _ in range(3)))
    sp.sparsify(copied, "ste", targets=["*"])
    with pytest.raises(ConfigError, match="densify the whole model before its parts"):
        sp.densify(copy.deepcopy(nn.Sequential(*list(copied.children())[:-1])))


FIXED = [("asp", {"at": 0.0}), ("slope", {}), ("tsrste", {"refresh": 100})]


def of_equal_steps(method, options):
    states = []
    for seed in (0, 1):
        model, optimizer, _ = build(method, options)
        for parameter in model.parameters():
            parameter.data.copy_(draw(*parameter.shape, seed=seed))
        sp.sparsifier_of(model).reset()
        train(model, optimizer, seed, seed + 1)
        states.append(model.state_dict())
    return model, *states


AVERAGES = {
    "double": lambda a, b: ((a.double() + b.double()) / 2).to(a.dtype),
    "integers": lambda a, b: (a + (b - a) // 2) if not a.is_floating_point() else (a + b) / 2,
}


@pytest.mark.parametrize("average", AVERAGES)
@pytest.mark.parametrize(("method", "options"), FIXED)
def test_averages_of_stored_masks_are_refused(method, options, average):
    """A soup of models, or of clients, whose counters are equal."""
    model, one, two = of_equal_steps(method, options)
    soup = {k: AVERAGES[average](v, two[k]) for k, v in one.items()}
    with pytest.raises(ConfigError, match=r"mask of '.*' .*keeps more than 2 of 4 in .* averaged"):
        model.load_state_dict(soup)
    for key, buffer in model.named_buffers():  # without a load
        buffer.copy_(soup[key])
    with pytest.raises(ConfigError, match="masks of several models were averaged"):
        sp.densify(model)
    model.load_state_dict(one)
    sp.densify(model)


def test_masks_that_are_not_chosen_yet_load():
    model, _, _ = build("asp", {"at": 0.5})
    other, _, _ = build("asp", {"at": 0.5})
    other.load_state_dict(model.state_dict())


def test_copied_blocks_are_separate_models():
    blocks = nn.ModuleList(copy.deepcopy(build("ste")[0]) for _ in range(3))
    with pytest.raises(ConfigError, match="sparsifier_of on each part"):
        sp.sparsifier_of(blocks)
    optimizers = []
    for block in blocks:
        optimizers.append(torch.optim.SGD(block.parameters(), lr=0.1))
        sp.sparsifier_of(block).attach(optimizers[-1])
    blocks[1](draw(4, 16)).sum().backward()
    optimizers[1].step()
    assert [sp.sparsifier_of(block).completed_steps for block in blocks] == [0, 1, 0]
    sp.densify(blocks)


def test_nested_sparsifiers_are_no_copies():
    """Parts and containers may be made sparse after one another."""
    inner, outer = Net(), nn.ModuleDict({"other": Net()})
    first = sp.sparsify(inner, "ste", targets=["fc1"])
    outer["inner"] = inner
    second = sp.sparsify(outer, "srste", targets=["other.fc1", "inner.fc2"])
    optimizer = torch.optim.SGD(outer.parameters(), lr=0.1)
    first.attach(optimizer)
    second.attach(optimizer)
    outer["inner"](draw(4, 16)).sum().backward()
    optimizer.step()
    assert (first.completed_steps, second.completed_steps) == (1, 1)
    sp.densify(copy.deepcopy(outer)["inner"])


def average_of_floats(average, model):
    """YOLO's ModelEMA and ema_pytorch: everything that is no integer."""
    own = model.state_dict()
    for key, value in average.state_dict().items():
        if value.is_floating_point():
            value.lerp_(own[key], 0.5)


def average_of_parameters(average, model):
    with torch.no_grad():
        for ours, theirs in zip(average.parameters(), model.parameters(), strict=True):
            ours.lerp_(theirs, 0.5)


CHANGING = [
    ("asp", {"at": 0.5}),
    ("sdgf", {"until": 0.5}),
    ("mdgf", {"until": 0.5}),
    ("ste", {"window": {"start": 0.5}}),
]


@pytest.mark.parametrize("update", [average_of_floats, average_of_parameters])
@pytest.mark.parametrize(("method", "options"), CHANGING)
def test_an_average_that_keeps_the_first_phase_warns_once(method, options, update, recwarn):
    model, optimizer, _ = build(method, options)
    average = copy.deepcopy(model).eval()
    for step in range(5):
        train(model, optimizer, step, step + 1)
        update(average, model)
        with torch.no_grad():
            average(draw(2, 16))
    (line,) = said(recwarn)
    assert "stay at step 0" in line and "copy integer buffers" in line


@pytest.mark.parametrize(("method", "options"), [*CHANGING, ("sste", {}), ("sdgp", {})])
def test_an_average_that_copies_buffers_does_not_warn(method, options):
    model, optimizer, _ = build(method, options)
    average = AveragedModel(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error", SparsePretrainWarning)
        for step in range(5):
            train(model, optimizer, step, step + 1)
            average.update_parameters(model)
            average.state_dict()
            average.eval()(draw(2, 16))


@pytest.mark.parametrize(("method", "options"), CHANGING[1:3])
def test_densify_names_the_phase_of_an_unfinished_pattern(method, options):
    model, optimizer, _ = build(method, options)
    train(model, optimizer, 0, 3)
    with pytest.warns(SparsePretrainWarning, match="has not reached its pattern after 3 steps"):
        sp.densify(model)
