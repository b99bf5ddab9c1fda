"""Experts in the trainer: the recipe, the load-balancing loss, records, export and audit."""

import copy

import pytest
import torch
import transformers
from transformers import MixtralConfig, MixtralForCausalLM
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

import sparsepretrain as sp
from sparsepretrain import config
from sparsepretrain.cli import main
from sparsepretrain.console import Console
from sparsepretrain.errors import ConfigError
from sparsepretrain.export.run import export_run
from sparsepretrain.kernels import nm_mask
from sparsepretrain.models.mixtral import Mixtral
from sparsepretrain.training import loop
from sparsepretrain.training.plan import dry_run
from support.sparse_cases import LEARNED
from support.tiny_runs import assert_same_run, interrupted, metrics

MOE = ("model=moe_nano", "model.n_inner=32")


@pytest.mark.parametrize("method", sp.list_methods())
def test_every_method_trains_experts(tiny, method):
    options = {
        "cast": ("sparsity.decay=0.01", "optim.lr=1e-2"),
        "asp": ("sparsity.at=0.3",),
        "step": ("sparsity.clipping=[0.2,0.5]", "sparsity.frozen_bias_correction=true"),
        "mdgf": ("sparsity.until=0.5",),
    }
    outcome = tiny.train(*MOE, f"sparsity={method}", *options.get(method, ()))
    assert outcome.code == 0, outcome.output
    lines = [line for line in metrics(outcome.directory) if "split" not in line]
    assert len(lines) == 6
    if method not in LEARNED:
        assert lines[-1]["loss"] < lines[0]["loss"]
    if method not in ("dense", "sdgp", "act24", "tsrste"):
        assert "2:4 in all" in outcome.output
    name = "flip_rate/model.layers.0.mlp.experts.down_proj"
    if method not in ("cast", "ast", "tsrste", *LEARNED):  # masks are compared every few steps
        assert any(f"{name}/3" in line and name in line for line in lines)


@pytest.mark.parametrize("method", ["dense", "srste", "sste"])
def test_double_precision(tiny, method):
    """Torch has no grouped matmul of it."""
    losses = []
    for precision in ("fp32", "fp64"):
        words = (*MOE, f"sparsity={method}", f"precision={precision}", f"name={precision}")
        losses.append([line["loss"] for line in metrics(tiny.train(*words).directory)])
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
    assert losses[0] != losses[1]


@pytest.mark.parametrize("method", ["sste", "slope", "ast"])
def test_resume_is_bit_exact(tiny, stop_after, method):
    words = (*MOE, f"sparsity={method}", "batch.micro=2")
    whole = tiny.train(*words, f"runs_dir='{tiny.root / 'whole'}'").directory
    assert_same_run(whole, interrupted(tiny, stop_after, (1, 3), *words))


@pytest.mark.parametrize("micro", [4, 2])
def test_the_load_balancing_loss_is_added_as_transformers_does(tiny, micro):
    words = (*MOE, "sparsity=dense", "model.router_loss=0.5", f"batch.micro={micro}")
    session = tiny.build(*words)
    model = copy.deepcopy(session.model)
    rows = session.task.batch("train", 0, range(4), 4)
    expected = balance = 0.0
    for tokens, targets in zip(
        rows["tokens"].split(micro), rows["targets"].split(micro), strict=True
    ):
        output = model(input_ids=tokens, output_router_logits=True)
        loss = torch.nn.functional.cross_entropy(output.logits.flatten(0, 1), targets.flatten())
        each = load_balancing_loss_func(output.router_logits, 4, 2)
        assert torch.equal(each, output.aux_loss)
        ((loss + 0.5 * each) * micro / 4).backward()
        expected += float(loss + 0.5 * each) * micro / 4
        balance += float(each) * micro / 4
    before = {name: p.detach().clone() for name, p in session.model.named_parameters()}
    step = loop.train_step(session)
    assert step.loss == pytest.approx(expected, rel=1e-5)
    assert step.terms["router_loss"] == pytest.approx(balance, rel=1e-5)
    assert balance > 1  # 2 of 4 experts each: 2 if all are chosen equally often
    moved = [n for n, p in session.model.named_parameters() if not torch.equal(p, before[n])]
    assert any(name.endswith("mlp.gate.weight") for name in moved)
    assert "router_loss" not in tiny.build(*MOE, "model.router_loss=0").gradients.terms


@pytest.mark.parametrize("experts", [4, 1])
def test_the_factor_of_a_checkpoint_is_used_if_it_asks_for_the_loss(tmp_path, tiny, experts):
    terms = {}
    for asked in (True, False):
        small = MixtralConfig(
            vocab_size=256, hidden_size=32, intermediate_size=32, num_hidden_layers=1,
            num_attention_heads=2, num_key_value_heads=2, num_local_experts=experts,
            num_experts_per_tok=min(experts, 2),
            max_position_embeddings=64, output_router_logits=asked, router_aux_loss_coef=0.25,
        )  # fmt: skip
        source = tmp_path / str(asked)
        MixtralForCausalLM(small).save_pretrained(source)
        words = ["task=causal_lm", "data=text_files", f"data.files=['{tiny.corpus}/*.txt']"]
        words += ["data.validation=0.3", "data.tokenizer=bytes", "task.sequence_length=16"]
        words += ["steps=2", "sparsity=srste", f"runs_dir='{tmp_path}'", "tracker.mode=disabled"]
        words += ["parallel.device=cpu", "log.every=1", f"name=run_{asked}", "batch.size=4"]
        assert main(["finetune", str(source), *words, "batch.micro=4"]) == 0
        (run,) = (tmp_path / f"run_{asked}").iterdir()
        lines = [line for line in metrics(run) if "split" not in line]
        terms[asked] = ["router_loss" in line for line in lines]
        if experts == 1:
            continue  # the audit of an export takes a router of one row for no weight
        exported = export_run(run, console=Console.silent())
        stock = MixtralForCausalLM.from_pretrained(exported)
        for name, weight in stock.named_parameters():
            if ".experts." in name:
                assert torch.equal(weight, weight * nm_mask(weight, dim=2))
    assert terms == {True: [True, True], False: [False, False]}


def test_a_run_is_exported_to_stock_transformers_and_proved(tiny, capsys):
    run = tiny.train(*MOE, "sparsity=sste").directory
    exported = export_run(run, console=Console.silent())  # compares logits after a reload
    stock = transformers.AutoModelForCausalLM.from_pretrained(exported)
    assert type(stock) is MixtralForCausalLM
    assert main(["audit", str(exported), "--require", "2:4", "--layers", "*.experts.*"]) == 0
    assert "2:4" in capsys.readouterr().out
    assert main(["audit", str(exported), "--require", "1:4", "--layers", "*.experts.*"]) == 1


def test_the_dry_run_counts_the_tokens_that_experts_see(capsys):
    import io

    out = io.StringIO()
    dry_run(config.load(["model=moe_nano", "sparsity=srste"]), Console(out))
    text = " ".join(out.getvalue().split())
    # 16·128 tokens, each to 2 of 4 experts: 2 FLOPs per weight of 2 · (256·128 + 128·128), 4 blocks
    flops = 16 * 128 * 2 * 2 * (256 * 128 + 128 * 128) * 4
    assert f"fprop {flops / 1e9:.2f}G" in text
    assert "none: a bank of slices" in text
    run = config.load(["model=moe_nano"])
    assert Mixtral.router_loss(run.model, None) == 0.01


def test_impossible_settings_are_refused():
    with pytest.raises(ConfigError, match=r"experts_per_token must be at most model.experts"):
        config.load(["model=moe_nano", "model.experts_per_token=5"])
