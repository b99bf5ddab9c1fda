"""Secrets of the environment stay there, files stay below the run, code runs only when named."""

import base64
import hashlib
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from sparsepretrain import registry
from sparsepretrain.cli import main
from sparsepretrain.config import load
from sparsepretrain.errors import ConfigError, SparsePretrainError

SECRETS = {
    "WANDB_API_KEY": "a11ce" * 8,
    "HF_TOKEN": "hf_planted0000000000000000000000000",
    "HUGGING_FACE_HUB_TOKEN": "hf_planted1111111111111111111111111",
    "AWS_SECRET_ACCESS_KEY": "planted/aws/secret/access/key/0000000000",
    "AWS_SESSION_TOKEN": "planted-aws-session-token",
    "GITHUB_TOKEN": "ghp_planted000000000000000000000000000",
    "OPENAI_API_KEY": "sk-planted00000000000000000000",
    "MY_DATABASE_PASSWORD": "planted-correct-horse-battery-staple",
}


def files_with(root: Path) -> list[tuple[str, str]]:
    """(file, name) of every planted value below ``root``, as text, hexadecimal or Base64."""
    found = []
    for file in (f for f in root.rglob("*") if f.is_file()):
        data = file.read_bytes()
        for name, value in SECRETS.items():
            raw = value.encode()
            if any(form in data for form in (raw, raw.hex().encode(), base64.b64encode(raw))):
                found.append((str(file.relative_to(root)), name))
    return found


def test_no_secret_reaches_a_run_its_trackers_or_its_page(tiny, capfd, monkeypatch):
    """W&B offline and TensorBoard on, a failure, a report with its page."""
    pytest.importorskip("wandb").teardown()
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("HOME", str(tiny.root / "home"))
    words = tiny.overrides("tracker.mode=offline", "tracker.tensorboard=true", "steps=2")
    assert main(["train", *words]) == 0
    assert main(["train", *words, "name=failing", "optim=sgd", "optim.lr=1e30", "steps=6"]) == 5
    (run,) = (tiny.root / "runs" / "gpt2_nano").iterdir()
    assert main(["report", str(run), "--out", str(tiny.root / "page")]) == 0
    written = list(tiny.root.rglob("*"))
    names = {file.name for file in written}
    assert {"config.yaml", "environment.json", "metrics.jsonl", "failed.json"} <= names
    assert any(name.endswith(".html") for name in names)
    assert any(name.endswith(".wandb") for name in names)
    assert any(name.startswith("events.out.tfevents") for name in names)
    assert files_with(tiny.root) == []
    out = "".join(capfd.readouterr())
    assert not [name for name, value in SECRETS.items() if value in out]


def test_a_planted_secret_would_be_found(tmp_path):
    """Negative control of the search."""
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "a.bin").write_bytes(b"\0" + SECRETS["HF_TOKEN"].encode() + b"\0")
    assert files_with(tmp_path) == [("x/a.bin", "HF_TOKEN")]


@pytest.mark.parametrize("name", ["../up", "a/b", "/tmp/x", "''", "'a\tb'", ".hidden"])
def test_a_name_is_a_directory_below_runs_dir(tiny, name):
    with pytest.raises(ConfigError, match="name must be a plain directory name"):
        tiny.load(f"name={name}")
    assert not list(tiny.root.iterdir())


@pytest.mark.parametrize("group", ["model", "experiment"])
def test_an_option_is_no_path(tiny, tmp_path, group):
    (tmp_path / "evil.yaml").write_text("name: evil\n")
    for option in (f"{tmp_path}/evil", f"../../{tmp_path.name}/evil", "../train"):
        with pytest.raises(ConfigError, match=f"{group} has no option"):
            tiny.load(f"{group}='{option}'")


def test_yaml_tags_make_no_objects(tmp_path):
    file = tmp_path / "experiment" / "tag.yaml"
    file.parent.mkdir()
    made = tmp_path / "made"
    file.write_text(f"# @package _global_\nname: !!python/object/apply:os.mkdir ['{made}']\n")
    with pytest.raises(ConfigError):
        load(["experiment=tag"], [tmp_path])
    assert not made.exists()


def test_target_is_a_key_like_any_other(tiny):
    for words in (["+_target_=os.system"], ["model._target_=os.system"], ["+optim._target_=x"]):
        with pytest.raises(ConfigError, match=r"unknown key '[\w.]*_target_'"):
            tiny.load(*words)


class Payload:
    """Makes a directory where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def seal(path: Path, file: str) -> None:
    """Write the sum of ``file`` into the manifest, as an attacker can."""
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["sha256"][file] = hashlib.sha256((path / file).read_bytes()).hexdigest()
    (path / "manifest.json").write_text(json.dumps(manifest))


def test_a_pickle_in_a_checkpoint_is_never_run(tiny, tmp_path):
    directory = tiny.train("steps=2").directory
    (path,) = (directory / "checkpoints").iterdir()
    made = tmp_path / "made"
    for file in ("config.yaml", "state.json", "shard-00000-model.safetensors"):
        content = (path / file).read_bytes()
        (path / file).write_bytes(pickle.dumps(Payload(made)))
        seal(path, file)
        with pytest.raises(SparsePretrainError) as caught:
            tiny.train("name=other", f"resume='{path}'", "steps=4")
        assert caught.value.exit_code in (2, 4) and "\n" not in str(caught.value)
        assert not made.exists()
        (path / file).write_bytes(content)
        seal(path, file)


def test_a_plug_in_is_imported_only_when_it_is_named(tmp_path, monkeypatch):
    """A file in the working directory or in a directory of configurations is not enough."""
    for place in (tmp_path, tmp_path / "configs"):
        place.mkdir(exist_ok=True)
        for name in ("my_method", "sitecustomise", "yaml_extra"):
            (place / f"{name}.py").write_text(f"open('{tmp_path}/ran', 'w').close()\n")
    words = [sys.executable, "-m", "sparsepretrain", "train", "--cfg", "job", "--config-dir"]
    code = subprocess.run([*words, "configs"], cwd=tmp_path, capture_output=True).returncode
    assert code == 0 and not (tmp_path / "ran").exists()
    main(["train", "--cfg", "job", "plugins=[my_method.py]"])
    assert (tmp_path / "ran").exists()


@pytest.fixture
def tampered(tiny, tmp_path):
    """A run whose configuration names a plugin, with sums that are right; (run, mark, plugin)."""
    directory = tiny.train("steps=2").directory
    plugin, mark = tmp_path / "planted.py", tmp_path / "ran"
    plugin.write_text(f"open({str(mark)!r}, 'w').close()\n")
    (path,) = (directory / "checkpoints").iterdir()
    for file in (directory / "config.yaml", path / "config.yaml"):
        config = yaml.safe_load(file.read_text())
        file.write_text(yaml.safe_dump(config | {"plugins": [str(plugin)]}))
    seal(path, "config.yaml")
    registry.named_plugins.clear()
    return directory, mark, plugin


@pytest.mark.parametrize(
    "words",
    [
        ("eval", "RUN"),
        ("export", "RUN"),
        ("finetune", "RUN", "task=glue/mrpc"),
        ("train", "init.path='RUN'", "sparsity=ste", "steps=2", "tracker=jsonl"),
    ],
    ids=lambda words: words[0],
)
def test_a_plugin_that_only_a_checkpoint_names_is_refused(tampered, capsys, words):
    directory, mark, plugin = tampered
    words = [word.replace("RUN", str(directory)) for word in words]
    assert main(words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "names plugins" in line and f"plugins=[{plugin}]" in line
    assert not mark.exists()
    main([*words, f"plugins=[{plugin}]"])
    assert mark.exists()
    assert "names plugins" not in capsys.readouterr().err


def test_a_plugin_that_the_user_names_replaces_that_of_a_checkpoint(tampered, tmp_path):
    directory, mark, _ = tampered
    own = tmp_path / "planted_copy.py"
    own.write_text("")
    assert main(["eval", str(directory), f"plugins=[{own}]"]) == 0
    assert not mark.exists()
