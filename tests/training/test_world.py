"""What a process knows of the others before it has met them."""

import pytest

from sparsepretrain import config
from sparsepretrain.errors import ConfigError
from sparsepretrain.training.launch import processes
from sparsepretrain.training.world import join

CPU = ("parallel.device=cpu", "batch.size=16", "batch.micro=4")


def refusal(*words, started=None, monkeypatch=None):
    run = config.load([*words, *CPU])
    for key in ("WORLD_SIZE", "RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(key, raising=False)
    if started is not None:
        monkeypatch.setenv("WORLD_SIZE", str(started))
        monkeypatch.setenv("RANK", "0")
    with pytest.raises(ConfigError) as caught, join(run):
        pass
    return str(caught.value)


def test_processes_that_were_not_asked_for(monkeypatch):
    told = refusal("parallel=single", started=2, monkeypatch=monkeypatch)
    assert told == "parallel=single, but 2 processes were started: give parallel=ddp or fsdp"
    told = refusal("parallel=ddp", "parallel.nproc=4", started=2, monkeypatch=monkeypatch)
    assert told == "parallel.nproc=4, but 2 processes were started here"


def test_processes_that_nobody_started(monkeypatch):
    told = refusal("parallel=ddp", "parallel.nproc=2", monkeypatch=monkeypatch)
    assert told.startswith("parallel.nproc=2, but this is the only process")


def test_a_batch_that_cannot_be_shared(monkeypatch):
    told = refusal("parallel=ddp", started=3, monkeypatch=monkeypatch)
    assert told == "batch.size must be a multiple of batch.micro·3 processes, got 16"
    with pytest.raises(ConfigError, match=r"^batch\.size must be a multiple of batch\.micro·8 pro"):
        config.load(["parallel=ddp", "parallel.nproc=8", *CPU])
    with pytest.raises(ConfigError, match=r"^parallel\.reduction tree needs a power of two of mic"):
        config.load(["parallel.reduction=tree", "batch.size=12", "batch.micro=4"])


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["compile=true"], "compile must be none with parallel=fsdp"),
        (["precision=fp16"], "precision must be fp32, bf16 or fp64 with parallel=fsdp, got fp16"),
        (["+probe.scale={}"], "probe needs whole weights, got scale"),
        (["parallel.nproc=4", "parallel.replicas=3"], "parallel.replicas must divide the 4 proces"),
    ],
)
def test_what_does_not_go_with_shards(words, told):
    with pytest.raises(ConfigError) as caught:
        config.load(["parallel=fsdp", *CPU, *words])
    assert str(caught.value).startswith(told)


def test_one_process_on_a_machine_without_a_gpu():
    assert processes(config.load(["parallel=ddp", *CPU])) == 1
    assert processes(config.load(["parallel=ddp", "parallel.nproc=4", *CPU])) == 4
