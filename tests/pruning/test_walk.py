"""The walk over blocks against full forwards of the model, in every family of language models."""

import pytest
import torch
import transformers

from sparsepretrain import registry
from sparsepretrain.errors import ConfigError
from sparsepretrain.kernels import nm_mask
from sparsepretrain.pruning.layers import BLOCK, linear_layers, matrix_of
from sparsepretrain.pruning.walk import Calibration, prune_model
from support.families import CAUSAL, MOE, small_config

NO_FP64 = (*MOE, "xglm")
"""Families that transformers cannot run in fp64."""


def model_of(family):
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(small_config(family)).eval()
    return model.float() if family in NO_FP64 else model.double()


def calibration_of(model, sequences=6):
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(3, 60, (sequences, 12), generator=generator)
    return Calibration(lambda x: model(input_ids=x, use_cache=False), list(tokens.split(4)))


def layers_of(model):
    return [name for name in linear_layers(model) if BLOCK.match(name)]


def rule(method, n=2, m=4, **options):
    cls = registry.get("pruning", method)
    return cls(cls.Options(**options), n, m)


def prune(model, method, layers=None, **options):
    """Return all masks; the model is pruned in place."""
    layers = layers_of(model) if layers is None else layers
    masks = {}
    for stage in prune_model(model, layers, method, calibration_of(model), **options):
        masks |= stage.masks
    return masks


@torch.no_grad()
def wanda_by_full_forwards(model):
    """Masks of Wanda where the whole model runs again for each block."""
    masks = {}
    layers = layers_of(model)
    modules = linear_layers(model)
    for block in dict.fromkeys(BLOCK.match(name)[0] for name in layers):
        inside = {name: modules[name] for name in layers if name.startswith(f"{block}.")}
        squares = {name: torch.zeros(1) for name in inside}
        hooks = []
        for name, layer in inside.items():

            def note(module, args, name=name, squares=squares):
                rows = args[0].flatten(0, -2)
                squares[name] = squares[name] + rows.square().sum(0, dtype=torch.float64)

            hooks.append(layer.register_forward_pre_hook(note))
        for tokens in calibration_of(model).batches:
            model(input_ids=tokens)
        for hook in hooks:
            hook.remove()
        for name, layer in inside.items():
            matrix = matrix_of(layer)
            masks[name] = nm_mask(matrix.abs() * squares[name].sqrt(), 2, 4)
            matrix.mul_(masks[name])
    return masks


@pytest.mark.parametrize("family", CAUSAL)
def test_blocks_see_the_inputs_that_full_forwards_of_the_pruned_model_give(family):
    model = model_of(family)
    masks = prune(model, rule("wanda"))
    expected = wanda_by_full_forwards(model_of(family))
    assert masks.keys() == expected.keys() and len(masks) >= 4
    assert all(torch.equal(masks[name], expected[name]) for name in masks)
    for name, layer in linear_layers(model).items():
        if name in masks:
            assert torch.equal(matrix_of(layer) != 0, masks[name])


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("method", registry.names("pruning"))
def test_restored_models_are_unchanged(family, method):
    model = model_of(family)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    masks = prune(model, rule(method), restore=True)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert masks.keys() == set(layers_of(model))


@pytest.mark.parametrize("method", registry.names("pruning"))
def test_stored_values_are_those_that_later_blocks_saw(method):
    """bf16 checkpoints: weights are rounded before the next block is calibrated."""
    model = model_of("llama").float()
    dtypes = {f"{name}.weight": torch.bfloat16 for name in layers_of(model)}
    for stage in prune_model(
        model, layers_of(model), rule(method), calibration_of(model), dtypes=dtypes
    ):
        for name, value in stage.tensors.items():
            assert value.dtype == torch.bfloat16
            assert torch.equal(model.get_parameter(name), value.float())


class Notes:
    """Journal in memory that forgets all stages but the first few."""

    def __init__(self, kept=()):
        self.kept = {stage.name: stage for stage in kept}
        self.saved = []

    def load(self, name):
        return self.kept.get(name)

    def save(self, stage):
        self.saved.append(stage)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("method", registry.names("pruning"))
def test_a_resumed_walk_gives_the_same_bytes(family, method):
    whole = Notes()
    first = model_of(family)
    prune(first, rule(method), journal=whole)
    kept = whole.saved[: len(whole.saved) // 2]
    rest = Notes(kept)
    second = model_of(family)
    prune(second, rule(method), journal=rest)
    assert [s.name for s in kept + rest.saved] == [s.name for s in whole.saved]
    for name, value in first.state_dict().items():
        assert torch.equal(value, second.state_dict()[name]), name


def test_ria_permutes_where_it_folds_and_says_where():
    model = model_of("llama")
    plain = model_of("llama")
    facts = {}
    for stage in prune_model(model, layers_of(model), rule("ria"), calibration_of(model)):
        facts |= stage.facts["permuted"]
    assert {name.rpartition(".")[2] for name in facts} == {"o_proj", "down_proj"}
    prune(plain, rule("ria", permute=False))
    key = "model.layers.0.mlp.up_proj.weight"
    changed, same = model.state_dict()[key], plain.state_dict()[key]
    assert not torch.equal(changed, same)
    assert torch.equal(changed.sum(1).sort().values, same.sum(1).sort().values)  # rows moved


def test_layers_without_tokens_are_pruned_by_magnitude():
    """As an expert that no token chose."""
    model = model_of("llama")
    block = model.model.layers[0]
    block.unused = torch.nn.Linear(16, 16).double()
    name = "model.layers.0.unused"
    for method in ("wanda", "ria", "sparsegpt"):
        weight = block.unused.weight.clone()
        (stage,) = prune_model(model, [name], rule(method), calibration_of(model), restore=True)
        assert torch.equal(stage.masks[name], nm_mask(weight, 2, 4))
        assert "magnitude" in stage.facts["layers"][name]["remark"]


class Residual(torch.nn.Module):
    """Model that adds the embedding before every block."""

    def __init__(self, twice=False):
        super().__init__()
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(2))
        for i, block in enumerate(self.blocks):
            self.blocks[i] = torch.nn.Sequential(block)
        self.twice = twice

    def forward(self, tokens):
        x = first = torch.nn.functional.one_hot(tokens, 8).float()
        for block in (*self.blocks, *(self.blocks if self.twice else ())):
            x = block(x) if self.twice else block(x) + first
        return x


@pytest.mark.parametrize("twice", [False, True])
def test_models_whose_blocks_are_no_chain_are_refused(twice):
    model = Residual(twice)
    batches = [torch.zeros(1, 3, dtype=torch.int64)]
    with pytest.raises(ConfigError, match="magnitude"):
        [
            *prune_model(
                model, ["blocks.0.0", "blocks.1.0"], rule("wanda"), Calibration(model, batches)
            )
        ]
    assert len([*prune_model(model, ["blocks.0.0", "blocks.1.0"], rule("magnitude"))]) == 2


class Further(torch.nn.Module):
    """Blocks that pass a second result to the next one, or that no text reaches."""

    def __init__(self, kind):
        super().__init__()
        self.blocks = torch.nn.ModuleList(Block() for _ in range(3))
        self.kind = kind

    def forward(self, tokens):
        x, further = torch.nn.functional.one_hot(tokens, 8).float(), None
        for block in self.blocks[:2] if self.kind == "idle" else self.blocks:
            x, further = block(x, further if self.kind == "further" else None)
        return x


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(8, 8)

    def forward(self, x, further=None):
        y = self.inner(x) + (0 if further is None else further)
        return y, y.sin()


NAMES = [f"blocks.{i}.inner" for i in range(3)]


@pytest.mark.parametrize("kind, text", [("further", "further results"), ("idle", "no text")])
def test_results_besides_hidden_states_and_idle_blocks_are_refused(kind, text):
    calibration = Calibration(Further(kind), [torch.zeros(1, 3, dtype=torch.int64)])
    with pytest.raises(ConfigError, match=text):
        [*prune_model(calibration.forward, NAMES, rule("wanda"), calibration)]


def test_blocks_without_chosen_layers_are_passed_through():
    """As --layers '!*.1.*': hidden states go through the dense block between."""
    torch.manual_seed(0)
    model = Further("plain")
    batches = [torch.randint(8, (2, 3)) for _ in range(3)]
    chosen = [NAMES[0], NAMES[2]]
    with torch.no_grad():
        stages = [*prune_model(model, chosen, rule("wanda"), Calibration(model, batches))]
        assert [stage.name for stage in stages] == ["blocks.0", "blocks.2"]
        seen = []
        layer = model.get_submodule(NAMES[2])
        layer.register_forward_pre_hook(lambda module, args: seen.append(args[0].flatten(0, -2)))
        mask = stages[1].masks[NAMES[2]]
        for tokens in batches:
            model(tokens)
    norms = torch.cat(seen).double().norm(dim=0)
    torch.manual_seed(0)
    weight = Further("plain").get_submodule(NAMES[2]).weight.detach()
    assert torch.equal(mask, nm_mask(weight.abs() * norms, 2, 4))


@pytest.mark.parametrize(
    "names, m, key",
    [
        (["lm_head"], 4, "lm_head"),
        (["model.embed_tokens"], 4, "model.embed_tokens"),
        (["model.layers.0.mlp.up_proj"], 5, "in_features 32"),
        (["model.layers.0"], 4, "model.layers.0"),
    ],
)
def test_layers_that_cannot_be_pruned_are_named(names, m, key):
    model = model_of("llama")
    with pytest.raises(ConfigError, match=key):
        [*prune_model(model, names, rule("wanda", 1, m), calibration_of(model))]
