"""Precedence, group choices, directories of users and plug-ins."""

import importlib
import os
import sys
from pathlib import Path

import pytest

from sparsepretrain import registry
from sparsepretrain.config import compose, load, validate
from sparsepretrain.config.compose import build, read
from sparsepretrain.config.places import ENVIRONMENT, catalog, shipped
from sparsepretrain.errors import ConfigError

GLOBAL = "# @package _global_\n"


def write(directory: Path, **files: str) -> Path:
    """``experiment__mine="…"`` becomes ``experiment/mine.yaml``."""
    for name, text in files.items():
        file = directory / f"{name.replace('__', '/')}.yaml"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return directory


def messages(*overrides: str, dirs: tuple[Path, ...] = ()) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(overrides, dirs)
    assert all("\n" not in m for m in caught.value.messages)
    return caught.value.messages


@pytest.mark.parametrize(
    ("words", "decay", "noted"),
    [
        ("model=gpt2_350m sparsity=tsrste", 2e-4, True),
        ("sparsity=tsrste model=gpt2_1558m", 2e-4, True),
        ("model=gpt2_350m sparsity=tsrste sparsity.decay=1e-3", 1e-3, False),
        ("model=gpt2_350m experiment=half sparsity=tsrste", 2e-4, True),
        ("model=gpt2_774m sparsity=tsrste", 6e-5, False),
        ("model=gpt2_350m sparsity=srste", 2e-4, False),
        ("model=bert_geglu sparsity=tsrste", 6e-6, True),
        ("experiment=tsrste_bert sparsity.decay=0", 0, False),
        ("experiment=tsrste_deit_base", 1e-3, False),
    ],
)
def test_model_and_method_pairs_have_their_own_settings(words, decay, noted):
    request = read(words.split())
    plain, _ = build(request)
    assert plain["sparsity"]["decay"] == decay
    assert bool(request.notes) == noted
    assert all("sparsity.decay=" in note and "_tsrste.yaml" in note for note in request.notes)


@pytest.mark.parametrize(
    ("words", "micro", "noted"),
    [
        ("parallel=ddp parallel.nproc=2", 8, True),
        ("parallel=fsdp parallel.nproc=2 batch.size=24", 4, True),
        ("parallel=ddp parallel.nproc=2 batch.size=32", 16, False),
        ("parallel=ddp parallel.nproc=2 batch.micro=4", 4, False),
    ],
)
def test_processes_lower_the_micro_batch_of_a_recipe(words, micro, noted):
    request = read(words.split())
    plain, _ = build(request)
    assert plain["batch"]["micro"] == micro
    assert [note.partition(":")[0] for note in request.notes] == [f"batch.micro={micro}"] * noted


def test_user_directory_may_add_settings_of_a_pair(tmp_path):
    (tmp_path / "model_method").mkdir()
    file = tmp_path / "model_method" / "_gpt2_nano_ste.yaml"
    file.write_text("# @package _global_\nsparsity: {m: 8}\nsteps: 5\n")
    request = read(["sparsity=ste", "steps=9"], [tmp_path])
    plain, _ = build(request)
    assert (plain["sparsity"]["m"], plain["steps"], len(request.notes)) == (8, 9, 1)
    with pytest.raises(ConfigError, match="unknown key 'model_method'"):
        load(["model_method=_gpt2_nano_ste"], [tmp_path])


def test_command_line_beats_experiment_beats_recipe(tmp_path):
    base = "defaults:\n  - override /optim: sgd\n  - override /schedule: linear\n  - _self_\n"
    dirs = [write(tmp_path, experiment__mine=f"{GLOBAL}{base}steps: 90\nclip: 0.5\n")]
    plain = compose(["experiment=mine", "clip=0.25", "schedule=constant"], dirs)
    assert plain["experiment"] == "mine"
    assert plain["clip"] == 0.25, "command line beats experiment"
    assert plain["schedule"]["name"] == "constant", "… also for groups"
    assert plain["steps"] == 90, "experiment beats recipe"
    assert plain["optim"]["name"] == "sgd", "… also for groups"
    assert plain["batch"]["size"] == 16, "recipe"
    assert plain["sparsity"]["name"] == "sste", "group default"


@pytest.mark.parametrize("prefix", ["", "+", "++"])
def test_override_prefixes_have_no_effect(prefix):
    overrides = [f"{prefix}sparsity=ste", f"{prefix}seed=3", f"{prefix}sparsity.window.start=0.1"]
    plain = compose(["sparsity=dense", "seed=1", *overrides])  # the last one wins
    assert plain["sparsity"]["name"] == "ste" and plain["seed"] == 3
    assert plain["sparsity"]["window"] == {"start": 0.1, "stop": 1.0}


def test_user_directory_by_flag_and_environment(tmp_path, monkeypatch):
    a = write(tmp_path / "a", optim__fast="defaults: [adamw, _self_]\nlr: 0.5\n")
    b = write(tmp_path / "b", schedule__mine="name: constant\nwarmup: 7\n")
    monkeypatch.setenv(ENVIRONMENT, os.pathsep.join([str(b), str(a)]))
    plain = compose(["optim=fast", "schedule=mine"], [a])  # naming a twice is not a conflict
    assert plain["optim"]["lr"] == 0.5 and plain["optim"]["eps"] == 1e-8
    assert plain["schedule"]["warmup"] == 7
    assert catalog()["optim"]["fast"] == a and catalog()["optim"]["sgd"] == shipped()


@pytest.mark.parametrize("option", ["16", "a,b", "it's", "é"])
def test_names_with_special_characters_are_quoted(tmp_path, option):
    odd = tmp_path / "o'd \"d, [$x] é=1"
    write(odd, **{f"schedule__{option}": "name: constant\nwarmup: 7\n"})
    quoted = option.replace("'", "\\'")
    assert compose([f"schedule='{quoted}'"], [odd])["schedule"]["warmup"] == 7


def test_user_directory_may_add_a_group(tmp_path):
    dirs = [write(tmp_path, scale__tiny=f"{GLOBAL}steps: 3\nbatch: {{size: 2, micro: 1}}\n")]
    plain = compose(["scale=tiny", "batch.micro=2"], dirs)
    assert plain["steps"] == 3 and plain["batch"] == {"size": 2, "micro": 2}
    assert "scale" not in plain


def test_shadowing_is_an_error(tmp_path):
    a = write(tmp_path / "a", sparsity__sste="name: sste\n", train="seed: 1\n", optim__x="lr: 1\n")
    b = write(tmp_path / "b", optim__x="lr: 2\n")
    found = messages(dirs=(a, b))
    assert len(found) == 3
    assert any("sparsity/sste.yaml" in m and "rename" in m for m in found)
    assert any("train.yaml" in m for m in found)
    assert any(f"{a}'s 'optim/x'" in m for m in found)


METHOD = """
from dataclasses import dataclass
from sparsepretrain.registry import register
from sparsepretrain.sparsity import Method, MethodOptions

@dataclass(slots=True, kw_only=True)
class Options(MethodOptions):
    strength: float = 1.0

@register("method", "{name}")
class Mine(Method):
    Options = Options
"""


def test_a_plugin_without_its_yaml_file_is_told_to_give_a_directory():
    with pytest.raises(ConfigError, match=r"plugins: .* --config-dir"):
        load(["plugins=[docs/examples/my_method.py]", "sparsity=mine"])


def test_plugin_file(tmp_path):
    (tmp_path / "mine.py").write_text(METHOD.format(name="mine_file"))
    write(tmp_path / "configs", sparsity__mine_file="name: mine_file\nn: 1\nm: 8\nstrength: 2.0\n")
    overrides = [f"plugins=[{tmp_path}/mine.py]", "sparsity=mine_file"]
    run = load(overrides, [tmp_path / "configs"])
    assert run.sparsity.strength == 2.0 and run.sparsity.m == 8
    assert validate(run.plain) == run
    found = messages(*overrides, "sparsity.strenght=1", dirs=(tmp_path / "configs",))
    assert len(found) == 1 and "'sparsity.strenght' (did you mean 'sparsity.strength'" in found[0]


def test_an_edited_file_is_read_again(tmp_path):
    (tmp_path / ".#mine.yaml").symlink_to("nowhere")  # as Emacs locks a file
    for steps in (5, 7, 13):
        write(tmp_path, experiment___part=f"steps: {steps}\n")  # 5 and 7: of one size
        write(tmp_path, experiment__mine=GLOBAL + "defaults: [_part@_global_]\n")
        assert compose(["experiment=mine"], [tmp_path])["steps"] == steps
        changed = compose(["experiment=mine", "steps=2"], [tmp_path])
        changed["batch"]["size"] = 3  # nor do results share anything
        assert compose(["experiment=mine"], [tmp_path])["batch"]["size"] != 3


def test_installed_plugin_brings_its_configs(tmp_path, monkeypatch):
    package = tmp_path / "my_methods"
    write(package / "configs", sparsity__mine_installed="name: mine_installed\nstrength: 3.0\n")
    (package / "__init__.py").write_text(METHOD.format(name="mine_installed"))
    info = tmp_path / "my_methods-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-methods\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[sparsepretrain.plugins]\nmine = my_methods\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    run = load(["sparsity=mine_installed"])
    assert run.sparsity.strength == 3.0
    sys.modules.pop("my_methods")
    del registry._registered["method"]["mine_installed"]


def test_wrong_choices_and_wrong_keys_are_reported_together():
    found = messages("sparsity=sstee", "seedd=1", "sparsity.gg=1", "optim.lrr=3", "a=[1", "~seed")
    assert len(found) == 5, "keys of the refused group are not judged"
    assert sum(m.startswith("unknown key") for m in found) == 2
    found = messages("sparsity.gama=0.2", "optim.lr=ten", "schedule=cosin")
    assert [m.split()[0] for m in found] == ["schedule", "unknown", "optim.lr"]


def test_wrong_model_suppresses_errors_of_its_recipe():
    found = messages("model=gpt2_124", "schedule.warmup=3000", "data.path=x", "sedd=1")
    assert len(found) == 1 and "gpt2_124m" in found[0]
