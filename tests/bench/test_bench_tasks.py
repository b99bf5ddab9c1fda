"""Waiting for data and decoding: every nano experiment is measured, and what is timed is equal."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from sparsepretrain.bench import tasks
from sparsepretrain.config import compose, validate
from sparsepretrain.config.places import shipped
from sparsepretrain.sparsity import sparsify


def test_every_nano_experiment_is_measured():
    files = {f.stem for f in Path(shipped(), "experiment").glob("nano*.yaml")}
    assert set(tasks.experiments()) == {None, *files}
    for name in tasks.experiments():
        validate(compose([] if name is None else [f"experiment={name}"], []))


@pytest.fixture
def build(tiny):
    return lambda overrides: tiny.build(*overrides)


def test_a_case_per_experiment(tiny, monkeypatch):
    monkeypatch.setattr(tasks, "experiments", lambda: [None])
    done, built = [], []

    def build(overrides):
        built.append(overrides)
        return tiny.build(*overrides, *(["workers=3"] if len(built) == 1 else []))

    cases = tasks.cases(build, 5, done.append)
    assert built == [[], ["workers=2"]], "never with more than two workers"
    assert [case.name for case in cases] == ["waiting for data, gpt2_nano, 2 worker(s)"]
    assert cases[0].at_most == 3.0 and 0 <= cases[0].value < 100 and done == [0, 1]


@pytest.mark.parametrize("slow", [False, True])
def test_waiting_is_the_share_of_time_without_a_batch(build, monkeypatch, slow):
    t = build([])
    original = t.task.batch

    def batch(*args):
        time.sleep(0.05)
        return original(*args)

    if slow:
        monkeypatch.setattr(t.task, "batch", batch)
    case = tasks.waiting("x", t, 10)
    assert len(case.detail["percent"]) == 2
    if slow:  # a step takes some milliseconds
        assert case.value > 30 and not case.ok


def test_decoding_compares_equal_searches():
    from transformers import GenerationConfig, MarianConfig, MarianMTModel

    torch.manual_seed(0)
    sizes = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "vocab_size": 32}
    heads = {f"{s}_{k}": v for s in ("encoder", "decoder") for k, v in
             (("attention_heads", 2), ("ffn_dim", 32))}  # fmt: skip
    special = {"pad_token_id": 0, "eos_token_id": 0, "decoder_start_token_id": 0}
    model = MarianMTModel(MarianConfig(**sizes, **heads, **special, max_position_embeddings=16))
    sparsify(model.eval(), "sste", targets=["*.fc1", "*.fc2"])
    found = []

    def translate(model, source, mask):
        settings = GenerationConfig(num_beams=2, max_length=8, **special)
        found.append(model.generate(source, attention_mask=mask, generation_config=settings))
        return found[-1]

    rows = {"source": torch.ones(3, 4, dtype=torch.int64), "mask": torch.ones(3, 4)}
    task = SimpleNamespace(translate=translate, batch=lambda *_: rows, samples=lambda split: 3)
    run = SimpleNamespace(batch=SimpleNamespace(micro=4))
    t = SimpleNamespace(model=model, task=task, run=run, device=torch.device("cpu"))
    plain, arguments = tasks._plain_search(t, rows["source"], rows["mask"])
    assert arguments["generation_config"].num_beams == 2
    assert torch.equal(plain.generate(**arguments), found[0])
    assert (plain.model.encoder.layers[0].fc1.weight == 0).float().mean() == 0.5
    assert "generate" not in vars(model), "the model is as it was"
    case = tasks.decoding("x", t, 3)
    assert case.at_least == 0.95 and case.value > 0 and case.detail["rounds"] == 3
