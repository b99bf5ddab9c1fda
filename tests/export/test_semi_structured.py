"""The loader into torch's semi-structured tensors: what it refuses, and that nothing gets lost."""

import json
from pathlib import Path

import pytest
import torch
from torch.sparse import _semi_structured_conversions as conversions
from transformers import AutoModelForCausalLM

from sparsepretrain.errors import CheckpointError, ConfigError
from sparsepretrain.export import load_semi_structured, semi_structured
from support.export_cases import export, write_run


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = write_run(tmp_path_factory.mktemp("runs"), "gpt2")
    return export(run)[0]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ("sparsity=tsrste", "sparsity.dense_tail=0.5"),
            "are 2:4, those in .* are dense weights since step 2",
        ),
        (("sparsity=ste", "sparsity.n=1"), "are 2:4, those in .* are 1:4 in all"),
        (
            ("sparsity=ste", "sparsity.patterns={*.c_fc: 1:4, *.c_proj: 2:8}"),
            "are 2:4, those in .* are 1:4 in 2 layers and 2:8 in 2 layers",
        ),
    ],
)
def test_unsupported_weights_are_refused(overrides, message, tmp_path):
    directory, _ = export(write_run(tmp_path, "gpt2", *overrides))
    with pytest.raises(ConfigError, match=message):
        load_semi_structured(directory)


def test_layers_with_other_patterns_stay_as_they_are(tmp_path, monkeypatch):
    run = write_run(tmp_path, "gpt2", "sparsity=ste", "sparsity.patterns={*.c_fc: 1:4}")
    directory, _ = export(run)
    packed = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.nn.Module, "to", lambda model, device: model)
    monkeypatch.setattr(semi_structured, "compress", lambda model, layers: packed.extend(layers))
    load_semi_structured(directory)
    assert packed == [f"transformer.h.{i}.mlp.c_proj" for i in range(2)]


def test_models_of_timm_are_refused(tmp_path):
    with pytest.raises(CheckpointError, match="not an export of a transformers model"):
        load_semi_structured(export(write_run(tmp_path, "vit"))[0])


def test_layers_of_other_sizes_are_refused(tmp_path):
    directory, _ = export(write_run(tmp_path, "gpt2", "model.n_embd=40"))
    model = AutoModelForCausalLM.from_pretrained(directory)
    layers = json.loads((directory / "sparsity.json").read_text())["layers"]
    assert semi_structured.mismatch(model, layers).endswith(
        "mlp.c_fc is 160 × 40, not multiples of 64 × 64"
    )


def test_loader_errors_name_the_reason(exported, tmp_path):
    with pytest.raises(ConfigError, match="need a CUDA device, got device='cpu'"):
        load_semi_structured(exported, device="cpu")
    with pytest.raises(ConfigError, match=r"for fp16 and bf16, not for torch\.float32"):
        load_semi_structured(exported, dtype=torch.float32)
    with pytest.raises(CheckpointError, match="not an export of a transformers model"):
        load_semi_structured(tmp_path)
    for file in ("config.json", "sparsity.json"):
        (tmp_path / file).write_bytes((exported / file).read_bytes())
    about = json.loads((tmp_path / "sparsity.json").read_text())
    changed = about | {"pattern": "1:4", "weights": "1:4 in all groups"}
    (tmp_path / "sparsity.json").write_text(json.dumps(changed))
    with pytest.raises(ConfigError, match=r"are 2:4, those in .* are 1:4"):
        load_semi_structured(tmp_path)


def test_compression_is_lossless(exported, monkeypatch):
    """With torch's own conversion on the CPU, in place of the tensors that a GPU multiplies."""
    seen = []

    def there_and_back(weight: torch.Tensor) -> torch.Tensor:
        values, indices = conversions.sparse_semi_structured_from_dense_cutlass(weight)
        assert values.shape == (weight.shape[0], weight.shape[1] // 2)
        seen.append(tuple(weight.shape))
        return conversions.sparse_semi_structured_to_dense_cutlass(values, indices)

    monkeypatch.setattr(torch.sparse, "to_sparse_semi_structured", there_and_back)
    tokens = torch.arange(1, 17)[None]
    model = AutoModelForCausalLM.from_pretrained(exported, dtype=torch.bfloat16).eval()
    layers = json.loads((exported / "sparsity.json").read_text())["layers"]
    with torch.no_grad():
        before = model(tokens).logits
        semi_structured.compress(model, layers)
        after = model(tokens).logits
    assert seen == [(256, 64), (64, 256)] * 2
    assert all(type(model.get_submodule(name)) is torch.nn.Linear for name in layers)
    torch.testing.assert_close(after, before, rtol=0, atol=1e-2)


class Packed(torch.Tensor):
    """A weight whose matmuls are those of a library: right ones, altered by ``after``."""

    @staticmethod
    def of(weight, after):
        packed = weight.as_subclass(Packed)
        packed.after, packed.matmuls = after, 0
        return packed

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is not torch.nn.functional.linear:
            return super().__torch_function__(func, types, args, kwargs or {})
        packed = args[1]
        packed.matmuls += 1
        with torch._C.DisableTorchFunctionSubclass():
            return packed.after(packed.matmuls, func(*args))


def right(call, y):
    return y


def shifted(call, y):
    y[-1, -1] += 1
    return y


def flickering(call, y):
    y[0, 0] = torch.nextafter(y[0, 0], y[0, 0] + call % 7 // 6)
    return y


def refused(call, y):
    raise RuntimeError("CUDA error: operation not supported when calling `cusparseLtMatmul`")


@pytest.mark.parametrize(
    ("after", "why"),
    [
        (shifted, "the matmul is wrong"),
        (flickering, "the matmul gives other bits when it is repeated"),
        (refused, "CUDA error: operation not supported"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_library_with_a_wrong_matmul_is_refused(exported, after, why, dtype, monkeypatch):
    def second_size(weight):
        return Packed.of(weight, right if tuple(weight.shape) == (256, 64) else after)

    monkeypatch.setattr(torch.sparse, "to_sparse_semi_structured", second_size)
    monkeypatch.setattr(semi_structured, "version", lambda: "0.8.1")
    model = AutoModelForCausalLM.from_pretrained(exported, dtype=dtype).eval()
    layers = json.loads((exported / "sparsity.json").read_text())["layers"]
    with pytest.raises(ConfigError) as caught:
        semi_structured.compress(model, layers)
    (message,) = caught.value.messages
    assert layers[1] in message and f"64 × 256 in {str(dtype)[6:]}" in message and why in message
    assert "cuSPARSELt 0.8.1: load the export with transformers" in message


def test_each_size_is_compared_once(exported, monkeypatch):
    packed = []

    def convert(weight):
        packed.append(Packed.of(weight, right))
        return packed[-1]

    monkeypatch.setattr(torch.sparse, "to_sparse_semi_structured", convert)
    model = AutoModelForCausalLM.from_pretrained(exported, dtype=torch.bfloat16).eval()
    layers = json.loads((exported / "sparsity.json").read_text())["layers"]
    semi_structured.compress(model, layers)
    assert [weight.matmuls for weight in packed] == [20, 20, 0, 0]


def test_an_error_that_breaks_the_device_is_raised(monkeypatch):
    def fail(*_):
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", fail)
    weight = torch.zeros(64, 64, dtype=torch.bfloat16)
    with pytest.raises(torch.AcceleratorError):
        semi_structured.wrong(Packed.of(weight, fail), weight, None)
