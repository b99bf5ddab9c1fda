"""The state of a session: named parts of tensors and plain values, which older forms become."""

import copy
import json

import pytest
import torch

from sparsepretrain.errors import CheckpointError
from sparsepretrain.runs.checkpoint import Checkpoint
from sparsepretrain.training import session_state
from sparsepretrain.training.loop import train_step
from support.tiny_runs import assert_equal_bits

TENSORS = {"model", "optimizer", "ema"}


def trained(tiny, *overrides, steps=3):
    t = tiny.build(*overrides)
    for _ in range(steps):
        train_step(t)
    return t


WORDS = ["ema=0.9", "sparsity=step steps=40", "optim=sgd precision=fp16"]


@pytest.mark.parametrize("words", [*WORDS, "optim=lion schedule=constant"])
def test_parts_are_tensors_by_name_or_json(tiny, words):
    words = words.split()
    t = trained(tiny, *words)
    state = copy.deepcopy(session_state.state_dict(t))
    assert ("ema" in state) == ("ema=0.9" in words)
    for part in TENSORS & state.keys():
        assert all(isinstance(v, torch.Tensor) for v in state[part].values()), part
    parameters = {name for name, _ in t.model.named_parameters()}
    assert {word.rpartition("|")[0] for word in state["optimizer"]} == parameters
    plain = {key: value for key, value in state.items() if key not in TENSORS}
    read = json.loads(json.dumps(plain, allow_nan=False))
    again = tiny.build(*words)
    session_state.load_state_dict(again, {**state, **read})
    assert_equal_bits(json.loads(json.dumps(plain)), read)
    for _ in range(2):
        assert train_step(t).loss == train_step(again).loss
    left, right = session_state.state_dict(t), session_state.state_dict(again)
    assert_equal_bits(left, right)


def test_loaded_state_does_not_depend_on_its_files(tiny):
    """What is read as pages of a file is copied: the file may change afterwards."""
    outcome = tiny.train("ema=0.9", "steps=2")
    (path,) = (outcome.directory / "checkpoints").iterdir()
    t = tiny.build("ema=0.9", "steps=2")
    session_state.load_state_dict(t, Checkpoint(path).parts(mapped=session_state.STORED))
    before = copy.deepcopy(session_state.state_dict(t))
    for file in path.glob("*.safetensors"):
        with open(file, "r+b") as opened:
            opened.write(bytes(file.stat().st_size))
    assert_equal_bits(before, session_state.state_dict(t))


def test_wrong_states_are_refused_with_their_source(tiny):
    state = session_state.state_dict(trained(tiny))
    with pytest.raises(CheckpointError, match=r"^here has 7 steps.* steps=6"):
        session_state.load_state_dict(tiny.build(), {**state, "step": 7}, "here")
    with pytest.raises(CheckpointError, match=r"^here .*other data"):
        session_state.load_state_dict(tiny.build(), {**state, "fingerprint": "0"}, "here")
    for words in (("model.n_embd=16",), ("model.bias=true",)):
        with pytest.raises(CheckpointError, match=r"^here "):
            session_state.load_state_dict(tiny.build(*words), state, "here")


def test_numerics_flags_follow_the_run(tiny):
    """The flags of torch, which have no effect on a CPU: the numbers stay the same."""

    def flags():
        tf32 = torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
        return (*tf32, torch.are_deterministic_algorithms_enabled())

    words = ("sparsity=sste", "steps=3")
    plain = tiny.build(*words)
    assert flags() == (False, False, False)
    expected = [train_step(plain).loss for _ in range(3)]
    strict = tiny.build(*words, "deterministic=true", "precision.tf32=true")
    assert flags() == (True, True, True)
    assert [train_step(strict).loss for _ in range(3)] == expected
    tiny.build(*words)
    assert flags() == (False, False, False)
    assert tiny.directory(*words) == tiny.directory(*words, "deterministic=true")
    assert tiny.directory(*words) != tiny.directory(*words, "precision.tf32=true")
