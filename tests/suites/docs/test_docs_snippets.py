"""Run the documentation: library snippets unchanged, commands on a tiny model."""

import glob
import os
import re
import subprocess
import sys

import pytest

from sparsepretrain import cli, config, registry
from sparsepretrain.cli import eval as evaluating
from sparsepretrain.cli import train as training_verb
from sparsepretrain.cli._verb import read_settings
from sparsepretrain.cli.main import parser
from sparsepretrain.config.groups import GROUPS, REGISTERED
from sparsepretrain.errors import ConfigError
from sparsepretrain.sparsity.matmuls import fp8
from sparsepretrain.studies import multirun, tables
from sparsepretrain.training import derive
from support.doc_pages import DOCUMENTS, ROOT, blocks

# tables list commands of full runs; tests/reports renders their pages
OF_TABLES = {file for file in DOCUMENTS if (ROOT / "configs/table" / f"{file.stem}.yaml").is_file()}
SHELL = [b for f in DOCUMENTS if f not in OF_TABLES for b in blocks(f, "sh")]
HOSTS = ROOT / "docs/hosts.md"
PYTHON = [b for f in DOCUMENTS if f != HOSTS for b in blocks(f, "python")]
RUN = ("train", "eval", "prepare", "methods", "configs", "report")
"""Verbs to run; the arguments of all are checked."""
PROGRAMS = (
    "sparsepretrain",
    "make",
    "pip",
    "python",
    "lm_eval",
    "wandb",
    "register-python-argcomplete",
)
"""Programs that a shell block may call."""

RECORDER = """#!/bin/sh
{ printf '%s\\0' "${0##*/}" "$@"; echo; } >> "$RECORD"
"""


def commands(script: str, scratch) -> list[list[str]]:
    """Return the commands of a shell block as bash parses them, without running them."""
    bin, record = scratch / "bin", scratch / "record"
    bin.mkdir()
    record.touch()
    for program in PROGRAMS:
        (bin / program).write_text(RECORDER)
        (bin / program).chmod(0o755)
    environment = {"PATH": f"{bin}:{os.environ['PATH']}", "RECORD": str(record)}
    command = ["bash", "-euo", "pipefail", "-c", script]
    subprocess.run(command, check=True, env=environment, cwd=scratch)
    return [line.split("\0")[:-1] for line in record.read_text().split("\n")[:-1]]


@pytest.mark.parametrize("block", PYTHON, ids=lambda b: b.name)
def test_library_snippets_run(block, capsys):
    try:
        exec(compile(block.body, block.name, "exec"), {"__name__": "snippet"})
    finally:  # plug-ins of a snippet must not reach other tests
        for known in registry._registered.values():
            for name in [name for name, cls in known.items() if cls.__module__ == "snippet"]:
                del known[name]


def test_fragments_for_hosts_are_lines_of_their_scripts():
    scripts = [file.read_text() for file in (ROOT / "docs/examples/hosts").glob("*.py")]
    for block in blocks(HOSTS, "python"):
        assert any(block.body.rstrip("\n") in text for text in scripts), block.body
    linked = HOSTS.read_text()
    assert all(f.name in linked for f in (ROOT / "docs/examples/hosts").glob("*.py"))


@pytest.mark.parametrize("block", SHELL, ids=lambda b: b.name)
def test_commands_are_accepted(block, tmp_path):
    for program, *argv in commands(block.body, tmp_path):
        if program == "sparsepretrain":
            accept(argv)
        elif program == "make":
            assert re.search(rf"^{argv[0]}:", (ROOT / "Makefile").read_text(), re.M), argv
        elif program == "python":
            assert (ROOT / argv[0]).is_file(), argv


# the first page that a newcomer types after every change; all others in make test-slow
RUNNING = [
    b if b.name.startswith("README") else pytest.param(b, marks=pytest.mark.slow)
    for b in SHELL
    if re.search(rf"^sparsepretrain ({'|'.join(RUN)})\b", b.body, re.M)
]


@pytest.mark.parametrize("block", RUNNING, ids=lambda b: b.name)
def test_commands_run(block, tiny, tmp_path, monkeypatch, capsys):
    # takes seconds; tested elsewhere
    monkeypatch.setattr(training_verb, "illustrate", lambda directory: None)
    monkeypatch.setattr(fp8, "no_fp8_matmuls", lambda device: "")  # torch emulates them
    typed = commands(block.body, tmp_path)
    # the runs of `train -m` take minutes; tests/studies trains and reports small ones
    several = {
        w.partition("=")[2] for words in typed if "-m" in words for w in words if "name=" in w
    }
    for program, *argv in typed:
        is_of_several = several & {*argv[-1].split("/")}
        if program == "sparsepretrain" and argv[0] in RUN and not is_of_several:
            run(argv, tiny)


def accept(argv: list[str]) -> None:
    """Check the arguments of a command as written."""
    verb, *words = argv
    arguments = parser(verb).read(words)
    if verb == "prepare":
        plain = config.compose(arguments.overrides, arguments.config_dir)
        config.validate(plain, {*GROUPS, *REGISTERED} - {"data"})
    elif verb == "eval":
        overrides: list[str] = []
        read_settings(evaluating.Settings, arguments.overrides, others=overrides)
        config.load(overrides, arguments.config_dir)
    elif verb == "prune":
        overrides = []
        options = registry.get("pruning", arguments.method).Options
        read_settings(options, arguments.overrides, others=overrides)
        config.load(["model=pretrained", "model.path=x", *overrides], arguments.config_dir)
    elif verb == "finetune":
        recipe = derive.with_recipe(arguments.overrides, arguments.config_dir)
        config.load([*recipe, "model=pretrained", "model.path=x"], arguments.config_dir)
    elif verb == "train" and arguments.multirun:
        found = multirun.read_command(arguments.overrides, arguments.config_dir)
        assert found.part is None or found.part.cells
    elif hasattr(arguments, "overrides"):
        overrides = [word for word in arguments.overrides if not word.startswith("match=")]
        if verb == "reproduce" and not arguments.list:
            assert tables.load_table(arguments.table).match or overrides == arguments.overrides
        config.load(overrides, arguments.config_dir)
    elif verb == "report" and not any("/" in word for word in words):
        tables.load_table(words[0])


def run(argv: list[str], tiny) -> None:
    """Run a command on a tiny model; no training of minutes, and no page of such runs."""
    verb, *words = argv
    arguments = parser(verb).read(words)
    if verb == "train" and arguments.multirun:
        return
    if verb == "report" and not any("/" in word for word in words):
        return
    if verb == "report":
        argv = [found for word in argv for found in glob.glob(word) or [word]]
    elif verb == "eval":
        argv = [verb, glob.glob(arguments.checkpoint.replace("HASH", "*"))[0], *words[1:]]
    elif any(word.startswith("experiment=nano_") and "vision" not in word for word in words):
        argv = [*argv, "--dry-run"]
    elif verb in ("train", "prepare") and not {"--dry-run", "--cfg"} & set(words):
        given = any(word.startswith("precision=") for word in words)
        small = tiny.overrides("steps=4", *[] if given else ["precision=fp32"])
        if any(word.endswith("nano_vision") for word in words):  # small already, and not a GPT-2
            keys = ("model.", "task.", "data=", "data.")
            small = [word for word in small if not word.startswith(keys)]
        argv = [*argv, *small]
    assert cli.main(argv) == 0, argv


@pytest.mark.slow
def test_the_whole_way_of_retraining_can_be_typed(tmp_path, monkeypatch, capsys):
    """Every command of the second block, with fewer steps: train, prune, audit, …, generate."""
    monkeypatch.setenv("SPARSEPRETRAIN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(training_verb, "illustrate", lambda directory: None)
    _, block, *_ = blocks(ROOT / "docs/retraining.md", "text")
    (tmp_path / "shell").mkdir()
    typed = commands(block.body, tmp_path / "shell")
    verbs = [argv[1] for argv in typed]
    assert verbs == ["train", "prune", "audit", "finetune", "export", "audit", "-c"]
    monkeypatch.chdir(tmp_path)
    for program, *words in typed:
        argv = []
        for word in words:
            if "HASH" in word:
                key, equals, path = word.rpartition("=")  # teacher.path=runs/dense/HASH-s0
                word = key + equals + glob.glob(path.replace("HASH", "*"))[0]
            argv.append(word)
        if program == "python":
            done = subprocess.run([sys.executable, *argv], capture_output=True, text=True)
            assert done.returncode == 0 and "def main(" in done.stdout, done.stderr
            continue
        if argv[0] in ("train", "finetune"):
            argv += ["steps=8", "eval.batches=1", "tracker=jsonl"]
        assert cli.main(argv) == 0, (argv, capsys.readouterr())


def test_a_shell_block_is_read_as_bash_reads_it(tmp_path):
    script = "sparsepretrain train a=1 \\\n  'b=[\"*.c\"]' # comment\nmake train\n"
    train, make = commands(script, tmp_path)
    assert train == ["sparsepretrain", "train", "a=1", 'b=["*.c"]'] and make == ["make", "train"]


def test_a_wrong_key_in_a_command_is_found():
    with pytest.raises(ConfigError, match="gama"):
        accept(["train", "sparsity=sste", "sparsity.gama=0.2"])
