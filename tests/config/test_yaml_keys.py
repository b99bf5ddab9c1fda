"""YAML files document every key, and nothing else, with a comment."""

import dataclasses
import functools
import re
import subprocess
import sys
import typing

import pytest

from sparsepretrain import registry
from sparsepretrain.config import validate
from sparsepretrain.config.groups import REGISTERED, Tracker, key_of, options_of
from sparsepretrain.config.places import TABLES, catalog, shipped
from sparsepretrain.config.schema import Run
from support.tiny_runs import composed as compose

OPTIONS = [(group, option) for group, options in catalog().items() for option in options]
MODELS, METHODS = catalog()["model"], registry.names("method")


def keys(cls: type) -> dict:
    """Return the names of the fields, nested."""
    hints = typing.get_type_hints(cls)
    return {f.name: _below(hints[f.name]) for f in dataclasses.fields(cls)}


def _below(hint: object) -> dict | None:
    if dataclasses.is_dataclass(hint):
        return keys(hint)
    return {} if typing.get_origin(hint) is dict else None  # sparsity.patterns is empty


def shape(part: object) -> object:
    return {k: shape(v) for k, v in part.items()} if isinstance(part, dict) else None


@functools.cache
def models_of_tasks() -> dict[str, str]:
    return {compose(f"model={model}")["task"]["name"]: model for model in MODELS}


@pytest.mark.parametrize(("group", "option"), OPTIONS)
def test_yaml_keys_are_the_fields(group, option):
    plain = compose(f"{group}={option}")
    if group == "task":  # with a model for it, whose recipe may set keys of the task
        model = models_of_tasks().get(plain["task"]["name"], "pretrained")
        plain = compose(f"{group}={option}", f"model={model}")
    if group in ("experiment", "finetune"):
        assert set(plain) == {f.name for f in dataclasses.fields(Run)}
    elif group == "probe":  # name -> options
        part = plain[group]
        assert shape(part) == {name: keys(registry.options_of("probe", name)) for name in part}
    else:
        part = plain[group]
        options = Tracker if group == "tracker" else options_of(group, part[key_of(group)])
        assert shape(part) == keys(options)


@pytest.mark.parametrize("method", METHODS)
def test_yaml_defaults_are_the_defaults_of_the_class(method):
    options = validate(compose(f"sparsity={method}")).sparsity
    assert options == type(options)(name=method)


@pytest.mark.parametrize("group", list(REGISTERED))
def test_every_registered_name_has_a_yaml(group):
    kind, key = REGISTERED[group]
    named = {compose(f"{group}={option}")[group][key] for option in catalog()[group]}
    builtin = {n for n in registry.names(kind) if not n.startswith("mine_")}
    assert builtin == named


def test_yaml_defaults_of_probes_are_those_of_their_classes():
    probes = validate(compose("probe=all")).probe
    assert sorted(probes) == sorted(registry.built_in("probe"))
    for name, options in probes.items():
        assert options == registry.options_of("probe", name)()
        assert validate(compose(f"probe={name}")).probe == {name: options}


@pytest.mark.parametrize("model", MODELS)
def test_every_model_takes_every_method(model):
    for method in METHODS:
        sparsity = compose(f"sparsity={method}")["sparsity"]
        run = validate({**compose(f"model={model}"), "sparsity": sparsity})
        assert run.model.name == model and run.sparsity.name == method


def test_every_key_has_a_comment():
    for file in shipped().rglob("*.yaml"):
        if file.parent.name == TABLES:
            continue
        lines = file.read_text().splitlines()
        for before, line in zip(["", *lines], lines, strict=False):
            key = re.match(r"\s*(\w+):\s*[^\s#]", line)
            if key and key[1] not in {"name", "source", "family"}:  # repeat the file's name
                assert "#" in line or before.lstrip().startswith("#"), f"{file.name}: {line}"


def test_registered_classes_import_no_slow_library():
    """A configuration is checked without transformers and others that take seconds."""
    code = (
        "import sys\n"
        "from sparsepretrain import registry\n"
        "for kind in registry.PACKAGES:\n"
        "    for name in registry.names(kind):\n"
        "        assert kind == 'verb' or registry.get(kind, name).Options\n"
        "heavy = {'transformers', 'datasets', 'tokenizers', 'wandb', 'matplotlib'}\n"
        "heavy |= {'numba', 'torch._dynamo'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
