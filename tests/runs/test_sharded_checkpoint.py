"""Checkpoints that several ranks save together; a thread stands for a rank."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch.distributed import checkpoint as dcp

from sparsepretrain.errors import CheckpointError
from sparsepretrain.runs import checkpoint, tensors, weights
from sparsepretrain.runs.checkpoint import Checkpoint, Ranks, Retention
from sparsepretrain.runs.directory import RunDirectory
from sparsepretrain.runs.tensors import RowSlice, Stored

WHOLE = {
    "w": torch.arange(21.0).view(7, 3),
    "short": torch.arange(2.0, dtype=torch.float64),  # the third rank has no row of it
    "scalar": torch.tensor(5),
}


class Thread(Ranks):
    """Rank of a world of threads."""

    def __init__(self, rank, size, shared, barrier):
        self.rank, self.size, self._shared, self._barrier = rank, size, shared, barrier

    def gather(self, value):
        self._shared[self.rank] = value
        self._barrier.wait(120)
        found = list(self._shared)
        self._barrier.wait(120)
        return found


def parts(rank, size):
    """What a rank saves of WHOLE, in the chunks of torch.chunk."""
    own = {}
    for name, tensor in WHOLE.items():
        if tensor.dim() == 0:
            if rank == 0:
                own[name] = tensor
            continue
        chunk = -(-len(tensor) // size)
        rows = tensor[rank * chunk : (rank + 1) * chunk]
        if len(rows):
            own[name] = RowSlice(rows, rank * chunk)
    return {"step": 3, "model": own} if rank == 0 else {"model": own}


def save(directory, size, step=3, keep=1):
    """Save with ``size`` ranks; their results, or what they raised."""
    shared, barrier = [None] * size, threading.Barrier(size)

    def one(rank):
        options = {"keep": Retention(keep), "ranks": Thread(rank, size, shared, barrier)}
        try:
            return checkpoint.save(directory, step, parts(rank, size), config="a: 1\n", **options)
        except CheckpointError as error:
            return error

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(one, range(size)))


@pytest.mark.parametrize("size", [1, 2, 3])
def test_sharded_checkpoints_are_averaged_in_fp64(tmp_path, monkeypatch, size):
    directory = tmp_path / "run" / "checkpoints"
    run = RunDirectory(directory.parent)
    # 2^24 + 1 is not in fp32: neither are the sums
    values = {1: 2.0**24, 2: 1.0, 3: 1.0}
    for step, value in values.items():
        monkeypatch.setitem(WHOLE, "w", torch.full((7, 3), value))
        monkeypatch.setitem(WHOLE, "short", torch.full((2,), 0.1 * step, dtype=torch.float64))
        assert all(isinstance(path, Path) for path in save(directory, size, step, keep=3))
    source = weights.find(run.path, average=3)
    state = source.model_state(["w", "short"])
    exact = torch.tensor((2**24 + 2) / 3, dtype=torch.float64)
    assert torch.equal(state["w"], exact.float().expand(7, 3)) and state["w"].dtype == torch.float32
    expected = (torch.tensor([0.1, 0.1], dtype=torch.float64) + 0.2 + 0.1 * 3) / 3
    assert torch.equal(state["short"], expected)
    assert state["scalar"] == 5, "not a parameter"


@pytest.mark.parametrize("size", [1, 2, 3])
def test_rows_of_all_ranks_are_joined(tmp_path, size):
    paths = save(tmp_path, size)
    assert len(set(paths)) == 1
    state = Checkpoint(paths[0]).parts()
    assert state["step"] == 3 and state["model"].keys() == WHOLE.keys()
    for name, tensor in WHOLE.items():
        assert torch.equal(state["model"][name], tensor)
        assert state["model"][name].dtype == tensor.dtype
        stored = Checkpoint(paths[0]).parts(mapped=["model"])["model"][name]
        assert tuple(stored.shape) == tuple(tensor.shape)
        for first in range(len(tensor) if tensor.dim() else 0):
            for last in range(first, len(tensor) + 1):
                assert torch.equal(stored[first:last], tensor[first:last])


@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_reader_of_torch_reads_it(tmp_path, size):
    path = save(tmp_path, size)[0]
    found = {f"model.{name}": torch.zeros_like(tensor) for name, tensor in WHOLE.items()}
    dcp.load(found, storage_reader=dcp.HuggingFaceStorageReader(str(path)), no_dist=True)
    for name, tensor in WHOLE.items():
        assert torch.equal(found[f"model.{name}"], tensor), name


def test_a_lost_or_changed_shard_is_damage(tmp_path):
    path = save(tmp_path, 3)[0]
    shard = path / checkpoint.SHARD.format(1, "model")
    content = shard.read_bytes()
    shard.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert "shard-00001-model.safetensors does not match" in Checkpoint(path).problem()
    shard.unlink()
    assert Checkpoint(path).problem() == "shard-00001-model.safetensors is missing"
    shard.write_bytes(content)
    assert Checkpoint(path).problem() is None
    (path / checkpoint.SHARD.format(7, "model")).write_bytes(content)
    assert "does not name its files" in Checkpoint(path).problem()


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_a_failure_of_one_rank_is_raised_on_all(tmp_path, monkeypatch, failing):
    save(tmp_path, 3, step=1, keep=2)
    original = safetensors.torch.save_file

    def full(tensors, file, *header):
        if f"shard-{failing:05d}" in file.name:
            raise OSError(28, "No space left on device")
        original(tensors, file, *header)

    monkeypatch.setattr(safetensors.torch, "save_file", full)
    errors = save(tmp_path, 3, keep=2)
    assert len({str(error) for error in errors}) == 1
    assert all(isinstance(error, CheckpointError) for error in errors)
    assert "cannot write checkpoint" in str(errors[0]) and "disk full" in str(errors[0])
    assert [p.name for p in tmp_path.iterdir()] == ["step_00000001"]
    monkeypatch.undo()
    assert Checkpoint(save(tmp_path, 2, keep=2)[0]).problem() is None


def test_missing_rows_are_refused():
    rows = torch.zeros(2, 3)
    for pieces in ({}, {1: rows}, {0: rows, 3: rows}, {0: rows, 1: rows}):
        with pytest.raises(ValueError, match="rows"):
            Stored(pieces)


def test_a_shard_has_the_same_bytes_each_time(tmp_path):
    """Several keys in the header would be written in any order."""
    for number in range(8):
        tensors.write(tmp_path / str(number), {"a": torch.arange(6.0).view(3, 2)}, {"a": 3})
    assert len({file.read_bytes() for file in tmp_path.iterdir()}) == 1
