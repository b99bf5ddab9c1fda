"""Runs whose layers have different N:M patterns, from the command line to the export."""

import io
import json

import pytest
import torch
from safetensors.torch import load_file

from sparsepretrain import config
from sparsepretrain.cli import main
from sparsepretrain.config import freeze
from sparsepretrain.console import Console
from sparsepretrain.export.audit import audit
from sparsepretrain.kernels import nm_mask, nonzeros_per_group
from sparsepretrain.runs import weights
from sparsepretrain.training import derive
from sparsepretrain.training.assembly import build_session
from sparsepretrain.training.cost import run_cost
from sparsepretrain.training.plan import dry_run
from support.tiny_runs import assert_same_run, interrupted, metrics

SRSTE = ("sparsity=srste", "sparsity.targets=all", "model.n_layer=2")
MIXED = (*SRSTE, "sparsity.patterns={*h.0.*: dense, ffn: 1:4}")
"""The first block is dense; in the second one the FFN is 1:4, and attention 2:4."""
ASP = ("sparsity=asp", "sparsity.at=0", *MIXED[1:])
BLOCK = "transformer.h.1"
PATTERNS = {
    f"{BLOCK}.attn.c_attn": (2, 4),
    f"{BLOCK}.attn.c_proj": (2, 4),
    f"{BLOCK}.mlp.c_fc": (1, 4),
    f"{BLOCK}.mlp.c_proj": (1, 4),
}


def most(weight, dim):
    """The largest number of non-zeros in a group of four along an axis."""
    return int(nonzeros_per_group(weight, 4, dim=dim).max())


def test_a_stopped_run_resumes_to_the_same_bits(tiny, stop_after):
    words = ("sparsity=sste", *MIXED[1:])
    whole = tiny.train(*words, f"runs_dir='{tiny.root / 'whole'}'").directory
    assert_same_run(whole, interrupted(tiny, stop_after, (1, 3), *words))


def test_the_run_its_export_and_the_audit_name_the_patterns(tiny, tmp_path, capsys):
    outcome = tiny.train(*MIXED)
    assert outcome.code == 0 and "srste 1:4+2:4 on 4 layers" in outcome.output
    assert "1:4 in 2 layers and 2:4 in 2 layers" in outcome.output
    coverage = json.loads((outcome.directory / "environment.json").read_text())["coverage"]
    assert any("mlp.c_fc" in line and "M∘W 1:4" in line for line in coverage)
    assert any(line.startswith("dense by patterns: transformer.h.0") for line in coverage)
    assert main(["eval", str(outcome.directory)]) == 0
    result = json.loads((outcome.directory / "eval.jsonl").read_text())
    assert result["pattern"] == "1:4+2:4" and result["pattern_holds"]
    assert main(["export", str(outcome.directory), "--onnx"]) == 0
    out = outcome.directory / "export" / "hf"
    about = json.loads((out / "sparsity.json").read_text())
    assert about["pattern"] == "1:4+2:4" and about["layers"] == list(PATTERNS)
    names = list(PATTERNS)
    assert about["patterns"] == {"2:4": names[:2], "1:4": names[2:]}
    assert about["dense"] == [name.replace(".1.", ".0.") for name in PATTERNS]
    assert set(about["onnx"]["initializers"]) == set(PATTERNS)
    card = (out / "README.md").read_text()
    assert '"1:4 sparsity"' in card and "| M∘W 1:4 |" in card and "4 layers were left dense" in card
    stored = load_file(out / "model.safetensors")
    for name, (n, _) in PATTERNS.items():
        assert most(stored[f"{name}.weight"], 0) == n  # Conv1D
        assert most(stored[f"{name.replace('.1.', '.0.')}.weight"], 0) == 4
    found = audit(out)
    assert {each.name: each.pattern for each in found.layers if each.required} == PATTERNS
    assert not [finding for finding in found.findings if not finding.is_note]
    assert main(["audit", str(outcome.directory), "--out", str(tmp_path / "audit")]) == 0
    page = json.loads((tmp_path / "audit" / "audit.json").read_text())
    required = {each["name"]: each["required"] for each in page["layers"] if each["required"]}
    assert required == {name: f"{n}:{m}" for name, (n, m) in PATTERNS.items()}


def test_the_audit_finds_a_layer_that_breaks_its_own_pattern(tiny):
    directory = tiny.train(*MIXED).directory
    assert main(["export", str(directory)]) == 0
    out = directory / "export" / "hf"
    about = json.loads((out / "sparsity.json").read_text())
    about["patterns"] = {"1:4": list(PATTERNS)}
    (out / "sparsity.json").write_text(json.dumps(about))
    found = [finding for finding in audit(out).findings if finding.kind == "too_dense"]
    assert {finding.where for finding in found} == {f"{BLOCK}.attn.c_attn", f"{BLOCK}.attn.c_proj"}


def test_the_dry_run_shows_the_pattern_of_each_layer(tiny):
    out = io.StringIO()
    dry_run(tiny.load(*MIXED), Console(out))
    text = " ".join(out.getvalue().split())
    assert "srste 1:4+2:4" in text and "mlp.c_proj 32 × 128 M∘W 1:4" in text
    assert "attn.c_proj 32 × 32 M∘W 2:4" in text and "dense by patterns:" in text


@pytest.mark.parametrize("method", ["srste", "tsrste", "sdgf"])
def test_costs_are_those_of_the_layers(method):
    def cost(*words):
        micro = ["experiment=claims_lm", "steps=100", f"sparsity={method}"]
        return run_cost(config.load([*micro, *words]))

    one, two = cost("sparsity.n=1"), cost()
    some = cost("sparsity.patterns={*.c_fc: 1:4}")
    entries = some.entries
    zeros = [each.entries - each.nonzero for each in (one, two, some)]
    assert zeros[2] == (zeros[0] + zeros[1]) / 2
    assert some.sparse_matmuls == pytest.approx((one.sparse_matmuls + two.sparse_matmuls) / 2)
    assert min(one.flops, two.flops) <= some.flops <= max(one.flops, two.flops)
    part = cost("sparsity.patterns={*.c_fc: dense}")
    assert part.entries == entries and 2 * (part.entries - part.nonzero) == zeros[1]


def test_the_order_of_patterns_is_part_of_the_identity_and_no_pattern_is_not():
    def identity(*words):
        return freeze.identity(config.load(["model=gpt2_nano", "sparsity=srste", *words]))

    first = identity("sparsity.patterns={*.c_fc: 1:4, *.mlp.*: dense}")
    assert first != identity("sparsity.patterns={*.mlp.*: dense, *.c_fc: 1:4}")
    run = config.load(["model=gpt2_nano", "sparsity=srste"])
    plain = run.plain
    del plain["sparsity"]["patterns"]
    assert freeze.identity(plain) == freeze.identity(run) == identity("sparsity.patterns={}")


def test_given_patterns_replace_those_of_a_file(tmp_path):
    (tmp_path / "sparsity").mkdir()
    (tmp_path / "sparsity" / "searched.yaml").write_text(
        'name: ste\npatterns: {"*.c_fc": "1:4", "*.c_proj": dense}\n'
    )
    words = ["model=gpt2_nano", "sparsity=searched"]
    run = config.load(words, [tmp_path])
    assert run.sparsity.patterns == {"*.c_fc": "1:4", "*.c_proj": "dense"}
    run = config.load([*words, "sparsity.patterns={*.c_proj: 2:8}"], [tmp_path])
    assert run.sparsity.patterns == {"*.c_proj": "2:8"}
    assert config.load([*words, "sparsity.patterns={}"], [tmp_path]).sparsity.patterns == {}


@pytest.mark.parametrize(
    ("patterns", "text"),
    [
        ("{*.c_fc: 5:4}", "sparsity.patterns.*.c_fc must be N:M"),
        ("{*.c_fc: 64}", "sparsity.patterns.*.c_fc must be a string, got 64: write it in quotes"),
        ("1:4", "sparsity.patterns must be a mapping"),
        ('{"*.c_fc": "1:4"}', "keys without quotes"),
        ("{*.fc: 1:4}", "sparsity.patterns.*.fc: no layer of the targets matches"),
        ("{ffnn: 1:4}", "did you mean 'ffn'"),
        ("{attention: 1:4}", "sparsity.patterns.attention: no layer of the targets matches"),
        ("{ffn: 1:4, *.c_fc: 2:4}", "sparsity.patterns.*.c_fc: ffn comes before"),
        ("{ffn: dense}", "sparsity.patterns: every selected layer is dense"),
        ("{*.c_fc: 1:7}", "sparsity.patterns: layer"),
    ],
)
def test_wrong_patterns_end_with_one_line_and_exit_code_2(patterns, text, capsys):
    words = ["model=gpt2_nano", "sparsity=srste", "tracker.mode=disabled", "steps=1"]
    assert main(["train", "--dry-run", *words, f"sparsity.patterns={patterns}"]) == 2
    (line,) = [t for t in capsys.readouterr().err.splitlines() if "config error" in t]
    assert text in line


@pytest.mark.parametrize("rule", ["zeros", "wanda"])
def test_first_masks_follow_the_pattern_of_each_layer(tiny, rule):
    source = tiny.train(*MIXED).directory
    run = tiny.load(*ASP, f"init.path='{source}'", f"init.mask={rule}", "seed=1")
    session = build_session(run, Console.silent(), initial=weights.find(source, print), fresh=True)
    sparsifier = session.sparsifier
    assert sparsifier.patterns == PATTERNS and sparsifier.prove().holds
    masks = sparsifier.masks()
    stored = {name: layer.weight.detach() for name, layer in sparsifier.layers.items()}
    for name, (n, m) in PATTERNS.items():
        assert most(masks[name], 1) == n
        is_magnitude = torch.equal(masks[name], nm_mask(stored[name], n, m))
        assert is_magnitude or rule == "wanda"


def test_fine_tuning_takes_the_patterns_over(tiny, small_corpus):
    source = str(tiny.train(*MIXED).directory)
    text = ["task=causal_lm", "data=text_files", f"data.files=['{small_corpus}/0*.txt']"]

    def patterns(*words):
        return derive.finetuned(source, [*text, *words], (), Console.silent()).sparsity.patterns

    assert patterns() == patterns("sparsity=asp") == {"*h.0.*": "dense", "ffn": "1:4"}
    assert patterns("sparsity.patterns={ffn: 2:8}") == {"ffn": "2:8"}
    assert patterns("sparsity.patterns={}") == {}


def test_a_fine_tuned_run_begins_from_the_same_function(tiny, tmp_path, small_corpus, capsys):
    source = tiny.train("sparsity=sste", *MIXED[1:], "eval.batches=2").directory
    common = ["task=causal_lm", "data=text_files", f"data.files=['{small_corpus}/0*.txt']"]
    common += ["steps=2", "eval.every=1", "eval.batches=1", "tracker.mode=disabled"]
    common += ["parallel.device=cpu"]
    for words, kept in (([], "stored weights"), (["sparsity.patterns={ffn: 1:4}"], "evaluates")):
        root = tmp_path / str(len(words))
        assert main(["finetune", str(source), *common, *words, f"runs_dir='{root}'"]) == 0
        assert kept in capsys.readouterr().out
        (directory,) = root.glob("*/*-s0")
        assert metrics(directory)[0]["loss"] < 5.4


def test_probes_read_groups_of_each_layer(tiny):
    words = (*SRSTE, "sparsity.patterns={*.c_fc: 1:8}", "probe=lifetime", "probe.lifetime.every=2")
    outcome = tiny.train(*words)
    assert outcome.code == 0, outcome.output
    assert (outcome.directory / "probes.jsonl").read_text()
