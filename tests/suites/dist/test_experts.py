"""Models with experts in two processes give the answer of one: see docs/moe.md."""

import itertools
import json
import socket

import pytest
from transformers import AutoModelForCausalLM

from sparsepretrain.console import Console
from sparsepretrain.export.run import export_run
from sparsepretrain.kernels import nonzeros_per_group
from support import SUPPORT
from support.families import small_model
from support.ranks import VARIANTS, Case, start_ranks, train_with, variant
from support.same_answer import alone, assert_same
from support.tiny_runs import TRAINING

pytestmark = [pytest.mark.dist, pytest.mark.timeout(3000)]

CASES = [
    *itertools.product(("mixtral", "qwen3_moe"), ("srste", "sste", "tsrste"), ("ddp", "fsdp")),
    *itertools.product(("gpt_oss",), ("sste",), ("ddp", "fsdp")),
    *itertools.product(("bank",), ("srste", "sste", "tsrste"), ("ddp", "fsdp")),
]
RECIPE = ("model=moe_nano", "model.n_inner=32", "precision=fp64", "steps=6")


def test_experts_of_two_processes():
    """In somebody's own loop: models of transformers, and a bank with the FFNs of all blocks."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    started = start_ranks(2, SUPPORT / "experts.py", json.dumps(CASES), MASTER_PORT=str(port))
    outputs = [process.communicate(timeout=1500) for process in started]
    assert [process.returncode for process in started] == [0, 0], outputs
    for case, found in zip(CASES, json.loads(outputs[0][0]), strict=True):
        assert found["loss"] <= 1e-12 and found["state"] <= 1e-10, (case, found)
        assert found["masks"] and found["proof"], (case, found)


def test_every_method_trains_the_recipe(tiny):
    """With DistributedDataParallel and FSDP2, and one process goes on with what FSDP2 has left."""
    words = {name: (*RECIPE, *variant(name)) for name in VARIANTS if name != "ast branch"}
    words["slope"] += ("sparsity.adapters.rank=0",)  # banks have no adapters, and no branch
    kinds = {kind: (f"parallel={kind}",) for kind in ("ddp", "fsdp")}
    many = train_with(
        tiny,
        2,
        [
            Case(f"{name} {kind}", own, parallel=parallel)
            for name, own in words.items()
            for kind, parallel in kinds.items()
        ],
    )
    runs = {"directory": tiny.root / "resumed"}
    # it evaluates where it stops, and the whole run evaluates there
    stopped = {"parallel": kinds["fsdp"], "stop_after": 5, **runs}
    train_with(tiny, 2, [Case(name, own, **stopped) for name, own in words.items()])
    for name, own in words.items():
        one = alone(tiny, own)
        assert_same(one, many[f"{name} ddp"])
        assert_same(one, many[f"{name} fsdp"])
        last = tiny.train(*own, f"runs_dir='{runs['directory']}'")
        assert last.code == 0 and "continuing from" in last.output
        assert_same(one, last.directory)


def test_checkpoints_of_others(tiny, monkeypatch):
    """Fine-tuned with both ways, and exported to the class they came from."""
    data = ("data=text_files", f"data.files=['{tiny.corpus}/*.txt']", "data.validation=0.3")
    small = (*TRAINING, *data, "task=causal_lm", "task.sequence_length=16", "data.tokenizer=bytes")
    batch = ("batch.size=8", "batch.micro=2", "eval.batches=3", "eval.every=5")
    runs = f"runs_dir='{tiny.root / 'runs'}'"
    monkeypatch.setattr(tiny, "overrides", lambda *more: [*small, *batch, runs, *more])
    words = {}
    for family in ("mixtral", "qwen3_moe"):
        place = tiny.root / family
        small_model(family, "cpu").save_pretrained(place)
        source = ("model=pretrained", f"model.path='{place}'", f"init.path='{place}'")
        words[family] = (*source, "precision=fp64", "sparsity=sste")
    kinds = ("ddp", "fsdp")
    many = train_with(
        tiny,
        2,
        [
            Case(f"{name} {kind}", own, parallel=(f"parallel={kind}",))
            for name, own in words.items()
            for kind in kinds
        ],
    )
    for name, own in words.items():
        one = alone(tiny, own)
        for kind in kinds:
            assert_same(one, many[f"{name} {kind}"])
        exported = export_run(many[f"{name} fsdp"], console=Console.silent())
        stock = AutoModelForCausalLM.from_pretrained(exported)
        banks = [w for n, w in stock.named_parameters() if n.endswith("experts.down_proj")]
        assert len(banks) == 2 and all(nonzeros_per_group(bank, 4).max() == 2 for bank in banks)
