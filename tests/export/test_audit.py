"""Audits of checkpoints with planted defects, and of clean ones."""

import json
import shutil
import subprocess
import sys

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import sparsepretrain as sp
from sparsepretrain import cli
from sparsepretrain.errors import CheckpointError, ConfigError
from sparsepretrain.export import audit_page
from sparsepretrain.export.audit import audit
from sparsepretrain.export.perplexity import perplexities
from sparsepretrain.kernels import nm_mask
from support.families import small_config

FILE = "model.safetensors"
DOWN = "model.layers.0.mlp.down_proj"


def clean(directory, family="llama", *, layers="*.mlp.*", **options):
    """A checkpoint whose FFN is 2:4, with sparsity.json."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(small_config(family))
    sp.sparsify(model, "ste", targets=[layers])
    sp.save_pretrained(model, directory, **options)
    return directory


def pruned(*shape, n=2, m=4, dim=-1):
    weight = torch.randn(shape)
    return weight.masked_fill(~nm_mask(weight, n, m, dim=dim), 0.0)


def edit(directory, change):
    """Rewrite the tensors; ``change`` edits the dict."""
    tensors = load_file(directory / FILE)
    change(tensors)
    save_file({k: v.contiguous() for k, v in tensors.items()}, directory / FILE, {"format": "pt"})


def declare(directory, **entry):
    file = directory / "config.json"
    config = json.loads(file.read_text())
    config["quantization_config"] = {"quant_method": "compressed-tensors", "sparsity_config": entry}
    file.write_text(json.dumps(config))


def says(directory, **values):
    file = directory / "sparsity.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def one_dense_group(directory):
    edit(directory, lambda t: t[f"{DOWN}.weight"][3, 4:8].fill_(1.0))


def one_empty_group(directory):
    edit(directory, lambda t: t[f"{DOWN}.weight"][3, 4:8].zero_())


def other_axis(directory):
    def change(tensors):
        tensors[f"{DOWN}.weight"] = pruned(*tensors[f"{DOWN}.weight"].shape, dim=0)

    edit(directory, change)


def negative_zeros(directory):
    def change(tensors):
        weight = tensors[f"{DOWN}.weight"]
        tensors[f"{DOWN}.weight"] = torch.where(weight == 0, -0.0, weight)

    edit(directory, change)


def decayed_only(directory):
    def change(tensors):
        weight = tensors[f"{DOWN}.weight"]
        tensors[f"{DOWN}.weight"] = torch.where(weight == 0, 1e-12, weight)

    edit(directory, change)


def infinite(directory):
    edit(directory, lambda t: t[f"{DOWN}.weight"][0].fill_(float("inf")))


def adapter_inside(directory):
    def change(tensors):
        tensors[f"{DOWN}.lora_A.weight"] = torch.randn(4, tensors[f"{DOWN}.weight"].shape[1])

    edit(directory, change)


def branch_of_another_name(directory):
    edit(directory, lambda t: t.update({f"{DOWN}.SLoRB_Weight": torch.randn(8, 16)}))


def branch_beside(directory):
    shape = load_file(directory / FILE)[f"{DOWN}.weight"].shape
    edit(directory, lambda t: t.update({f"{DOWN}_dense.weight": torch.randn(shape)}))


def adapter_files(directory):
    (directory / "adapter_config.json").write_text("{}")


def dense_layer(directory):
    edit(directory, lambda t: t[f"{DOWN}.weight"].normal_())


def wrong_pattern(directory):
    def change(tensors):
        for name, weight in tensors.items():
            if ".mlp." in name:
                tensors[name] = pruned(*weight.shape, n=4, m=8)

    edit(directory, change)


def declared_elsewhere(directory):
    declare(
        directory, format="dense", sparsity_structure="2:4", targets=["Linear"], ignore=["lm_head"]
    )


def wrong_share(directory):
    words = {"targets": ["re:.*mlp.*"], "global_sparsity": 0.75}
    declare(directory, format="dense", sparsity_structure="unstructured", **words)


def bitmask(directory):
    def change(tensors):
        weight = tensors.pop(f"{DOWN}.weight")
        tensors[f"{DOWN}.compressed"] = weight[weight != 0]
        tensors[f"{DOWN}.bitmask"] = (weight != 0).to(torch.uint8)

    edit(directory, change)


def mask_beside(directory):
    def change(tensors):
        shape = tensors[f"{DOWN}.weight"].shape
        tensors[f"{DOWN}.weight"] = torch.randn(shape)
        tensors[f"{DOWN}.weight_mask"] = nm_mask(tensors[f"{DOWN}.weight"]).float()

    edit(directory, change)


def codes(directory):
    def change(tensors):
        tensors[f"{DOWN}.weight"] = (tensors[f"{DOWN}.weight"] * 9).to(torch.int8)

    edit(directory, change)


def claimed_layer_is_missing(directory):
    file = directory / "sparsity.json"
    layers = json.loads(file.read_text())["layers"]
    says(directory, layers=[*layers, "model.layers.7.mlp.down_proj"])


def declared_dense(directory):
    says(directory, pattern=None)


def odd_width(directory):
    edit(directory, lambda t: t.update({f"{DOWN}.weight": t[f"{DOWN}.weight"][:, :-2]}))


def layer_left_out(directory):
    edit(directory, lambda t: t.pop(f"{DOWN}.weight"))
    layers = json.loads((directory / "sparsity.json").read_text())["layers"]
    says(directory, layers=[name for name in layers if name != DOWN])


def layer_without_values(directory):
    """As ZeRO-3 and FSDP1 leave layers whose parts were not gathered."""
    edit(directory, lambda t: t.update({f"{DOWN}.weight": torch.empty(0)}))


def flat_layer(directory):
    edit(directory, lambda t: t.update({f"{DOWN}.weight": t[f"{DOWN}.weight"].flatten()}))


PLANTED = {
    layer_left_out: ("missing_layer", DOWN, True),
    layer_without_values: ("shape", DOWN, True),
    flat_layer: ("shape", DOWN, True),
    one_dense_group: ("too_dense", DOWN, True),
    one_empty_group: ("too_sparse", DOWN, False),
    other_axis: ("wrong_axis", DOWN, True),
    negative_zeros: ("negative_zeros", DOWN, True),
    decayed_only: ("almost_zero", DOWN, True),
    infinite: ("not_finite", DOWN, True),
    adapter_inside: ("side_branch", f"{DOWN}.lora_A.weight", True),
    branch_of_another_name: ("side_branch", f"{DOWN}.SLoRB_Weight", True),
    branch_beside: ("side_branch", f"{DOWN}_dense.weight", True),
    adapter_files: ("adapter", "adapter_config.json", True),
    dense_layer: ("too_dense", DOWN, True),
    wrong_pattern: ("too_dense", DOWN, True),
    declared_elsewhere: ("claim", "config.json: quantization_config.sparsity_config", False),
    wrong_share: ("claim", "config.json: quantization_config.sparsity_config", False),
    bitmask: ("compressed", f"{DOWN}.bitmask", True),
    mask_beside: ("unapplied_mask", DOWN, True),
    codes: ("quantized", f"{DOWN}.weight", True),
    claimed_layer_is_missing: ("missing_layer", "model.layers.7.mlp.down_proj", True),
    declared_dense: ("claim", "sparsity.json", False),
    odd_width: ("indivisible", DOWN, True),
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return clean(tmp_path_factory.mktemp("clean"))


@pytest.mark.parametrize("defect", PLANTED, ids=lambda f: f.__name__)
def test_planted_defects_are_found(checkpoint, tmp_path, defect):
    directory = shutil.copytree(checkpoint, tmp_path / "x")
    defect(directory)
    kind, where, fails = PLANTED[defect]
    result = audit(
        directory, require=(2, 4), layers=["*.mlp.*"] if defect is declared_dense else ()
    )
    assert (kind, where) in {(f.kind, f.where) for f in result.findings}
    assert result.fails is fails


@pytest.mark.parametrize("family", ["llama", "gpt2", "bert", "phi3", "qwen3_moe", "t5"])
def test_nothing_is_found_on_a_clean_checkpoint(tmp_path, family):
    layers = {"bert": "*.intermediate.dense", "qwen3_moe": "*_attn.*", "t5": "*.wo"}
    torch.manual_seed(0)
    cls = (
        transformers.AutoModelForMaskedLM if family == "bert" else transformers.AutoModelForCausalLM
    )
    cls = transformers.AutoModelForSeq2SeqLM if family == "t5" else cls
    model = cls.from_config(small_config(family))
    handle = sp.sparsify(model, "sste", targets=[layers.get(family, "*.mlp.*")])
    sp.save_pretrained(model, tmp_path)
    result = audit(tmp_path, require=(2, 4))
    assert result.findings == []
    assert not result.fails
    assert sum(layer.required is not None for layer in result.layers) == len(handle.layers)
    assert result.entries + result.embeddings <= sum(p.numel() for p in model.parameters())


def test_a_wrong_axis_of_conv1d_is_named(tmp_path):
    clean(tmp_path, "gpt2")

    def change(tensors):
        name = "transformer.h.0.mlp.c_fc.weight"
        tensors[name] = pruned(*tensors[name].shape)

    edit(tmp_path, change)
    (found, claim) = audit(tmp_path).findings
    assert found.kind == "wrong_axis" and "Conv1D" in found.text
    assert claim.kind == "claim"


def test_requirements_choose_their_layers(checkpoint):
    assert audit(checkpoint, require=(2, 4), layers=["*_attn.*"]).fails
    assert not audit(checkpoint, require=(2, 4), layers=["*.mlp.*"]).fails
    assert not audit(checkpoint, require=(4, 8)).fails, "2:4 is 4:8 too"
    assert audit(checkpoint, require=(1, 4)).fails
    with pytest.raises(ConfigError, match="no layer matches"):
        audit(checkpoint, require=(2, 4), layers=["*.ffn.*"])
    with pytest.raises(ConfigError, match="--require"):
        audit(checkpoint, layers=["*"])


def test_shards_are_read_by_their_index(tmp_path):
    clean(tmp_path, max_shard_size="20KB")
    assert len([*tmp_path.glob("*.safetensors")]) > 2
    whole = clean(tmp_path / "whole")
    found, expected = (audit_page.as_json(audit(d, require=(2, 4))) for d in (tmp_path, whole))
    assert not found["fails"]
    by_name = [sorted(each["layers"], key=lambda row: row["name"]) for each in (found, expected)]
    assert by_name[0] == by_name[1]


def test_damaged_indices_are_found(tmp_path):
    clean(tmp_path, max_shard_size="20KB")
    file = tmp_path / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    shards = sorted(set(index["weight_map"].values()))
    twice = load_file(tmp_path / shards[0])
    name = next(iter(twice))
    save_file(load_file(tmp_path / shards[1]) | {name: twice[name]}, tmp_path / shards[1])
    index["weight_map"]["model.layers.9.mlp.up_proj.weight"] = shards[0]
    left_out = next(k for k, v in index["weight_map"].items() if v == shards[2])
    del index["weight_map"][left_out]
    if shards[2] not in index["weight_map"].values():
        index["weight_map"]["model.norm.weight"] = shards[2]
    file.write_text(json.dumps(index))
    found = {f.where for f in audit(tmp_path).findings if f.kind == "files"}
    assert {name, "model.layers.9.mlp.up_proj.weight", left_out} <= found


def missing_shard(directory):
    next(directory.glob("*-of-*.safetensors")).unlink()


def cut_shard(directory):
    file = next(directory.glob("*-of-*.safetensors"))
    file.write_bytes(file.read_bytes()[:-100])


def pickled_only(directory):
    for file in directory.glob("*.safetensors*"):
        file.unlink()
    torch.save({}, directory / "pytorch_model.bin")


def no_index(directory):
    (directory / "model.safetensors.index.json").unlink()


def empty_index(directory):
    (directory / "model.safetensors.index.json").write_text("[]")


def odd_claims(directory):
    (directory / "sparsity.json").write_text('{"pattern": "2 of 4", "layers": []}')


@pytest.mark.parametrize(
    "damage", [missing_shard, cut_shard, pickled_only, no_index, empty_index, odd_claims]
)
def test_unreadable_files_are_one_line(tmp_path, capsys, damage, monkeypatch):
    clean(tmp_path / "x", max_shard_size="20KB")
    damage(tmp_path / "x")
    capsys.readouterr()
    monkeypatch.chdir(tmp_path)
    assert cli.main(["audit", "x"]) == 4
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "x" in err
    assert not (tmp_path / "audits").exists()


def test_single_files_are_judged_by_both_axes(tmp_path, checkpoint):
    result = audit(checkpoint / FILE, require=(2, 4), layers=["*.mlp.*"])
    assert not result.fails and not result.claims
    save_file({"a.weight": pruned(64, 64, dim=0)}, tmp_path / "x.safetensors")
    (finding,) = audit(tmp_path / "x.safetensors").findings
    assert finding.kind == "wrong_axis"


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn]
)
def test_all_plain_types_are_counted(tmp_path, dtype):
    save_file({"0.weight": pruned(32, 64).to(dtype)}, tmp_path / "x.safetensors")
    (layer,) = audit(tmp_path / "x.safetensors", require=(2, 4)).layers
    assert layer.counts.holds(1, 2, 4)


def test_the_smallest_values_of_fp64_are_no_zeros(tmp_path):
    weight = torch.full((4, 8), 1e-300, dtype=torch.float64)
    save_file({"0.weight": weight}, tmp_path / "x.safetensors")
    (layer,) = audit(tmp_path / "x.safetensors").layers
    assert layer.counts.zeros == 0


def test_a_model_that_transformers_does_not_have_is_noted(checkpoint, tmp_path):
    directory = shutil.copytree(checkpoint, tmp_path / "x")
    (directory / "config.json").write_text('{"model_type": "nobody"}')
    (note,) = audit(directory, require=(2, 4)).findings
    assert note.kind == "unknown_model" and note.is_note


def test_scattered_zeros_are_no_pattern(tmp_path):
    weight = torch.randn(64, 64)
    weight[torch.rand(64, 64) < 0.5] = 0
    save_file({"0.weight": weight, "1.weight": torch.randn(64, 64)}, tmp_path / "x.safetensors")
    result = audit(tmp_path / "x.safetensors")
    assert result.findings == [] and [layer.pattern for layer in result.layers] == [None, None]


def test_the_command_writes_its_pages(checkpoint, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["audit", str(checkpoint), "--require", "2:4", "--out", "page"]) == 0
    assert cli.main(["audit", str(checkpoint), "--require", "1:4", "--out", "page"]) == 1
    page = (tmp_path / "page/audit.md").read_text()
    assert "FAILED" in page and "too_dense" in page
    assert json.loads((tmp_path / "page/audit.json").read_text())["fails"]
    for words in (["--require", "4:2"], ["--layers", "*"], ["--require", "2:4", "--layers", "zzz"]):
        assert cli.main(["audit", str(checkpoint), *words]) == 2
        assert capsys.readouterr().err.count("\n") == 1


@torch.no_grad()
def test_perplexity_is_that_of_windows_that_do_not_overlap(checkpoint):
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint)
    tokens = torch.randint(model.config.vocab_size, (50,)).tolist()
    losses = []
    for at in (0, 16, 32):
        ids = torch.tensor([tokens[at : at + 16]])
        losses.append(float(model(input_ids=ids, labels=ids).loss))
    (found, long) = perplexities(checkpoint, tokens, windows=[16, 64])
    assert found["predicted"] == 45 and found["windows"] == 3
    assert found["loss"] == pytest.approx(sum(losses) / 3, rel=1e-5)
    assert "reason" in long


def test_pickles_are_never_read(tmp_path):
    torch.save({}, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="pickled"):
        audit(tmp_path)


@pytest.mark.slow
def test_memory_stays_small_on_a_large_checkpoint(tmp_path):
    """2 GB in four shards need no more than one of 0.5 GB, and some room, above a tiny one."""
    code = """if True:
        import sys
        from sparsepretrain import cli
        code = cli.main(sys.argv[1:])
        status = open("/proc/self/status").read()  # getrusage counts the parent, which was forked
        print("peak", code, status.partition("VmHWM:")[2].split()[0])
    """

    def peak(width):
        """Peak memory of an audit, in kB; libraries are half a gigabyte of it."""
        index = {}
        directory = tmp_path / str(width)
        directory.mkdir()
        for shard in range(4):
            tensors = {
                f"layers.{shard}.{k}.weight": torch.randn(width, width).bfloat16()
                for k in range(16)
            }
            save_file(tensors, directory / f"model-{shard}.safetensors")
            index |= dict.fromkeys(tensors, f"model-{shard}.safetensors")
        (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
        words = ["audit", str(directory), "--out", str(directory / "page")]
        ran = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True)
        returned, kilobytes = ran.stdout.rpartition("peak ")[2].split()
        assert returned == "0", ran.stderr
        return int(kilobytes)

    assert peak(4096) - peak(64) < 750_000


@pytest.mark.parametrize(
    "wrapper",
    ["module.", "_orig_mod.", "module._orig_mod.", "_fsdp_wrapped_module."],
)
def test_weights_under_names_that_no_loader_finds_fail(tmp_path, wrapper):
    """They are judged by the axes of the layers that they are of, all the same."""
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(small_config("gpt2"))
    sp.sparsify(model, "ste", targets=["*.mlp.*"])
    sp.save_pretrained(model, tmp_path)
    assert not audit(tmp_path, require=(2, 4)).fails
    (tmp_path / "sparsity.json").unlink()
    for inner in (False, True):
        inside = transformers.GPT2LMHeadModel.from_pretrained(tmp_path)
        state = (inside.transformer if inner else inside).state_dict()
        state = {wrapper + k: v.contiguous() for k, v in state.items() if "lm_head" not in k}
        directory = tmp_path / f"renamed{inner}"
        shutil.copytree(tmp_path, directory, ignore=shutil.ignore_patterns("renamed*"))
        save_file(state, directory / FILE, {"format": "pt"})
        found = audit(directory, require=(2, 4), layers=["*mlp*"])
        assert found.fails and {f.kind for f in found.findings} == {"missing_layer"}


def test_a_weight_whose_bias_is_there_is_missed(tmp_path):
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(small_config("gpt2"))
    sp.sparsify(model, "ste", targets=["*.mlp.*", "*.attn.*"])
    sp.save_pretrained(model, tmp_path)
    (tmp_path / "sparsity.json").unlink()
    name = "transformer.h.0.mlp.c_fc"
    edit(tmp_path, lambda t: t.pop(f"{name}.weight"))
    found = audit(tmp_path, require=(2, 4))
    assert found.fails and ("missing_layer", name) in {(f.kind, f.where) for f in found.findings}
    assert audit(tmp_path, require=(2, 4), layers=["*.c_fc"]).fails
    assert not audit(tmp_path, require=(2, 4), layers=["*.attn.*"]).fails  # not asked for


CLEAN = {
    "gpt2": "GPT2LMHeadModel",
    "llama": "LlamaForCausalLM",
    "bert": "BertForMaskedLM",
    "t5": "T5ForConditionalGeneration",
    "bart": "BartForConditionalGeneration",
    "opt": "OPTForCausalLM",
}


@pytest.mark.parametrize("family", CLEAN)
def test_clean_names_are_not_loaded(tmp_path, monkeypatch, family):
    """Tied heads are in the files under one name, or under none."""
    model = getattr(transformers, CLEAN[family])(small_config(family))
    model.save_pretrained(tmp_path)
    monkeypatch.setattr("sparsepretrain.export.audit.not_loaded", lambda directory: 1 / 0)
    assert audit(tmp_path, require=(2, 4)).layers


def test_without_accelerate_nothing_is_loaded(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    transformers.GPT2LMHeadModel(small_config("gpt2")).save_pretrained(tmp_path)
    edit(tmp_path, lambda t: t.pop("transformer.h.0.mlp.c_fc.weight"))
    kinds = {(f.kind, f.is_note) for f in audit(tmp_path).findings}
    assert kinds == {("not_checked", True)}


def test_files_that_transformers_does_not_find_are_noted(tmp_path):
    transformers.GPT2LMHeadModel(small_config("gpt2")).save_pretrained(tmp_path)
    edit(tmp_path, lambda t: t.pop("transformer.h.0.mlp.c_fc.weight"))
    (tmp_path / FILE).rename(tmp_path / "weights.safetensors")
    (finding,) = audit(tmp_path).findings
    assert finding.kind == "not_checked" and "transformers cannot load" in finding.text


def test_a_head_that_is_left_out_is_a_note(tmp_path):
    torch.manual_seed(0)
    model = transformers.GPT2Model(small_config("gpt2"))
    sp.sparsify(model, "ste", targets=["*.mlp.*"])
    sp.save_pretrained(model, tmp_path)
    (tmp_path / "sparsity.json").unlink()  # it has the names of the model without a head
    facts = json.loads((tmp_path / "config.json").read_text())
    facts["architectures"] = ["GPT2ForSequenceClassification"]
    (tmp_path / "config.json").write_text(json.dumps(facts))
    found = audit(tmp_path, require=(2, 4), layers=["*mlp*"])
    assert [(f.kind, f.where, f.is_note) for f in found.findings] == [
        ("missing_layer", "score", True)
    ]
    assert not found.fails


def test_weights_that_transformers_renames_are_audited_as_loaded(tmp_path):
    """NomicBERT has one name for a layer in the model and another one in its files."""
    torch.manual_seed(0)
    model = transformers.AutoModelForMaskedLM.from_config(small_config("nomic_bert"))
    sp.sparsify(model, "ste", targets=["*.mlp.*"])
    sp.save_pretrained(model, tmp_path)
    name = json.loads((tmp_path / "sparsity.json").read_text())["layers"][0]
    assert f"{name}.weight" not in load_file(tmp_path / FILE)
    found = audit(tmp_path, require=(2, 4))
    assert not found.fails and not [f for f in found.findings if not f.is_note]
    assert not audit(tmp_path, require=(2, 4), layers=["*.mlp.gate_proj"]).fails
    assert audit(tmp_path, require=(2, 4), layers=["*.self_attn.*"]).fails
    edit(tmp_path, lambda t: [v[:4].fill_(1.0) for v in t.values() if v.dim() == 2])
    assert audit(tmp_path, require=(2, 4)).fails
