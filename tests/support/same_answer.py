"""Comparisons of runs with several processes and with one."""

import json

import torch

from support.tiny_runs import assert_equal_bits, final_state, metrics

FP64, FP32 = 1e-12, 2e-6


def alone(tiny, words):
    """The run directory of one process."""
    outcome = tiny.train(*words)
    assert outcome.code == 0, outcome.output
    return outcome.directory


def drift(left, right):
    """Greatest difference of a loss or validation loss; flips and masks have to be equal."""
    lines = list(zip(metrics(left), metrics(right), strict=True))
    assert [a["step"] for a, _ in lines] == [b["step"] for _, b in lines]
    return max(abs(a["loss"] - b["loss"]) for a, b in lines)


def assert_equal_masks(left, right):
    """Flip rates of all steps and layers, densities, masks of the last comparison."""
    for a, b in zip(metrics(left), metrics(right), strict=True):
        kept = [key for key in a if key.startswith(("flip", "density", "sparse"))]
        assert [a[key] for key in kept] == [b[key] for key in kept], a["step"]
    mine, theirs = (final_state(run)["model"] for run in (left, right))
    for name in mine:
        if "mask" in name:
            assert torch.equal(mine[name], theirs[name]), name


def check(kind, one, many, fp32=FP32):
    """The gate of a kind of case, ``fp32`` that of single precision.

    What a run begins with is the same in all of them.
    """
    begun = [json.loads((run / "environment.json").read_text())["hashes"] for run in (one, many)]
    assert begun[0] == begun[1] and begun[0]["initial_weights"]
    if kind.startswith("tree"):
        assert metrics(one) == metrics(many)
        assert_equal_bits(final_state(one), final_state(many))
        return
    assert drift(one, many) <= (FP64 if kind == "fp64" else fp32)
    if kind == "fp64":
        assert_equal_masks(one, many)


KINDS = {
    "fp64": ("precision=fp64", "steps=10"),
    "fp32": ("steps=50", "log.layers_every=50", "checkpoint.every=50"),
    "tree": ("steps=10", "parallel.reduction=tree"),
    "tree bf16": ("steps=10", "parallel.reduction=tree", "precision=bf16"),
}


def assert_same(one, many):
    """Losses, masks, flips, and what is in the checkpoints."""
    assert drift(one, many) <= FP64
    assert_equal_masks(one, many)
    left, right = final_state(one), final_state(many)
    assert list(left) == list(right)
    for part in ("model", "optimizer", *(["ema"] if "ema" in left else [])):
        assert list(left[part]) == list(right[part])
        for name, value in left[part].items():
            assert value.shape == right[part][name].shape and value.dtype == right[part][name].dtype
            assert (value.double() - right[part][name].double()).abs().max() <= 1e-9, name
