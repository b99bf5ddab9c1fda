"""What runs that are compared have in common is recorded: weights, data order, evaluation."""

import json

import torch
from torch import nn

from sparsepretrain.training.identity import run_hashes, weights_hash


def recorded(directory):
    return json.loads((directory / "environment.json").read_text()).get("hashes")


def differing(left, right):
    assert list(left) == list(right) == ["initial_weights", "data_order", "evaluation"]
    return {key for key in left if left[key] != right[key]}


def test_hashes_differ_by_what_differs(tiny):
    def hashes(*words):
        return run_hashes(tiny.build("seed=7", *words), None)["hashes"]

    one = hashes("sparsity=sste")
    assert all(len(value) == 16 for value in one.values())
    # asp prunes before the first forward; the adapters of slope are Parameters of their own
    for words in (["dense"], ["asp", "sparsity.at=0"], ["slope", "sparsity.adapters.rank=2"]):
        assert not differing(one, hashes(f"sparsity={words[0]}", *words[1:])), words
    assert differing(one, hashes("sparsity=sste", "seed=8")) == {"initial_weights", "data_order"}
    assert differing(one, hashes("sparsity=sste", "model.n_embd=16")) == {"initial_weights"}
    assert differing(one, hashes("sparsity=sste", "batch.size=8")) == {"data_order"}
    assert differing(one, hashes("sparsity=sste", "eval.batches=2")) == {"evaluation"}
    both = {"data_order", "evaluation"}
    assert differing(one, hashes("sparsity=sste", "data.seed=3")) == both
    assert hashes("sparsity=sste", "eval.batches=0")["evaluation"] is None


def test_one_changed_weight_changes_the_hash():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    before = weights_hash(model)
    assert before == weights_hash(model)
    model[0].weight.data[3, 3] += 1e-6
    changed = weights_hash(model)
    model[1].num_batches_tracked += 1
    assert len({before, changed, weights_hash(model)}) == 3
    assert weights_hash(model.to(torch.bfloat16)) != weights_hash(model.float())


def test_resumed_run_keeps_its_hashes(tiny, stop_after):
    stop_after(3)
    directory = tiny.train().directory
    began = recorded(directory)
    file = directory / "environment.json"
    marked = {**json.loads(file.read_text()), "hashes": {**began, "initial_weights": "as it was"}}
    file.write_text(json.dumps(marked))
    stop_after(4)
    assert tiny.train().directory == directory
    assert recorded(directory) == marked["hashes"]
    # a run of another name that continues it: the weights are still those that the first one drew
    stop_after(-1)
    checkpoint = sorted((directory / "checkpoints").glob("step_*"))[-1]
    other = tiny.train("name=other", f"resume='{checkpoint}'").directory
    assert other != directory and recorded(other) == marked["hashes"]


def test_run_without_hashes_stays_without(tiny, stop_after):
    stop_after(3)
    directory = tiny.train().directory
    file = directory / "environment.json"
    for text in (json.dumps({"commit": "abc"}), "{"):
        file.write_text(text)
        stop_after(4 if text == "{" else 5)
        tiny.train()
        assert recorded(directory) is None


def test_initial_weights_are_those_of_the_checkpoint(tiny):
    source = tiny.train().directory
    runs = [tiny.train(f"init.path='{source}'", f"seed={seed}").directory for seed in (1, 2)]
    first, second = map(recorded, runs)
    assert differing(first, second) == {"data_order"}
    assert differing(first, recorded(source)) == {"initial_weights", "data_order"}
