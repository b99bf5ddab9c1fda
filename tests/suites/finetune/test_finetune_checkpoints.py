"""Checkpoints as other people write them: names of directories, quantized weights."""

import json
import re

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers

import sparsepretrain as sp
from sparsepretrain import kernels
from sparsepretrain.cli import main
from sparsepretrain.errors import CheckpointError, ConfigError, DataError
from sparsepretrain.runs import weights
from sparsepretrain.training.assembly import evaluated_model
from support.families import small_config
from support.finetune_cases import load, train

WORDS = ("task=causal_lm", "data=python_source", "task.sequence_length=16", "steps=1")


def save(directory, **more):
    model = transformers.AutoModelForCausalLM.from_config(small_config("gpt2"))
    model.save_pretrained(directory)
    file = directory / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | more))
    return directory


QUANTIZED = {
    "compressed-tensors": {
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "sparsity_config": {"format": "dense"},
        }
    },
    "gptq": {"quantization_config": {"quant_method": "gptq", "bits": 4}},
    "bitsandbytes": {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}},
    "fp8": {"quantization_config": {"quant_method": "fp8"}},
    "older name": {"compression_config": {"format": "dense"}},
    "part": {"text_config": {"quantization_config": {"quant_method": "awq"}}},
}


@pytest.mark.parametrize("kind", QUANTIZED)
def test_a_quantized_checkpoint_is_one_line(tmp_path, kind):
    source = save(tmp_path / "model", **QUANTIZED[kind])
    with pytest.raises(CheckpointError, match=r"weights are quantized .*Dequantize") as caught:
        load(source, *WORDS, f"data.roots=['{tmp_path}']")
    assert caught.value.exit_code == 4 and "\n" not in str(caught.value)


def test_a_checkpoint_may_have_any_name(tmp_path, monkeypatch, capsys):
    source = save(tmp_path / "epoch=3-step=40")
    (tmp_path / "text.py").write_text("print('sheep')\n" * 300)
    monkeypatch.chdir(tmp_path)
    words = [*WORDS, f"data.roots=['{tmp_path}']", "parallel.device=cpu", "--dry-run"]
    assert main(["finetune", f"./{source.name}", *words]) == 0
    assert main(["finetune", source.name, *words]) == 0
    capsys.readouterr()
    assert main(["finetune", "task=causal_lm", *words]) == 2
    assert "the checkpoint comes first" in capsys.readouterr().err


def pruned(directory, n):
    """A checkpoint whose FFN is n:4, not by magnitude."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(small_config("gpt2"))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "mlp" in name and parameter.dim() == 2:  # Conv1D: (in, out)
                kept = kernels.nm_mask(torch.rand_like(parameter), n, 4, dim=0)
                parameter.masked_fill_(~kept, 0)
    model.save_pretrained(directory)
    return model


def fine_tuned(tmp_path, *words):
    (tmp_path / "text.py").write_text("print('sheep')\n" * 300)
    return train(
        tmp_path / "model",
        *WORDS,
        f"data.roots=['{tmp_path}']",
        f"runs_dir='{tmp_path}/runs'",
        *words,
    )


NOTE = "note: 4 layers of the checkpoint are 2:4"


@pytest.mark.parametrize("sparsity", ["dense", "ste"])
def test_zeros_that_will_train_are_noted(tmp_path, sparsity):
    pruned(tmp_path / "model", 2)
    _, out, _ = fine_tuned(tmp_path, f"sparsity={sparsity}")
    text = " ".join(out.split())
    assert (
        f"{NOTE}, and sparsity={sparsity} trains their zeros too: sparsity=asp sparsity.at=0"
        in text
    )


CASES = {
    "exceptions": (lambda w: w[:4, :1].fill_(1.0), "4 layers .* are 2:4 but for 4 groups, and"),
    "zeros": (lambda w: w.zero_(), ""),
    "dense": (lambda w: w.fill_(1.0), ""),
}


@pytest.mark.parametrize("case", CASES)
def test_layers_that_were_meant_to_be_sparse_are_counted(tmp_path, case):
    change, expected = CASES[case]
    model = pruned(tmp_path / "model", 2)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if ".mlp." in name and weight.dim() == 2:
                change(weight)
    model.save_pretrained(tmp_path / "model")
    _, out, _ = fine_tuned(tmp_path, "sparsity=ste")
    text = " ".join(out.split())
    assert re.search(expected, text) if expected else "of the checkpoint" not in text


def with_zeros(directory, keep):
    """A checkpoint whose FFN weights (Conv1D: in, out) keep the entries of ``keep(weight)``."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(small_config("gpt2"))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "mlp" in name and parameter.dim() == 2:
                parameter.masked_fill_(~keep(parameter), 0)
    model.save_pretrained(directory)
    return model.state_dict()


def nm(n, m, dim=0):
    return lambda w: kernels.nm_mask(torch.rand_like(w), n, m, dim=dim)


ASP = "sparsity=asp sparsity.at=0"
OTHER_PATTERNS = {
    "1:4": (nm(1, 4), f"1:4, .* trains their zeros too: {ASP} sparsity.n=1 keeps"),
    "4:8": (nm(4, 8), f"4:8, .*: {ASP} sparsity.n=4 sparsity.m=8 keeps"),
    "2:8": (nm(2, 8), f"2:8, .*: {ASP} sparsity.m=8 keeps"),
    "8:16": (nm(8, 16), f"8:16, .*: {ASP} sparsity.n=8 sparsity.m=16 keeps"),
    "half": (
        lambda w: torch.rand_like(w) < 0.5,
        f"pruned without a pattern, .*: {ASP} sparsity.n=4 sparsity.m=4 init.mask=zeros keeps",
    ),
    "other axis": (nm(2, 4, dim=1), "pruned without a pattern"),
}


# one of each in every change, all in make test-slow
QUICK_PAIRS = {("1:4", "dense"), ("4:8", "ste"), ("half", "ste"), ("other axis", "dense")}
PAIRS = [
    pytest.param(case, sparsity, marks=() if (case, sparsity) in QUICK_PAIRS else pytest.mark.slow)
    for case in OTHER_PATTERNS
    for sparsity in ("dense", "ste")
]


@pytest.mark.parametrize(("case", "sparsity"), PAIRS)
def test_zeros_of_any_pattern_are_noted_with_words_that_keep_them(tmp_path, case, sparsity):
    keep, expected = OTHER_PATTERNS[case]
    source = with_zeros(tmp_path / "model", keep)
    _, out, _ = fine_tuned(tmp_path, f"sparsity={sparsity}")
    text = " ".join(out.split())
    assert re.search(f"note: 4 layers of the checkpoint are {expected}", text)
    words = re.search(r"too: (sparsity=asp .*?) keeps them", text)[1].split()
    directory, _, _ = fine_tuned(tmp_path, *words)
    masks = sp.sparsifier_of(evaluated_model(weights.find(directory))[1]).masks()
    assert len(masks) == 4
    for name, mask in masks.items():
        assert not (mask & (source[f"{name}.weight"] == 0)).any() or case == "1:4"
        assert torch.equal(mask, source[f"{name}.weight"] != 0)


@pytest.mark.parametrize(
    ("keep", "told"),
    [
        (nm(1, 4), "some zeros of pruned weights, which are sparser than 2:4, train unless keep_"),
        (nm(4, 8), r"another pattern than 2:4, transformer\.h\.0\.mlp\.c_fc \(.* of 512 groups"),
        (nm(2, 4, dim=1), r"another pattern than 2:4"),
        (lambda w: torch.rand_like(w) < 0.7, r"another pattern than 2:4"),
    ],
)
def test_fixed_masks_that_change_the_zeros_of_a_checkpoint_say_so(tmp_path, keep, told):
    with_zeros(tmp_path / "model", keep)
    _, out, _ = fine_tuned(tmp_path, "sparsity=asp", "sparsity.at=0")
    assert re.search(told, " ".join(out.split())), out


def rewritten(directory, change):
    """A small GPT-2 whose state dict was changed."""
    model = transformers.AutoModelForCausalLM.from_config(small_config("gpt2"))
    model.save_pretrained(directory)
    file = directory / "model.safetensors"
    save_file(change(load_file(file)), file, {"format": "pt"})


def renamed(prefix):
    return lambda state: {f"{prefix}{key}": value for key, value in state.items()}


def without(name):
    return lambda state: {k: v for k, v in state.items() if name not in k}


def replaced(name, change):
    return lambda state: {k: change(v) if name in k else v for k, v in state.items()}


def own_head(state):
    embedding = next(v for k, v in state.items() if k.endswith("wte.weight"))
    return state | {"lm_head.weight": torch.randn_like(embedding)}


def lora(state):
    name = next(k for k in state if k.endswith(FC))
    inner = name.replace("c_fc.", "c_fc.base_layer.")
    return {inner if k == name else k: v for k, v in state.items()}


def sparse_run(state):
    return state | {
        "sparsity_counters": torch.zeros(3),
        "h.0.mlp.c_fc.sparsity.beta": torch.ones(1),
    }


def another_block(state):
    return state | {k.replace("h.1.", "h.2."): v.clone() for k, v in state.items() if "h.1." in k}


FC = "h.1.mlp.c_fc.weight"
FOREIGN = {
    "sparse run": (sparse_run, "has the master weights of a sparse model .*checkpoint-N/sparse"),
    "compiled": (renamed("_orig_mod."), "lacks .* its names begin with '_orig_mod.'"),
    "wrapped": (renamed("module."), "lacks .* its names begin with 'module.'"),
    "adapters": (renamed("base_model.model."), "lacks .* its names begin with"),
    "wrapped inside": (
        lambda s: {k.replace("h.1.", "h.1._checkpoint_wrapped_module."): v for k, v in s.items()},
        r"lacks .* wrapped modules \(transformer.h.1._checkpoint_wrapped_module.*save the model",
    ),
    "lora": (lora, r"lacks .*: it has adapters: merge them"),
    "own head": (own_head, "head that differ from the embedding.* tie_word_embeddings=false"),
    "no embedding": (without("wte"), "lacks transformer.wte.weight"),
    "one weight less": (without(FC), "lacks transformer.h.1.mlp.c_fc.weight, which"),
    "a block less": (without("h.1."), "lacks transformer.h.1.* and 11 more weights"),
    "a block more": (another_block, "has further blocks: .*h.2"),
    "other shape": (replaced(FC, lambda w: w[:, :8].clone()), "lacks transformer.h.1.mlp.c_fc.wei"),
    "integers": (replaced(FC, lambda w: (w * 100).to(torch.int8)), "has the dtype I8, so its weig"),
    "fp8": (
        replaced(FC, lambda w: w.to(torch.float8_e4m3fn)),
        "has the dtype F8_E4M3, so its weig",
    ),
    "NaN": (replaced(FC, lambda w: w * float("nan")), "c_fc.weight is not finite"),
    "infinity": (
        replaced("wte", lambda w: w + float("inf")),
        "wte.weight and 1 more .* not finite",
    ),
}


@pytest.mark.parametrize("verb", ["finetune", "eval"])
@pytest.mark.parametrize("case", FOREIGN)
def test_weights_that_do_not_belong_to_the_model_are_refused(tmp_path, capsys, case, verb):
    change, told = FOREIGN[case]
    rewritten(tmp_path / "model", change)
    (tmp_path / "text.py").write_text("print('sheep')\n" * 300)
    words = [str(tmp_path / "model"), *WORDS, f"data.roots=['{tmp_path}']", "parallel.device=cpu"]
    words += ["data.tokenizer=bytes"]
    words += [f"runs_dir='{tmp_path}/runs'"] if verb == "finetune" else []
    assert main([verb, *(w for w in words if verb == "finetune" or w != "steps=1")]) == 4
    err = " ".join(capsys.readouterr().err.split())
    assert re.search(told, err) and err.count("sparsepretrain:") == 1
    assert not list(tmp_path.rglob("metrics.jsonl"))


@pytest.mark.parametrize("key", ["model", "state_dict"])
def test_a_state_dict_beside_other_things_is_named(tmp_path, key):
    rewritten(tmp_path / "model", dict)
    file = tmp_path / "model/model.safetensors"
    torch.save({key: load_file(file), "step": 3}, tmp_path / "model/pytorch_model.bin")
    file.unlink()
    with pytest.raises(CheckpointError, match=f"the weights lie under the key '{key}'"):
        fine_tuned(tmp_path)


@pytest.mark.parametrize(
    "content", [b"", b"\x08\0\0\0\0\0\0\0{}", b"version https://git-lfs\n" * 5]
)
def test_damaged_weights_are_one_line(tmp_path, content):
    rewritten(tmp_path / "model", dict)
    (tmp_path / "model/model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match="model cannot be loaded: ") as caught:
        fine_tuned(tmp_path)
    assert "\n" not in str(caught.value)


def test_truncated_and_pickled_weights_are_one_line(tmp_path):
    rewritten(tmp_path / "model", dict)
    file = tmp_path / "model/model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CheckpointError, match="model cannot be loaded: "):
        fine_tuned(tmp_path)
    file.unlink()
    (tmp_path / "model/pytorch_model.bin").write_bytes(b"garbage")
    with pytest.raises(CheckpointError, match="model cannot be loaded: "):
        fine_tuned(tmp_path)


def test_sequences_longer_than_the_positions_are_refused(tmp_path):
    rewritten(tmp_path / "model", dict)
    most = small_config("gpt2").n_positions
    with pytest.raises(
        ConfigError, match=rf"task\.sequence_length must be ≤ {most}, its positions"
    ):
        fine_tuned(tmp_path, f"task.sequence_length={most + 4}")


def test_a_tokenizer_with_more_tokens_than_the_embedding_is_refused(tmp_path):
    rewritten(tmp_path / "model", dict)
    words = {f"w{i}": i for i in range(small_config("gpt2").vocab_size + 3)} | {"<unk>": 10**4}
    made = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "tokenizer.json"))
    told = r"has 10001 tokens, but the model has rows for"
    with pytest.raises(DataError, match=told):
        fine_tuned(tmp_path, f"data.tokenizer={tmp_path}/tokenizer.json", "data.vocab_size=10001")
    assert not list(tmp_path.rglob("metrics.jsonl"))


def test_sparse_layers_that_are_no_targets_are_noted(tmp_path):
    pruned(tmp_path / "model", 2)
    words = ("sparsity=asp", "sparsity.at=0", 'sparsity.targets=["*.mlp.c_fc"]')
    _, out, _ = fine_tuned(tmp_path, *words)
    text = " ".join(out.split())
    assert "note: 2 layers of the checkpoint are 2:4, and they are not among the targets" in text


def test_the_proposed_words_keep_the_zeros(tmp_path):
    pruned(tmp_path / "model", 2)
    directory, out, _ = fine_tuned(tmp_path, "sparsity=asp", "sparsity.at=0")
    assert "of the checkpoint are" not in out
    source = pruned(tmp_path / "again", 2).state_dict()
    mask_of = sp.sparsifier_of(evaluated_model(weights.find(directory))[1]).masks()
    assert len(mask_of) == 4
    for name, mask in mask_of.items():
        assert torch.equal(mask, source[f"{name}.weight"] != 0)


def test_weights_sparser_than_the_pattern_keep_their_zeros(tmp_path):
    source = pruned(tmp_path / "model", 1).state_dict()
    directory, _, _ = fine_tuned(tmp_path, "sparsity=asp", "sparsity.at=0", "init.mask=zeros")
    for name, mask in sp.sparsifier_of(evaluated_model(weights.find(directory))[1]).masks().items():
        assert torch.equal(mask, source[f"{name}.weight"] != 0)


def test_masks_of_zeros_need_a_fixed_mask(tmp_path):
    pruned(tmp_path / "model", 2)
    with pytest.raises(ConfigError, match=r"init\.mask=zeros: ste has no mask that is fixed"):
        fine_tuned(tmp_path, "sparsity=ste", "init.mask=zeros")


def test_an_adapter_is_named(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model/adapter_config.json").write_text("{}")
    (tmp_path / "model/config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"has an adapter .*: merge it"):
        fine_tuned(tmp_path)


@pytest.mark.parametrize("legacy", [False, True])
def test_integers_in_a_pickled_file_are_refused(tmp_path, legacy):
    rewritten(tmp_path / "model", lambda state: state)
    file = tmp_path / "model/model.safetensors"
    state = load_file(file)
    file.unlink()
    name = next(k for k in state if k.endswith(FC))
    state[name] = (state[name] * 100).to(torch.int8)
    pickled = tmp_path / "model/pytorch_model.bin"
    torch.save(state, pickled, _use_new_zipfile_serialization=not legacy)
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin: .* has the dtype int8"):
        fine_tuned(tmp_path)


def test_an_adapter_beside_a_model_is_named(tmp_path):
    peft = pytest.importorskip("peft")
    model = transformers.AutoModelForCausalLM.from_config(small_config("gpt2"))
    model.save_pretrained(tmp_path / "model")
    adapter = peft.LoraConfig(r=2, target_modules=["c_fc"], fan_in_fan_out=True)
    peft.get_peft_model(model, adapter).save_pretrained(tmp_path / "model")
    with pytest.raises(CheckpointError, match="move the files of the adapter away"):
        fine_tuned(tmp_path)
    for file in (tmp_path / "model").glob("adapter_*"):
        file.unlink()
    fine_tuned(tmp_path)


CONFIGURATIONS = {
    "activation": ({"activation_function": "myact"}, "KeyError: 'myact'"),
    "text for a number": ({"n_embd": "32"}, "expected int, got str"),
    "heads": ({"n_head": 5}, "divisible"),
    "no layers": ({"n_layer": None}, "n_layer"),
    "unknown": ({"model_type": "gpt9"}, "gpt9"),
    "code": (
        {"model_type": "gpt9", "auto_map": {"AutoConfig": "own.Config"}},
        "Python code of its",
    ),
    "code of a model": ({"auto_map": {"AutoModelForCausalLM": "own.Model"}}, ""),
}


@pytest.mark.parametrize("case", CONFIGURATIONS)
def test_a_configuration_that_transformers_refuses_is_one_line(tmp_path, capsys, case):
    changed, told = CONFIGURATIONS[case]
    source = save(tmp_path / "model", **changed)
    (tmp_path / "text.py").write_text("print('sheep')\n" * 300)
    words = [*WORDS, f"data.roots=['{tmp_path}']", "data.tokenizer=bytes", "parallel.device=cpu"]
    code = main(["finetune", str(source), *words, "--dry-run"])
    err = " ".join(capsys.readouterr().err.split())
    if not told:  # the class of transformers serves
        assert code == 0
        return
    assert code == 4 and told in err and err.count("sparsepretrain:") == 1, err


def test_zeros_of_banks_are_noted(tmp_path):
    config = small_config("mixtral")
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "experts" in name:
                parameter *= kernels.nm_mask(parameter.flatten(0, 1), 2, 4, dim=1).view(
                    parameter.shape
                )
    model.save_pretrained(tmp_path / "model")
    _, out, _ = fine_tuned(tmp_path, "sparsity=ste", "sparsity.targets=['*_attn.*']")
    assert re.search(
        r"note: \d+ weights of the checkpoint that no linear layer holds \(.*experts", out
    )


def test_what_is_left_out_is_named(tmp_path):
    rewritten(tmp_path / "model", lambda state: state | {"h.0.attn.masked_bias": torch.zeros(1)})
    _, out, _ = fine_tuned(tmp_path)
    assert "left out: transformer\n" not in out


def test_bart_without_an_embedding_of_its_decoder_is_refused(tmp_path):
    config = small_config("bart")
    transformers.BartForConditionalGeneration(config).save_pretrained(tmp_path / "model")
    with pytest.raises(CheckpointError, match=r"lacks model\.decoder\.embed_tokens\.weight"):
        fine_tuned(tmp_path, "sparsity.targets=[*.fc1]", "data.tokenizer=bytes")


@pytest.mark.parametrize("family", ["llama", "qwen2", "mistral"])
def test_a_body_of_another_name_is_found(tmp_path, family):
    """transformers calls it ``transformer`` in LlamaForQuestionAnswering, ``model`` elsewhere."""
    from sparsepretrain.models.pretrained import Pretrained, PretrainedOptions

    source = transformers.AutoModelForCausalLM.from_config(small_config(family))
    source.save_pretrained(tmp_path)
    options = PretrainedOptions(name="x", family="pretrained", path=str(tmp_path))
    state, new, unused = Pretrained.initial_state(options, "spans", 2)
    assert new == ["qa_outputs.bias", "qa_outputs.weight"]
    assert set(unused) <= {"lm_head.weight"}
    name = next(name for name in state if name.endswith("layers.0.mlp.up_proj.weight"))
    expected = source.model.layers[0].mlp.up_proj.weight
    assert torch.equal(state[name], expected)
