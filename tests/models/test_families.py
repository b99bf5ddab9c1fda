"""Roles of layers in the families of transformers, on small models of the real classes."""

import contextlib
from fnmatch import fnmatchcase

import pytest
import torch
import transformers

from sparsepretrain.errors import CheckpointError, ConfigError
from sparsepretrain.models import pretrained
from sparsepretrain.models._families import ROUTERS, roles_of
from sparsepretrain.sparsity.engine.layer_classes import layer_family
from sparsepretrain.training.assembly import require_known_layers
from support.families import CAUSAL, FAMILIES, MASKED, MOE, SEQ2SEQ, small_config, small_model

# what a block's FFN has, attention has, and both: (ffn, ffn_out, attention) per block
COUNTS = {
    "gpt2": (2, 1, 2),
    "phi": (2, 1, 4),
    "phi3": (2, 1, 2),
    "llama": (3, 1, 4),
    "falcon": (2, 1, 2),
    "modernbert": (2, 1, 2),
    "bert": (2, 1, 4),
}


def linear_layers(model):
    return [name for name, module in model.named_modules() if layer_family(type(module))]


def matched(names, globs):
    return {name for name in names if any(fnmatchcase(f".{name}", glob) for glob in globs)}


def layers_and_experts(model):
    banks = [name for name, parameter in model.named_parameters() if parameter.dim() == 3]
    return linear_layers(model) + banks


@pytest.mark.parametrize("family", FAMILIES)
def test_the_roles_cover_every_linear_layer_of_the_blocks(family):
    model = small_model(family)
    names = layers_and_experts(model)
    roles = roles_of(pretrained.names_of_weights(model))
    for alias in ("ffn", "ffn_out", "attention", "all"):
        require_known_layers(alias, roles, model)
    in_blocks = {name for name in names if any(part.isdigit() for part in name.split("."))}
    in_blocks -= matched(names, ROUTERS)
    assert (family in MOE) is any(".experts." in name for name in matched(names, roles["ffn"]))
    assert matched(names, roles["all"]) == in_blocks
    assert not matched(names, roles["ffn"]) & matched(names, roles["attention"])
    assert matched(names, roles["ffn_out"]) < matched(names, roles["ffn"])
    if family in COUNTS:
        blocks = len({name.split(".0.")[0] for name in in_blocks if ".0." in name})
        counts = tuple(
            len([n for n in matched(names, roles[alias]) if ".0." in n]) // blocks
            for alias in ("ffn", "ffn_out", "attention")
        )
        assert counts == COUNTS[family]


@pytest.mark.parametrize("family", ["gpt2", "phi3", "bert"])
def test_a_layer_without_a_role_is_an_error(family):
    model = small_model(family)
    roles = roles_of(linear_layers(model))
    parent, name = next(
        (model.get_submodule(n.rpartition(".")[0]), n)
        for n in linear_layers(model)
        if matched([n], roles["ffn"])
    )
    parent.extra_gate = torch.nn.Linear(8, 8, device="meta")
    for alias in ("ffn", "ffn_out", "all"):
        with pytest.raises(
            ConfigError, match=rf"{alias} would leave out .*extra_gate.*write globs"
        ):
            require_known_layers(alias, roles, model)
    require_known_layers("attention", roles, model)
    require_known_layers("ffn", roles, model, ["*.extra_gate"])  # the user has decided about it
    assert name


def test_a_model_of_unknown_names_lists_its_linear_layers():
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    model = torch.nn.ModuleDict({"blocks": model})
    roles = roles_of(linear_layers(model))
    with pytest.raises(ConfigError, match="no layers of this model are known as ffn; write globs"):
        require_known_layers("ffn", roles, model)


def test_thirty_families_are_named():
    assert len({*CAUSAL, *MASKED, *SEQ2SEQ} - {*MOE}) >= 30


def longest(model, family):
    """The longest sequence that a model takes, of 40 tokens at most."""
    lengths = []
    for length in (*range(8, 20), 40):
        tokens = torch.arange(length)[None] % 8 + 5
        with torch.no_grad(), contextlib.suppress(IndexError, RuntimeError):
            model(input_ids=tokens, attention_mask=torch.ones_like(tokens))
            lengths.append(length)
    return None if 40 in lengths else max(lengths)


@pytest.mark.parametrize("family", [*CAUSAL, *MASKED])
def test_tables_of_positions_limit_the_length(family, tmp_path):
    config = small_config(family)
    config.max_position_embeddings = 16
    if family == "mpt":
        config.max_seq_len = 16
    kind = "causal_lm" if family in CAUSAL else "labels"
    config.save_pretrained(tmp_path)
    model = pretrained._build(str(tmp_path), kind, 2).eval()
    options = pretrained.PretrainedOptions(name="", family="pretrained", path=str(tmp_path))
    assert pretrained.Pretrained.positions(options) == longest(model, family)


@pytest.mark.parametrize("family", [*CAUSAL, "bert", "roberta", "electra", "camembert"])
def test_causal_language_models_do_not_see_later_tokens(family, tmp_path):
    small_config(family).save_pretrained(tmp_path)
    assert not pretrained.sees_later_tokens(pretrained._build(str(tmp_path), "causal_lm", 0))


def test_a_model_that_sees_later_tokens_is_refused(tmp_path):
    config = transformers.XLNetConfig(vocab_size=64, d_model=32, n_layer=2, n_head=2, d_inner=64)
    transformers.XLNetLMHeadModel(config).save_pretrained(tmp_path)
    options = pretrained.PretrainedOptions(name="", family="pretrained", path=str(tmp_path))
    told = r"XLNetLMHeadModel\) predicts a token from later ones"
    with pytest.raises(CheckpointError, match=told):
        pretrained.Pretrained.initial_state(options, None, 0)
