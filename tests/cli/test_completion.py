"""Completion candidates, and the scripts of the shells."""

import shutil
import subprocess
import sys

import pytest

from sparsepretrain import cli, registry

VERBS = registry.built_in("verb")


def complete(capsys, *words: str) -> list[str]:
    assert cli.main(["__complete", *words]) == 0
    return capsys.readouterr().out.splitlines()


def test_verbs_are_completed(capsys):
    assert complete(capsys, "t") == ["train"]
    assert {*VERBS} < set(complete(capsys, ""))
    assert complete(capsys, "nonsense", "") == []


def test_groups_options_and_keys_are_completed(capsys):
    assert complete(capsys, "train", "sparsity=ss") == ["sparsity=sste"]
    assert {"sparsity=srste", "sparsity=ste"} < {*complete(capsys, "train", "sparsity=s")}
    found = complete(capsys, "train", "s")
    assert {"sparsity=", "sparsity.gamma=", "sparsity.window.start=", "steps=", "seed="} < {*found}


def test_keys_follow_the_chosen_options(tmp_path, capsys):
    found = complete(capsys, "train", "sparsity=srste", "--dry-run", "sparsity.d")
    assert sorted(found) == ["sparsity.decay=", "sparsity.decay_on=", "sparsity.decay_ramp="]
    assert "sparsity.gamma=" in complete(capsys, "train", "sparsity=nonsense", "sparsity.")
    assert "sparsity.dense_tail=" in complete(capsys, "train", "sparsity=tsrste", "sparsity.d")
    (tmp_path / "sparsity").mkdir()
    (tmp_path / "sparsity/mine.yaml").write_text("name: mine\n")
    words = ["train", "--config-dir", str(tmp_path), "sparsity=mi"]
    assert complete(capsys, *words) == ["sparsity=mine"]


def test_flags_and_arguments_are_completed(capsys):
    assert complete(capsys, "train", "--c") == ["--config-dir", "--cfg"]
    assert complete(capsys, "completion", "") == ["--help", "bash", "zsh", "fish"]
    assert complete(capsys, "eval", "run", "weights=") == ["weights=sparse", "weights=dense"]
    assert complete(capsys, "report", "r") == []
    assert complete(capsys, "reproduce", "match", "--scale", "pape") == ["paper"]
    assert complete(capsys, "export", "run", "--merge") == ["--merge-adapters"]


def test_values_are_completed(capsys):
    assert complete(capsys, "train", "guard=") == ["guard=stop", "guard=skip", "guard=spike"]
    assert complete(capsys, "train", "compile=t") == ["compile=true"]
    found = complete(capsys, "train", "sparsity=tsrste", "sparsity.mvue=")
    assert found == ["sparsity.mvue=gradient", "sparsity.mvue=none"]
    found = complete(capsys, "train", "precision=fp8_sim", "precision.recipe=r")
    assert found == ["precision.recipe=reference"]
    assert complete(capsys, "train", "steps=") == complete(capsys, "train", "no.such=") == []
    tasks = complete(capsys, "finetune", "runs/x", "task=")
    assert {"task=squad", "task=wikitext2", "task=glue/sst2", "task=causal_lm"} <= {*tasks}


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_scripts_parse(shell, capsys, tmp_path):
    assert cli.main(["completion", shell]) == 0
    script = tmp_path / "script"
    script.write_text(capsys.readouterr().out)
    assert "__complete" in script.read_text()
    if shutil.which(shell):
        assert subprocess.run([shell, "-n", str(script)], check=False).returncode == 0


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("sparsepretrain train sparsity=ss", "sste "),
        ("sparsepretrain train sparsity.gam", "sparsity.gamma="),
    ],
)
def test_bash_completes(line, expected, capsys):
    assert cli.main(["completion", "bash"]) == 0
    script = capsys.readouterr().out
    script += f'sparsepretrain() {{ "{sys.executable}" -m sparsepretrain "$@"; }}\n'
    script += f"COMP_LINE='{line}' COMP_POINT={len(line)}; _sparsepretrain\n"
    script += "printf '%s|' \"${COMPREPLY[@]}\"\n"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == f"{expected}|"
