"""What a process knows of the others before it has met them."""

import pytest
import torch
import torch.distributed as dist

from sparsepretrain import config
from sparsepretrain.errors import ConfigError, SparsePretrainError
from sparsepretrain.training.assembly import synchronized
from sparsepretrain.training.launch import processes
from sparsepretrain.training.world import World, join

CPU = ("parallel.device=cpu", "batch.size=16", "batch.micro=4")


@pytest.mark.parametrize(
    ("words", "started", "told"),
    [
        ("parallel=single", 2, "parallel=single, but 2 processes"),
        ("parallel=ddp parallel.nproc=4", 2, "parallel.nproc=4, but 2 processes"),
        ("parallel=ddp parallel.nproc=2", None, "parallel.nproc=2"),
        ("parallel=ddp", 3, "batch.size must be a multiple of batch.micro·3"),
    ],
)
def test_unexpected_world_size_is_refused(words, started, told, monkeypatch):
    run = config.load([*words.split(), *CPU])
    for key in ("WORLD_SIZE", "RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(key, raising=False)
    if started is not None:
        monkeypatch.setenv("WORLD_SIZE", str(started))
        monkeypatch.setenv("RANK", "0")
    with pytest.raises(ConfigError) as caught, join(run):
        pass
    assert str(caught.value).startswith(told)


def test_batch_that_does_not_divide_is_refused():
    with pytest.raises(ConfigError, match=r"^batch\.size "):
        config.load(["parallel=ddp", "parallel.nproc=8", "batch.micro=16", *CPU])
    with pytest.raises(ConfigError, match=r"^parallel\.reduction "):
        config.load(["parallel.reduction=tree", "batch.size=12", "batch.micro=4"])


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["compile=model"], "compile "),
        (["precision=fp16"], "precision "),
        (["+probe.scale={}"], "probe "),
        (["parallel.nproc=4", "parallel.replicas=3"], "parallel.replicas "),
    ],
)
def test_fsdp_refuses_unsupported_options(words, told):
    with pytest.raises(ConfigError) as caught:
        config.load(["parallel=fsdp", *CPU, *words])
    assert str(caught.value).startswith(told)


@pytest.mark.parametrize(("words", "count"), [([], 1), (["parallel.nproc=4"], 4)])
def test_one_process_on_a_machine_without_a_gpu(words, count):
    assert processes(config.load(["parallel=ddp", *words, *CPU])) == count


def test_batchnorm_is_synchronized_on_gpus_only():
    norm = torch.nn.Sequential(torch.nn.BatchNorm1d(4))
    with pytest.raises(ConfigError, match=r"parallel\.sync_batchnorm: expected false on a CPU"):
        synchronized(norm, World(torch.device("cpu"), 0, 2))
    found = synchronized(norm, World(torch.device("cuda"), 0, 2))
    assert isinstance(found[0], torch.nn.SyncBatchNorm)
    assert found.state_dict().keys() == norm.state_dict().keys()


@pytest.mark.parametrize(
    ("error", "told"),
    [
        ("wait timeout after 20000ms, keys: /default_pg/0//3//cpu//0/0", "did not answer for"),
        ("[gloo/transport/tcp] Timed out waiting 20000ms for recv", "did not answer for"),
        ("[gloo/transport/tcp/pair.cc:561] Connection closed by peer", "processes are gone"),
    ],
)
def test_a_process_that_hangs_is_told_from_one_that_is_gone(error, told, monkeypatch):
    for name, value in (("WORLD_SIZE", "2"), ("RANK", "1")):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **__: None)
    run = config.load(["parallel=ddp", *CPU])
    with pytest.raises(SparsePretrainError, match=told), join(run):
        raise dist.DistStoreError(error)
