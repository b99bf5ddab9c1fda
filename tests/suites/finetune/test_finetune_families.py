"""Fine-tuning checkpoints of many families: the dry run, two steps, export and reload."""

import io
import itertools
import json

import pytest
import torch
import transformers

from sparsepretrain.console import Console
from sparsepretrain.export.run import export_run
from sparsepretrain.kernels import nm_mask
from sparsepretrain.training.plan import dry_run
from sparsepretrain.training.schedules import resolve_steps
from support.families import CAUSAL, FAMILIES, MASKED, MOE, small_config
from support.finetune_cases import glue, load, train

FAST = ("gpt2", "phi3", "bert")
# DeBERTa's and MPNet's position buckets and the others' token types need no more than these words
RETRAINING = {"ast": (), "cast": ("sparsity.decay=0.01", "optim.lr=0.2")}
"""Methods -> options; two steps of CAST have to be long ones to reach zero."""
TEXT = [family for family in CAUSAL if family != "gpt_bigcode"]


def save(root, family):
    """A checkpoint whose vocabulary are the bytes."""
    torch.manual_seed(0)
    model = getattr(transformers, FAMILIES[family]).from_config(small_config(family))
    model.save_pretrained(root / family)
    return root / family


def words(family, root):
    """What is typed behind ``sparsepretrain finetune DIR``."""
    common = ["sparsity=ste", "steps=2", f"runs_dir='{root}/runs'"]
    if family in CAUSAL:
        (root / "text.py").write_text("def shepherd(sheep):\n    return sheep + 1\n" * 400)
        data = ["task=causal_lm", "data=python_source", f"data.roots=['{root}']"]
        return [*data, "data.tokenizer=bytes", "task.sequence_length=32", *common]
    return [*glue(root), "task.max_length=48", "epochs=1", *common]


@pytest.mark.parametrize(
    "family",
    [
        family if family in FAST else pytest.param(family, marks=pytest.mark.slow)
        for family in (*CAUSAL, *MASKED)
    ],
)
def test_every_family_has_a_dry_run_trains_and_is_exported(tmp_path, family):
    source = save(tmp_path, family)
    typed = words(family, tmp_path)
    out = io.StringIO()
    dry_run(resolve_steps(load(source, *typed)), Console(out))
    assert "FLOPs per step" in out.getvalue() and "ste 2:4" in out.getvalue()
    directory, _, lines = train(source, *typed)
    assert [line["step"] for line in lines if "split" not in line] == [1, 2]
    assert all(line["loss"] > 0 for line in lines)
    exported = export_run(directory, console=Console.silent())  # reloads, compares logits
    about = json.loads((exported / "sparsity.json").read_text())
    assert about["pattern"] == "2:4" and about["layers"]
    head = "AutoModelForCausalLM" if family in CAUSAL else "AutoModelForSequenceClassification"
    loaded = getattr(transformers, head).from_pretrained(exported)
    weights = dict(loaded.named_parameters())
    for name in about["layers"]:
        weight = weights.get(name)  # a bank of experts
        dim = -1
        if weight is None:
            layer = loaded.get_submodule(name)
            weight, dim = layer.weight, 0 if type(layer).__name__ == "Conv1D" else 1
        assert torch.equal(weight, weight * nm_mask(weight, dim=dim)), name
    assert (family in MOE) is any(".experts." in name for name in about["layers"])


@pytest.mark.parametrize(
    ("family", "method"),
    [
        ("llama", "ast"),
        ("qwen3", "cast"),
        *(
            pytest.param(family, method, marks=pytest.mark.slow)
            for family, method in itertools.product(("gpt2", "llama", "qwen2", "qwen3"), RETRAINING)
            if (family, method) not in (("llama", "ast"), ("qwen3", "cast"))
        ),
    ],
)
def test_pretrained_models_are_retrained_with_their_dense_selves(tmp_path, family, method):
    source = save(tmp_path, family)
    options = ("sparsity.refresh=1", "teacher=self", *RETRAINING[method])
    typed = [*words(family, tmp_path), f"sparsity={method}", "sparsity.targets=all", *options]
    out = io.StringIO()
    dry_run(resolve_steps(load(source, *typed)), Console(out))
    assert "teacher" in out.getvalue() and f"{method} 2:4" in out.getvalue()
    directory, _, lines = train(source, *typed)
    first = next(line for line in lines if "split" not in line)
    # AST's forward weight is 2:4 from the first step on. CAST's is W until the last step has
    # pruned, so that student and teacher differ in GPT-2's dropout alone.
    same = method == "cast" and family != "gpt2"
    assert first["kl"] == pytest.approx(0, abs=1e-6) if same else first["kl"] > 1e-6
    expected = 0.33 * first["cross_entropy"] + 0.67 * 4 * first["kl"]
    assert first["loss"] == pytest.approx(expected, rel=1e-5)
    exported = export_run(directory, console=Console.silent())
    about = json.loads((exported / "sparsity.json").read_text())
    loaded = transformers.AutoModelForCausalLM.from_pretrained(exported)
    blocks = ("q_proj", "down_proj") if family != "gpt2" else ("attn.c_attn", "mlp.c_proj")
    assert all(any(name.endswith(each) for name in about["layers"]) for each in blocks)
    for name in about["layers"]:
        weight = loaded.get_submodule(name).weight
        dim = 0 if family == "gpt2" else 1
        assert torch.equal(weight, weight * nm_mask(weight, dim=dim)), name
