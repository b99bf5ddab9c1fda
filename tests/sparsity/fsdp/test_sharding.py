"""Sharding in a world of one process: the order of calls, what is refused, what state dicts hold.

Several processes: tests/suites/dist/test_sharded_loops.py.
"""

import copy
import math
import pickle

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import sparsepretrain as sp
from sparsepretrain.errors import ConfigError
from sparsepretrain.optim import AdamS, ASTAdamW, StepAdamW
from sparsepretrain.sparsity.fsdp.sharding import MasterShard, part_of, plain, whole
from support.small_loops import attached
from support.tiny_runs import assert_equal_bits


def pair(method="srste", **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16)).double()
    targets = {"targets": ["0", "2"]}
    return model, sp.sparsify(model, method, **targets, total_steps=6, **options)


def optimizer_of(model, method="srste"):
    if method in ("ast", "cast"):
        return {"ast": ASTAdamW, "cast": AdamS}[method](model.parameters(), lr=0.01)
    return torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)


def train(model, sparsifier, optimizer, steps=6):
    """The losses of ``steps`` of two micro-batches."""
    losses = []
    for step in range(steps):
        torch.manual_seed(step)
        for index, x in enumerate(torch.randn(2, 8, 16, dtype=torch.float64)):
            sparsifier.micro_batch(index)
            loss = (model(x) - x.roll(1)).square().mean()
            loss.backward()
            losses.append(float(loss.detach()))
        optimizer.step()
        optimizer.zero_grad()
    return losses


def sharded(mesh, method="srste", **options):
    model, sparsifier = pair(method, **options)
    sparsifier.prepare_sharding()
    fully_shard(model, mesh=mesh)
    return model, sparsifier, attached(sparsifier, optimizer_of(model, method))


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("srste", {}),
        ("bimask", {"every": 2, "candidates": 4}),
        ("bimask", {"n": 1, "m": 8, "every": 2, "candidates": 4}),
        ("tsrste", {"n": 4, "m": 8, "refresh": 2}),
        ("ast", {"refresh": 2, "slorb": 4}),
        ("cast", {"refresh": 2, "decay": 0.01}),
    ],
)
def test_one_shard_trains_like_the_unsharded_model(mesh, method, options):
    plain, alone = pair(method, **options)
    optimizer = attached(alone, optimizer_of(plain, method))
    model, sparsifier, steps = sharded(mesh, method, **options)
    assert isinstance(model[0].weight, DTensor)
    assert train(model, sparsifier, steps) == train(plain, alone, optimizer)
    assert sparsifier.metrics() == alone.metrics()
    assert_equal_bits(sparsifier.masks(), alone.masks())
    assert str(sparsifier.prove()) == str(alone.prove())
    found = {name: whole(value) for name, value in model.state_dict().items()}
    assert_equal_bits(found, dict(plain.state_dict()))
    assert isinstance(model.state_dict()["0.sparsity.previous_mask"], DTensor)


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("srste", {}),
        ("sste", {"mvue": "weight"}),
        ("tsrste", {"dense_tail": 0.0}),
        ("asp", {"at": 0.0}),
        ("slope", {}),
        ("slope", {"adapters": {"rank": 4, "start": 0.0}}),
        ("ast", {"slorb": 4}),
        ("cast", {}),
        ("dense", {}),
    ],
)
def test_weights_of_evaluation_of_shards_are_those_of_the_model(mesh, method, options):
    plain_model, alone = pair(method, **options)
    optimizer = attached(alone, optimizer_of(plain_model, method))
    model, sparsifier, steps = sharded(mesh, method, **options)
    train(model, sparsifier, steps, 3), train(plain_model, alone, optimizer, 3)
    expected = alone.dense_state_dict()
    assert_equal_bits(sparsifier.dense_state_dict(), expected)
    rows = sparsifier.dense_state_dict(full=False)
    assert all(isinstance(value, DTensor) for key, value in rows.items() if "weight" in key)
    assert_equal_bits({key: whole(value) for key, value in rows.items()}, expected)
    stock = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16)).double()
    stock.load_state_dict(expected)
    x = torch.randn(4, 16, dtype=torch.float64)
    torch.testing.assert_close(stock(x), plain_model.eval()(x))


@pytest.mark.parametrize("method", ["srste", "sste", "tsrste", "sdgp", "slope"])
def test_one_shard_trains_like_the_unsharded_model_under_autocast(mesh, method):
    losses = []
    for is_sharded in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
        sparsifier = sp.sparsify(model, method, targets=["0", "2"], total_steps=3)
        if is_sharded:
            sparsifier.prepare_sharding()
            fully_shard(model, mesh=mesh)
        optimizer = attached(sparsifier, optimizer_of(model))
        for _ in range(3):
            with torch.autocast("cpu", torch.bfloat16):
                loss = (model(torch.ones(4, 16)) - 1).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
    assert losses[:3] == losses[3:] and losses[2] < losses[0]


@pytest.mark.parametrize("method", ["sste", "slope"])
def test_operands_are_gathered_in_the_dtype_of_fsdp(mesh, method):
    """Also after ``store_operands`` named another one."""
    model, sparsifier, optimizer = sharded(mesh, method)
    expected = train(model, sparsifier, optimizer)
    model, sparsifier, optimizer = sharded(mesh, method)
    sparsifier.store_operands(torch.bfloat16)
    assert train(model, sparsifier, optimizer) == expected


def test_state_dict_loads_into_shards(mesh):
    plain, alone = pair("asp", at=0.0)
    train(plain, alone, attached(alone, optimizer_of(plain)))
    state = copy.deepcopy(plain.state_dict())
    model, sparsifier, _ = sharded(mesh, "asp", at=0.0)
    own = model.state_dict()
    model.load_state_dict({name: part_of(value, own[name]) for name, value in state.items()})
    x = torch.randn(3, 16, dtype=torch.float64)
    assert torch.equal(model.eval()(x), plain.eval()(x))
    assert torch.equal(sparsifier.masks()["0"], alone.masks()["0"])
    assert torch.equal(whole(model.state_dict()["0.sparsity.mask"]), state["0.sparsity.mask"])


@pytest.mark.parametrize("method", ["asp", "tsrste", "bimask", "slope"])
def test_missing_mask_is_an_error(mesh, method):
    """Never a dense layer, nor the mask of before."""
    model, sparsifier, _ = sharded(mesh, method)
    state = model.state_dict()
    kept = [f"0.sparsity.{name}" for name in sparsifier.layers["0"].operands.rows.names]
    assert kept and (len(kept) > 1 or method == "bimask")
    for name in kept:
        rest = {key: value for key, value in state.items() if key != name}
        with pytest.raises(RuntimeError, match=f"Missing key.*{name}"):
            model.load_state_dict(rest)


def test_lost_backward_weight_is_an_error(mesh, monkeypatch):
    gathered = MasterShard.fsdp_post_all_gather

    def first_only(own, outputs, metadata, param_dtype, *, out=None):
        return gathered(own, outputs[:1], (metadata[0], ()), param_dtype, out=out)

    monkeypatch.setattr(MasterShard, "fsdp_post_all_gather", first_only)
    with pytest.raises(AssertionError):
        train(*sharded(mesh, "bimask", every=2, candidates=4))


def test_a_master_shard_is_pickled_as_a_plain_tensor():
    found = pickle.loads(pickle.dumps(MasterShard(torch.arange(4.0))))
    assert type(found) is torch.Tensor and torch.equal(found, torch.arange(4.0))


def test_edited_weights_take_effect_after_refresh(mesh):
    model, sparsifier, optimizer = sharded(mesh, "ste")
    x = torch.randn(3, 16, dtype=torch.float64)
    before = model.eval()(x)  # from here on the root holds what it has gathered
    plain, _ = pair("ste")
    with torch.no_grad():
        for parameter in (*optimizer.param_groups[0]["params"], *plain.parameters()):
            parameter.mul_(2)
    sparsifier.refresh()
    after = model(x)
    assert torch.equal(after, plain.eval()(x)) and not torch.equal(after, before)


def perform(steps, mesh):
    """Call what ``steps`` name, in that order."""
    model, sparsifier = pair()
    optimizers = []
    actions = {
        "prepare": sparsifier.prepare_sharding,
        "shard": lambda: fully_shard(model, mesh=mesh),
        "shard-columns": lambda: fully_shard(
            model, mesh=mesh, shard_placement_fn=lambda parameter: Shard(parameter.dim() - 1)
        ),
        "optimizer": lambda: optimizers.append(optimizer_of(model)),
        "attach": lambda: sparsifier.attach(optimizers[-1] if optimizers else optimizer_of(model)),
        "run": lambda: model(torch.ones(2, 16, dtype=torch.float64)),
        "densify": lambda: sp.densify(model),
        "hold": lambda: sparsifier.hold(sparsifier.masks()),
    }
    for step in steps.split():
        actions[step]()


@pytest.mark.parametrize(
    ("steps", "words"),
    [
        ("prepare prepare", "already: the order is sparsify, prepare_sharding,"),
        ("optimizer attach prepare", "attached already: the order is sparsify,"),
        ("shard prepare", "'0' is sharded already: the order is sparsify,"),
        ("shard attach", "call sparsifier.prepare_sharding.. in between"),
        ("prepare attach", "'0' was prepared and is not sharded"),
        ("optimizer prepare shard attach", "missing in the optimizer: .*after fully_shard"),
        ("prepare shard run", "call fully_shard.model. and sparsifier.attach.optimizer. before"),
        ("prepare run", "call fully_shard.model. and sparsifier.attach.optimizer. before"),
        ("prepare shard attach densify", "cannot be densified"),
        ("prepare shard attach hold", "held masks"),
        ("prepare shard-columns attach", "dimension 0"),
    ],
)
def test_wrong_order_of_calls_is_refused(mesh, steps, words):
    with pytest.raises(ConfigError, match=words) as caught:
        perform(steps, mesh)
    assert "\n" not in str(caught.value)


def test_simulated_fp8_cannot_be_sharded():
    with pytest.raises(ConfigError, match="fp8_sim"):
        pair(precision="fp8_sim")[1].prepare_sharding()


@pytest.mark.parametrize("resharded", [True, False])
def test_operands_of_another_phase_are_refused(mesh, resharded):
    # only a part is sparse, whose hook cannot make FSDP gather the whole again
    inner = nn.Sequential(nn.Linear(16, 16))
    model = nn.Sequential(inner)
    sparsifier = sp.sparsify(inner, "step", targets=["0"], total_steps=100, clipping=[0.5, 0.9])
    sparsifier.prepare_sharding()
    fully_shard(model, mesh=mesh, reshard_after_forward=False)
    optimizer = StepAdamW(model.parameters(), lr=0.01, clipping=(50, 90))
    sparsifier.attach(optimizer)
    x = torch.ones(2, 16)
    with torch.no_grad():
        sparse = model.eval()(x)
    model.train()
    if resharded:
        model.reshard()
        assert not torch.equal(model(x), sparse)
    else:
        with pytest.raises(ConfigError, match=r"layer '0' .*another phase"):
            model(x)


@pytest.mark.parametrize("trained", [False, True])
def test_a_sharded_state_dict_is_written_as_safetensors_and_read_again(mesh, tmp_path, trained):
    model, sparsifier = pair("sste")
    sparsifier.prepare_sharding()
    fully_shard(model, mesh=mesh)
    if trained:
        train(model, sparsifier, attached(sparsifier, optimizer_of(model)), steps=2)
    state = {key: value for key, value in model.state_dict().items() if "counters" not in key}
    shards = [v._local_tensor if isinstance(v, DTensor) else v for v in state.values()]
    assert not any(isinstance(shard, MasterShard) for shard in shards)
    writer = HuggingFaceStorageWriter(str(tmp_path), save_distributed=True)
    dcp.save(state, storage_writer=writer)
    expected = {key: whole(value).clone() for key, value in state.items()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    dcp.load(state, storage_reader=HuggingFaceStorageReader(str(tmp_path)))
    found = {key: whole(value) for key, value in model.state_dict().items() if key in expected}
    assert_equal_bits(found, expected)


def test_a_consolidated_file_loads_in_stock_transformers(mesh, tmp_path):
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
    config = LlamaConfig(**sizes, vocab_size=40, num_hidden_layers=2, tie_word_embeddings=False)
    model = LlamaForCausalLM(config)
    sparsifier = sp.sparsify(model, "sste", targets=["*.mlp.*"], seed=0)
    sparsifier.prepare_sharding()
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    sparsifier.attach(optimizer_of(model))
    writer = HuggingFaceStorageWriter(
        str(tmp_path), save_distributed=True, enable_consolidation=True
    )
    # torch consolidates floating-point tensors only, and stock models have no other keys
    state = {key: value for key, value in model.state_dict().items() if "sparsity" not in key}
    dcp.save(state, storage_writer=writer)
    config.save_pretrained(tmp_path)
    stock = LlamaForCausalLM.from_pretrained(tmp_path)
    assert_equal_bits(dict(stock.state_dict()), {key: whole(value) for key, value in state.items()})


@pytest.mark.parametrize("prepared", [False, True])
def test_tensor_parallelism_is_refused(mesh, prepared):
    model, sparsifier = pair()
    if prepared:
        sparsifier.prepare_sharding()
    with pytest.raises(ConfigError, match="tensor parallelism"):
        parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})


@pytest.mark.parametrize("filled", ["loaded", "initialized"])
@pytest.mark.parametrize("method", ["sste", "slope", "tsrste", "bimask"])
def test_a_model_from_the_meta_device_trains_like_one_made_in_memory(mesh, method, filled):
    whole_model, its_sparsifier = pair(method)
    weights = {k: v.clone() for k, v in whole_model.named_parameters() if "sparsity" not in k}
    its_optimizer = attached(its_sparsifier, optimizer_of(whole_model))
    with torch.device("meta"):
        model, sparsifier = pair(method)
    sparsifier.prepare_sharding()
    fully_shard(model, mesh=mesh)
    model.to_empty(device="cpu")
    if filled == "loaded":
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=False)
        set_model_state_dict(model, weights, options=options)
    else:
        with torch.no_grad():
            for name, value in weights.items():
                plain(model.get_parameter(name)).copy_(value)
    optimizer = attached(sparsifier, optimizer_of(model))
    if filled == "initialized":
        sparsifier.reset()
    assert train(model, sparsifier, optimizer) == train(whole_model, its_sparsifier, its_optimizer)


@pytest.mark.parametrize("order", ["replaced", "emptied before attach", "emptied after attach"])
def test_a_compiled_model_from_the_meta_device_reads_nothing_of_it(mesh, order):
    with torch.device("meta"):
        model, sparsifier = pair("sste")
    if order == "replaced":  # as the trainer does on all ranks but the first
        for module in model.modules():
            for tensors in (module._parameters, module._buffers):
                for name, old in tensors.items():
                    new = torch.zeros_like(old, device="cpu")
                    tensors[name] = nn.Parameter(new) if isinstance(old, nn.Parameter) else new
    sparsifier.prepare_sharding()
    model.compile(backend="aot_eager")
    fully_shard(model, mesh=mesh)
    if order == "emptied before attach":
        model.to_empty(device="cpu")
    optimizer = attached(sparsifier, optimizer_of(model))
    if order == "emptied after attach":
        model.to_empty(device="cpu")
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    sparsifier.reset()
    assert all(math.isfinite(x) for x in train(model, sparsifier, optimizer, steps=2))
