"""Notes and warnings about the numerics of a run."""

import warnings

import pytest
import torch
from torch._inductor import compile_fx

from sparsepretrain import config
from sparsepretrain.training import trainer
from sparsepretrain.training.precision import set_numerics, tf32_note

CPU, CUDA = torch.device("cpu"), torch.device("cuda")

ADVICE = (
    "TensorFloat32 tensor cores for float32 matrix multiplication available but not enabled. "
    "Consider setting `torch.set_float32_matmul_precision('high')` for better performance."
)
"""Warning of inductor in torch 2.11; torch 2.14 logs the text."""


@pytest.fixture
def ampere(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))


@pytest.mark.parametrize(
    ("words", "device", "named"),
    [
        ("", CUDA, True),
        ("precision.tf32=true", CUDA, False),
        ("precision=bf16", CUDA, False),
        ("precision=fp64", CUDA, False),
        ("precision=fp8_sim", CUDA, True),
        ("precision=fp8_sim precision.dtype=bf16", CUDA, False),
        ("", CPU, False),
    ],
)
def test_fp32_on_tensor_cores_names_the_option(words, device, named, ampere):
    note = tf32_note(config.load(words.split()).precision, device)
    assert note is None if not named else "precision.tf32=true" in note


def test_gpus_without_tf32_get_no_note(ampere, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (7, 5))
    assert tf32_note(config.load([]).precision, CUDA) is None


def test_a_run_prints_the_note_once(tiny, monkeypatch):
    monkeypatch.setattr(trainer, "tf32_note", lambda precision, device: tf32_note(precision, CUDA))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    assert tiny.train("steps=1").output.count("precision.tf32=true") == 1


def test_the_advice_of_inductor_is_silenced_and_nothing_else(ampere):
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        set_numerics(config.load([]).precision, deterministic=False)
        compile_fx._warn_tf32_disabled.__wrapped__()
        warnings.warn(ADVICE, stacklevel=1)
        warnings.warn("TensorFloat32 is something else", stacklevel=1)
    assert [str(each.message) for each in seen] == ["TensorFloat32 is something else"]
