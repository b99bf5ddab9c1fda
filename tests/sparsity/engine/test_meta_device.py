"""Models that are made on the meta device, and weights that arrive after ``sparsify``."""

import copy

import pytest
import torch

import sparsepretrain as sp
from sparsepretrain.errors import ConfigError
from support.small_loops import attached, train
from support.small_models import Net, draw
from support.sparse_cases import build, every_case, optimizer_for, sparsify
from support.tiny_runs import assert_equal_bits


def on_meta(method, options):
    with torch.device("meta"):
        model = Net()
    sparsifier = sparsify(model, method, **options)
    return model, sparsifier


def initialize(model, source):
    with torch.no_grad():
        for name, parameter in source.named_parameters():
            model.get_parameter(name).copy_(parameter)


@every_case
def test_reset_after_to_empty_equals_a_model_made_in_memory(method, options):
    expected, its_optimizer, _ = build(method, options)
    model, sparsifier = on_meta(method, options)
    model.to_empty(device="cpu")
    initialize(model, Net())
    sparsifier.reset()
    optimizer = attached(sparsifier, optimizer_for(method, model.parameters()))
    assert_equal_bits(model.state_dict(), expected.state_dict())
    train(model, optimizer, 0, 3)
    train(expected, its_optimizer, 0, 3)
    assert_equal_bits(model.state_dict(), expected.state_dict())


@pytest.mark.parametrize("method", ["sste", "slope", "asp", "bimask"])
def test_uninitialized_buffers_are_refused(method):
    model, _ = on_meta(method, {"at": 0.0} if method == "asp" else {})
    model.to_empty(device="cpu")
    for buffer in model.buffers():  # memory may hold anything
        buffer.fill_(0 if buffer.is_floating_point() else 7)
    initialize(model, Net())
    with pytest.raises(ConfigError, match=r"'fc1' .*sparsifier\.reset\(\)"):
        model(draw(2, 16))


@pytest.mark.parametrize("assign", [False, True])
@every_case
def test_dense_state_dict_before_the_first_step_sets_initial_weights(method, options, assign):
    dense = Net(seed=5)
    expected = copy.deepcopy(dense)
    sparsify(expected, method, **options)
    for start in (Net(), None):
        model, sparsifier = on_meta(method, options)
        if start is not None:
            model, sparsifier = start, sparsify(start, method, **options)
        elif not assign:
            model.to_empty(device="cpu")
        model.load_state_dict(dense.state_dict(), strict=False, assign=assign)
        assert sparsifier.completed_steps == 0
        assert_equal_bits(dict(model.state_dict()), dict(expected.state_dict()))
        assert torch.equal(model(draw(2, 16)), expected(draw(2, 16)))


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("method", sp.list_methods())
def test_a_sparse_state_dict_fills_a_model_from_the_meta_device(method, assign):
    trained, optimizer, _ = build(method)
    train(trained, optimizer, 0, 3)
    model, sparsifier = on_meta(method, {})
    if not assign:
        model.to_empty(device="cpu")
    model.load_state_dict(copy.deepcopy(trained.state_dict()), assign=assign)
    assert sparsifier.completed_steps == 3
    assert_equal_bits(model.state_dict(), trained.state_dict())
    assert torch.equal(model(draw(2, 16)), trained(draw(2, 16)))


def test_a_dense_state_dict_after_a_step_keeps_the_scale():
    model, optimizer, sparsifier = build("sste")
    train(model, optimizer, 0, 1)
    before = model.fc1.sparsity.beta.clone()
    model.load_state_dict(Net(seed=5).state_dict(), strict=False)
    assert torch.equal(model.fc1.sparsity.beta, before) and sparsifier.completed_steps == 1


def test_reset_equals_a_fresh_sparsifier():
    model, optimizer, sparsifier = build("sste")
    train(model, optimizer, 0, 3)
    initialize(model, Net())
    sparsifier.reset()
    assert sparsifier.completed_steps == 0 and "flip_rate" not in sparsifier.metrics()
    expected, its_optimizer, _ = build("sste", cls=torch.optim.SGD)
    sparsifier.detach()
    optimizer = attached(sparsifier, torch.optim.SGD(model.parameters(), lr=1e-2))
    train(model, optimizer, 0, 3)
    train(expected, its_optimizer, 0, 3)
    assert_equal_bits(model.state_dict(), expected.state_dict())


def test_the_first_flip_rate_is_counted_from_weights_that_were_loaded():
    model, optimizer, sparsifier = build("ste", cls=torch.optim.SGD)
    model.load_state_dict(Net(seed=5).state_dict(), strict=False)
    expected, its_optimizer, other = build("ste", seed=5, cls=torch.optim.SGD)
    train(model, optimizer, 0, 1)
    train(expected, its_optimizer, 0, 1)
    assert sparsifier.metrics()["flip_rate"] == other.metrics()["flip_rate"]


def test_masks_of_a_checkpoint_that_is_loaded_after_attach_stay_the_baseline():
    options, late = {"refresh": 5, "dense_tail": 0.95}, {"lr": 0.3}  # masks drift in the tail
    trained, its_optimizer, _ = build("tsrste", options, **late)
    train(trained, its_optimizer, 0, 7)
    model, sparsifier = on_meta("tsrste", options)
    model.to_empty(device="cpu")
    optimizer = attached(sparsifier, optimizer_for("tsrste", model.parameters(), **late))
    model.load_state_dict(copy.deepcopy(trained.state_dict()))
    optimizer.load_state_dict(copy.deepcopy(its_optimizer.state_dict()))
    train(trained, its_optimizer, 7, 8)
    train(model, optimizer, 7, 8)
    assert_equal_bits(model.state_dict(), trained.state_dict())
