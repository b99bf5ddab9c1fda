"""What saves cost the loop: a slow disk is waited for at once, and not in the background."""

import time

import safetensors.torch

from sparsepretrain.bench import checkpoint


def test_the_stall_is_that_of_the_loop(tiny, monkeypatch):
    original = safetensors.torch.save_file

    def slow(*args, **kwargs):
        time.sleep(0.1)  # two files of tensors a save
        original(*args, **kwargs)

    monkeypatch.setattr(safetensors.torch, "save_file", slow)
    monkeypatch.setattr(checkpoint, "training", lambda overrides: tiny.build("steps=9999"))
    monkeypatch.setattr(checkpoint, "_enough", lambda t, saves: 3)
    stall, now, later, size = checkpoint.cases(True)
    background, synchronous = stall.detail["median_seconds"]
    assert synchronous > 0.2 > background and stall.value < 1
    assert now.value > 1 and later.name.startswith("3 steps, background")
    assert size.detail["bytes"] > 12 * size.detail["parameters"], "weights and two moments"
