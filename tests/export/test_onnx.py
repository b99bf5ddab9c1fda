"""ONNX files have exact N:M zeros along the right axis, and compute what torch does."""

import io
import json
import sys

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import nn

import sparsepretrain as sp
from sparsepretrain import cli
from sparsepretrain.console import Console
from sparsepretrain.data.encoding import train_wordpiece
from sparsepretrain.errors import CheckpointError, ConfigError, SparsePretrainError
from sparsepretrain.export import onnx_file, save_onnx
from sparsepretrain.training import derive
from support.export_cases import export, write_checkpoint, write_run


class Mixed(nn.Module):
    """Weights that the exporter keeps, transposes, and scales by a BatchNorm."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(8, 16, 3, bias=False)
        self.norm = nn.BatchNorm2d(16)
        nn.init.uniform_(self.norm.weight, -1, 1)  # a factor below 0 makes -0.0
        self.square = nn.Linear(16, 16)
        self.last = nn.Linear(16, 8)

    def forward(self, x):
        x = self.norm(self.conv(x)).relu().flatten(2).transpose(1, 2)  # (batch, positions, 16)
        return self.last(self.square(x).relu().mean(1))


def sparse(method="ternary", **options):
    model = Mixed()
    sp.sparsify(model, method, targets=["*"], **options)
    return model


X = torch.randn(2, 8, 6, 6, generator=torch.Generator().manual_seed(1))


def initializers(path):
    graph = onnx.load(str(path)).graph
    return {each.name: onnx.numpy_helper.to_array(each) for each in graph.initializer}


def nonzeros(array, axis, m=4):
    """Most non-zeros of a group, and whether there is a -0.0."""
    groups = np.moveaxis(array, axis, -1)
    groups = groups.reshape(*groups.shape[:-1], -1, m)
    return int((groups != 0).sum(-1).max()), bool((np.signbit(array) & (array == 0)).any())


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """(sparse model, file, initializers of its layers)."""
    path = tmp_path_factory.mktemp("onnx") / "model.onnx"
    model = sparse()
    return model, path, save_onnx(model, path, {"x": X}, {"x": {0: "batch"}})


def test_zeros_in_the_file_lie_along_the_axis_of_the_matmul(written):
    model, path, found = written
    tensors = initializers(path)
    assert list(found) == ["conv", "square", "last"]
    for layer, (name, axis) in found.items():
        assert nonzeros(tensors[name], axis) == (2, False)
        weight = sp.sparsifier_of(model).dense_state_dict()[f"{layer}.weight"].numpy()
        if layer == "conv":  # scaled
            assert (axis, name) == (1, "conv.weight")
            assert not np.array_equal(tensors[name], weight)
        else:  # of a matrix that is multiplied from the right
            assert np.array_equal(tensors[name], weight if axis == 1 else weight.T)
    assert found["square"].axis == 0
    assert nonzeros(tensors[found["square"].name], 1)[0] > 2, "the other axis has no pattern"


def test_the_runtime_computes_what_the_sparse_model_does_for_other_batches(written):
    model, path, _ = written
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    x = torch.randn(5, 8, 6, 6)
    (found,) = session.run(None, {"x": x.numpy()})
    torch.testing.assert_close(torch.from_numpy(found), model.eval()(x), rtol=1e-4, atol=1e-5)
    assert type(model.square).__name__ == "SparseLinear", "the model did not change"


@pytest.mark.parametrize("value", [1.0, -0.0])
def test_a_file_that_is_not_sparse_is_refused(written, tmp_path, value):
    _, path, found = written
    file = onnx.load(str(path))
    name, _ = found["last"]
    tensor = next(each for each in file.graph.initializer if each.name == name)
    array = onnx.numpy_helper.to_array(tensor).copy()
    array[array == 0] = value
    tensor.CopyFrom(onnx.numpy_helper.from_array(array, name))
    onnx.save(file, tmp_path / "model.onnx")
    onnx_file.prove(path, found, dict.fromkeys(found, (2, 4)))
    with pytest.raises(CheckpointError, match="the weight of last, is not 2:4"):
        onnx_file.prove(tmp_path / "model.onnx", found, dict.fromkeys(found, (2, 4)))


def test_a_file_that_computes_something_else_is_refused(written):
    path = written[1]
    dense = sp.densify(sparse()).eval()
    onnx_file.compare(path, dense, [{"x": X}])
    dense.last.bias.data[0] += 0.01
    with pytest.raises(CheckpointError, match="differ from torch's"):
        onnx_file.compare(path, dense, [{"x": X}])
    with pytest.raises(CheckpointError, match=r"ONNX Runtime cannot run model\.onnx"):
        onnx_file.compare(path, dense, [{"x": X[:, :4]}])


def test_large_weights_in_bf16_are_in_a_second_file_in_fp32(tmp_path, monkeypatch):
    monkeypatch.setattr(onnx_file, "LARGE", 100)
    model = nn.Sequential(nn.Linear(16, 8)).bfloat16()
    sp.sparsify(model, "ste", targets=["0"])
    save_onnx(model, tmp_path / "a.onnx", {"input": torch.randn(2, 16).bfloat16()})
    assert {file.name for file in tmp_path.iterdir()} == {"a.onnx", "a.onnx.data"}
    assert initializers(tmp_path / "a.onnx")["0.weight"].dtype == np.float32


@pytest.mark.slow  # 49 s and 9 GB of memory
@pytest.mark.timeout(900)
def test_weights_above_2_gib_are_written_and_proven(tmp_path):
    model = nn.Sequential(*(nn.Linear(2**13, 2**13) for _ in range(9)))
    sp.sparsify(model, "ste", targets=["0", "8"])
    found = save_onnx(model, tmp_path / "a.onnx", {"input": torch.randn(2, 2**13)})
    assert (tmp_path / "a.onnx.data").stat().st_size > 2**31 > (tmp_path / "a.onnx").stat().st_size
    assert {name: each.name for name, each in found.items()} == {"0": "0.weight", "8": "8.weight"}


def test_what_cannot_be_exported_is_one_line(tmp_path, capfd, caplog):
    class Eigenvalues(nn.Sequential):
        def forward(self, x):
            return torch.linalg.eigvals(self[0](x)).real

    class Branches(nn.Sequential):
        def forward(self, x):
            y = self[0](x)
            return y if y.sum() > 0 else -y

    for cls, reason in ((Eigenvalues, "aten.linalg_eig"), (Branches, "data-dependent")):
        model = cls(nn.Linear(16, 16))
        sp.sparsify(model, "ste", targets=["0"])
        with pytest.raises(ConfigError, match=f"cannot export {cls.__name__}: .*{reason}") as error:
            save_onnx(model, tmp_path / "a.onnx", {"x": torch.randn(16, 16)})
        assert "\n" not in str(error.value)
    model = nn.Sequential(nn.Linear(16, 16))
    sp.sparsify(model, "ste", targets=["0"])
    with pytest.raises(SparsePretrainError, match="cannot write"):
        save_onnx(model, tmp_path / "none" / "a.onnx", {"input": torch.randn(2, 16)})
    with pytest.raises(ConfigError, match="the model is not sparse"):
        save_onnx(nn.Linear(4, 4), tmp_path / "a.onnx", {"input": torch.randn(2, 4)})
    assert list(tmp_path.iterdir()) == [] and "".join(capfd.readouterr()) == ""


@pytest.mark.filterwarnings("ignore:.*dense weights")
def test_dense_weights_have_no_initializers_to_prove(tmp_path):
    assert save_onnx(sparse("sdgp"), tmp_path / "a.onnx", {"x": X}) == {}


def test_a_missing_package_is_named_before_anything_is_read(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    assert cli.main(["export", str(tmp_path / "nothing"), "--onnx"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "pip install 'sparsepretrain[onnx]'" in line


def test_the_verb_writes_the_file_beside_the_others(tmp_path, capsys):
    run = write_run(tmp_path, "vit")
    assert cli.main(["export", str(run), "--out", str(tmp_path / "out"), "--onnx"]) == 0
    assert "ONNX Runtime computes the same to" in " ".join(capsys.readouterr().out.split())
    assert {"model.onnx", "model.safetensors"} <= {p.name for p in (tmp_path / "out").iterdir()}
    assert "`model.onnx` has the same weights" in (tmp_path / "out/README.md").read_text()
    check(tmp_path / "out")


def check(directory):
    about = json.loads((directory / "sparsity.json").read_text())
    tensors = initializers(directory / "model.onnx")
    assert list(about["onnx"]["initializers"]) == about["layers"]
    n, m = map(int, about["pattern"].split(":"))
    for place in about["onnx"]["initializers"].values():
        most, has_negative_zeros = nonzeros(tensors[place["name"]], place["axis"], m)
        assert most == n and not has_negative_zeros
    session = onnxruntime.InferenceSession(str(directory / "model.onnx"))
    return {each.name: each.shape for each in session.get_inputs()}


SEGMENTS = {"token_type_ids": ["batch", "sequence"]}
MASKED = {"input_ids": ["batch", "sequence"], "attention_mask": ["batch", "sequence"]}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "words", "inputs"),
    [
        ("gpt2", (), MASKED),
        ("gpt2", ("sparsity=srste", "sparsity.n=1", "sparsity.m=8"), MASKED),
        ("llama", (), MASKED),
        ("llama", ("model.activation=relu2", "sparsity=ternary"), MASKED),
        ("bert", (), MASKED | SEGMENTS),
        ("moe", ("sparsity.targets=ffn",), MASKED),
        ("resnet", (), {"x": ["batch", 3, 16, 16]}),
        ("marian", (), MASKED | {"decoder_input_ids": ["batch", "decoder_sequence"]}),
    ],
)
def test_families(kind, words, inputs, tmp_path):
    run = write_run(tmp_path, kind, "sparsity.targets=all", *words)
    if kind == "marian":
        words = train_wordpiece(["one two three [SEP] four"] * 3, 64, lowercase=False)
        (run / "tokenizer.json").write_text(words)
    directory, _ = export(run, onnx=True)
    assert check(directory) == inputs


@pytest.mark.slow
def test_heads(tmp_path):
    files = ("data.train=[a.jsonl]", "data.validation=[b.jsonl]")
    pairs, short = ("task=glue/mrpc", *files), ("task.max_length=64", "task.stride=16")
    spans = ("task=squad", *short, "task.max_question=24", *files)
    where = ("steps=4", "epochs=null", "parallel.device=cpu", f"runs_dir='{tmp_path}'")
    for kind, words in (("gpt2", pairs), ("gpt2", spans), ("bert", pairs)):
        source = write_run(tmp_path, kind, "sparsity=ste")
        run = derive.finetuned(str(source), [*words, *where], [], Console(io.StringIO()))
        directory, _ = export(write_checkpoint(run), onnx=True)
        assert check(directory) == (MASKED if kind == "gpt2" else MASKED | SEGMENTS)
