"""Completion, through the protocol in which shells ask argcomplete and through the shells."""

import argparse
import dataclasses
import os
import resource
import shutil
import subprocess
import sys
import types
import typing
from pathlib import Path

import pytest

import sparsepretrain
from sparsepretrain import registry
from sparsepretrain.cli._completion import candidates
from sparsepretrain.cli._keys import Merge, Values, declared_values, values_of
from sparsepretrain.cli.main import parser
from sparsepretrain.config import compose
from sparsepretrain.config.freeze import flat
from sparsepretrain.config.groups import GROUPS, REGISTERED
from sparsepretrain.config.places import catalog, search_path
from sparsepretrain.config.schema import Run
from sparsepretrain.studies import tables

argcomplete = pytest.importorskip("argcomplete")
VERBS = sorted(registry.built_in("verb"))
CATALOG = catalog()
WORD_BREAKS = " \t\n\"'><=;|&(:"
"""COMP_WORDBREAKS of bash."""


def complete(line: str) -> list[str]:
    """Return the candidates for the end of a line without quotes, as whole words."""
    *words, prefix = line.split(" ")
    return [*candidates(words[1:], prefix, parser)]


@pytest.fixture
def command(tmp_path):
    """Return the command as the first in PATH, with modules that note if they are imported."""
    (tmp_path / "bin").mkdir()
    script = tmp_path / "bin" / "sparsepretrain"
    run = "import sys\nfrom sparsepretrain.cli import main\nsys.exit(main())\n"
    # as pip writes it below a path with spaces, which a line "#!PYTHON" cannot name
    script.write_text(f"#!/bin/sh\n'''exec' \"{sys.executable}\" \"$0\" \"$@\"\n' '''\n{run}")
    script.chmod(0o755)
    for name in ("torch", "hydra"):
        (tmp_path / "stubs" / name).mkdir(parents=True)
        note = f"import pathlib\npathlib.Path({str(tmp_path)!r}, 'imported').touch()\n"
        (tmp_path / "stubs" / name / "__init__.py").write_text(note)
    return script


@pytest.fixture
def environment(command, tmp_path):
    root = Path(sparsepretrain.__file__).parents[1]
    path = [str(tmp_path / "stubs"), str(root), os.environ.get("PYTHONPATH", "")]
    bins = [str(command.parent), str(Path(sys.executable).parent), os.environ["PATH"]]
    return os.environ | {"PYTHONPATH": os.pathsep.join(path), "PATH": os.pathsep.join(bins)}


@pytest.fixture
def ask(command, environment, tmp_path):
    """Return a function that asks the command as the code of a shell does."""

    def ask(line: str, shell: str = "bash", **more: str) -> list[str]:
        asked = {"COMP_LINE": line, "COMP_POINT": str(len(line)), "_ARGCOMPLETE": "1"}
        asked |= {"_ARGCOMPLETE_SHELL": shell, "_ARGCOMPLETE_IFS": "\v"}
        asked |= {"_ARGCOMPLETE_SUPPRESS_SPACE": "1"}
        if shell == "bash":
            asked["_ARGCOMPLETE_COMP_WORDBREAKS"] = WORD_BREAKS
        answer = tmp_path / "answer"
        asked["_ARGCOMPLETE_STDOUT_FILENAME"] = str(answer)
        done = subprocess.run(
            [command], env=environment | asked | more, capture_output=True, text=True
        )
        assert (done.stdout, done.stderr) == ("", ""), done
        assert not (tmp_path / "imported").exists(), "torch or Hydra was imported"
        text = answer.read_text() if answer.exists() else ""
        return text.split("\v") if text else []

    return ask


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_shells_are_answered(ask, shell, tmp_path):
    def words(line: str) -> list[str]:
        # zsh shows a description after a colon; bash wants what follows its last word break
        return [word.partition(":")[0] for word in ask(line, shell)]

    def values(line: str) -> list[str]:
        return [word.rpartition("=")[2] for word in words(line)]

    assert set(VERBS) | {"--help", "--version"} == set(words("sparsepretrain "))
    assert words("sparsepretrain re") == ["report", "reproduce"]
    assert "--dry-run" in words("sparsepretrain train --")
    assert words("sparsepretrain train sparsity") == ["sparsity=", "sparsity."]
    assert values("sparsepretrain train sparsity=sst") == ["sste"]
    assert words("sparsepretrain train sparsity=sste sparsity.ga") == ["sparsity.gamma="]
    assert values("sparsepretrain train sparsity.mvue=g") == ["gradient"]
    assert words("sparsepretrain train --dry-run seed=1 'sparsity.ga") == ["sparsity.gamma="]
    assert values("sparsepretrain train --dry-run 'sparsity.mvue=g")[-1].endswith("gradient")
    assert words('sparsepretrain train "batch.s') == ["batch.size="]
    (tmp_path / "my runs" / "a").mkdir(parents=True)
    assert words("sparsepretrain eval my") == ["my\\ runs/"]
    assert words("sparsepretrain eval my\\ runs/") == ["my\\ runs/a/"]
    assert words("sparsepretrain eval 'my runs/") == ["my runs/a/"]
    assert words("sparsepretrain nothing ") == words("sparsepretrain doctor x") == []


def test_words_with_colons_are_completed(ask, tmp_path):
    (tmp_path / "a:b" / "c").mkdir(parents=True)
    assert ask("sparsepretrain report a:") == ["b/"]
    assert ask("sparsepretrain report a:", "zsh") == ["a\\:b/:"]
    (tmp_path / "my" / "sparsity").mkdir(parents=True)
    text = "name: ste\n'one:two': 1\nblock: {'three:four': {five: 5}}\n"
    (tmp_path / "my" / "sparsity" / "x:y.yaml").write_text(text)
    line = "sparsepretrain train --config-dir my sparsity=x:"
    assert ask(line) == ["y"]
    assert ask(f"{line}y sparsity.on") == ["sparsity.one:two="]
    assert ask(f"{line}y sparsity.block.t") == ["sparsity.block.three:four.five="]


def test_a_broken_configuration_is_silent(ask, tmp_path):
    (tmp_path / "my" / "sparsity").mkdir(parents=True)
    (tmp_path / "my" / "sparsity" / "broken.yaml").write_text("name: [\n")
    line = "sparsepretrain train --config-dir my sparsity="
    assert ask(f"{line}brok") == ["broken"]
    assert ask(f"{line}broken sparsity.") == []
    assert ask("sparsepretrain train --config-dir nowhere sparsity=") == []
    assert ask("sparsepretrain train 'model=\"gpt2 sparsity=") == []
    (tmp_path / "my" / "sparsity" / "broken.yaml").write_text("defaults: [broken]\n")
    assert ask(f"{line}broken sparsity.") == []


def test_nothing_runs_without_argcomplete(command, environment, tmp_path):
    (tmp_path / "stubs" / "argcomplete.py").write_text("raise ImportError('no')\n")
    asked = {"COMP_LINE": "sparsepretrain train ", "COMP_POINT": "21", "_ARGCOMPLETE": "1"}
    done = subprocess.run([command], env=environment | asked, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "")


def test_every_answer_takes_less_than_a_second(ask):
    def used() -> float:  # of a processor: other tests share the machine
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        return usage.ru_utime + usage.ru_stime

    for line in ("sparsepretrain ", "sparsepretrain train experiment=glue_bert sparsity."):
        before = used()
        assert ask(line)
        assert used() - before < 1, line


BASH = """
eval "$(register-python-argcomplete sparsepretrain)"
complete -p sparsepretrain | grep -q _python_argcomplete || exit 1
COMP_LINE=$1 COMP_POINT=${#1}
_python_argcomplete sparsepretrain
printf '%s\\n' "${COMPREPLY[@]}"
"""
ZSH = """
compdef() { : }
_describe() { print -rl -- "${(P)2[@]}" }
BUFFER=$1 CURSOR=${#1}
eval "$(register-python-argcomplete sparsepretrain)"
words=(sparsepretrain)
_python_argcomplete
"""


@pytest.mark.parametrize(("shell", "script"), [("bash", BASH), ("zsh", ZSH)])
def test_the_line_of_the_documentation_works_in_a_shell(shell, script, environment):
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    no_files = {"bash": ["--norc"], "zsh": ["-f"]}[shell]
    for line, expected in {
        "sparsepretrain tr": ["train"],
        "sparsepretrain train sparsity=sste sparsity.est": ["sparsity.estimator="],
        "sparsepretrain report x/y": [],
    }.items():
        done = subprocess.run(
            [shell, *no_files, "-c", script, shell, line],
            env=environment,
            capture_output=True,
            text=True,
        )
        found = [word.split(":")[0].strip() for word in done.stdout.splitlines() if word.strip()]
        assert found == expected, done


def test_global_completion_finds_its_marker():
    """``activate-global-python-argcomplete`` looks for it in the module of the entry point."""
    package = Path(sparsepretrain.__file__).parent
    for file in (package / "cli" / "__init__.py", package / "__main__.py"):
        assert "PYTHON_ARGCOMPLETE_OK" in file.read_text()[:1024]


@pytest.mark.parametrize("verb", VERBS)
def test_all_flags_of_a_verb_are_completed(verb):
    for action in parser(verb)._actions:
        long = [flag for flag in action.option_strings if flag.startswith("--")]
        assert {*long} <= {*complete(f"sparsepretrain {verb} -")}
        assert all(complete(f"sparsepretrain {verb} {flag}")[0] == flag for flag in long)
        for choice in (action.choices or ()) if long else ():
            assert choice in complete(f"sparsepretrain {verb} {long[0]} ")
            assert f"{long[0]}={choice}" in complete(f"sparsepretrain {verb} {long[0]}=")


def test_every_argument_has_a_kind(tmp_path):
    """A verb with an argument under a new name in ``--help`` has to say what completes it."""
    (tmp_path / "a_directory").mkdir()
    free = {"N", "N:M", "GLOB", "SEEDS", "NAME"}  # numbers, patterns and new names
    first = {"KEY=VALUE": "seed=", "GROUP=OPTION": "sparsity=", "TABLE": "sste_table1"}
    first |= {"RUN|TABLE": "a_directory/", "CHECKPOINT": "a_directory/", "RUN": "a_directory/"}
    for verb in VERBS:
        before = ""
        for action in parser(verb)._actions:
            name = action.metavar
            if not action.option_strings:
                expected = "average=" if (verb, name) == ("export", "KEY=VALUE") else first[name]
                assert expected in complete(f"sparsepretrain {verb} {before}"), (verb, name)
                before += "x "
            elif action.nargs is None and action.choices is None and name not in free | {None}:
                flag = action.option_strings[-1]
                expected = "wanda" if name == "METHOD" else "a_directory/"
                assert expected in complete(f"sparsepretrain {verb} {flag} "), (verb, flag)


CONFIGURED = [verb for verb in VERBS if "KEY=VALUE" in parser(verb).format_help()]


@pytest.mark.parametrize("group", CATALOG)
def test_all_options_of_a_group_are_completed(group):
    assert f"{group}=" in complete(f"sparsepretrain train {group[:3]}")
    assert f"{group}=" in complete(f"sparsepretrain configs {group[:3]}")
    wanted = [f"{group}={option}" for option in CATALOG[group]]
    for start in (
        "train ",
        "train --dry-run seed=1 ",
        "eval x ",
        "configs ",
        "train --config-dir . ",
    ):
        assert complete(f"sparsepretrain {start}{group}=") == wanted
    for sign in ("+", "++", "~"):
        assert complete(f"sparsepretrain train {sign}{group}=") == [sign + word for word in wanted]


def test_all_tables_are_completed():
    assert {*tables.names()} <= {*complete("sparsepretrain reproduce ")}
    assert {*tables.names()} <= {*complete("sparsepretrain report ")}
    assert "sparsity=" in complete("sparsepretrain report sste_table1 sp")
    assert complete("sparsepretrain reproduce sste_table12 optim.lr") == ["optim.lr="]


CHOICES = [
    *(
        {group: option}
        for group in ("model", "experiment", "finetune")
        for option in CATALOG[group]
    ),
    *(
        {group: options[i] for group, options in others.items() if i < len(options)}
        for others in [
            {g: [*CATALOG[g]] for g in CATALOG if g not in ("model", "experiment", "finetune")}
        ]
        for i in range(max(map(len, others.values())))
    ),
    {"experiment": "glue_bert", "model": "gpt2_nano", "sparsity": "srste"},
]


# Hydra takes 0.4 s for each: a tenth of them for every change
@pytest.mark.parametrize(
    "part", [CHOICES[::10], pytest.param(CHOICES, marks=pytest.mark.slow)], ids=["some", "all"]
)
def test_keys_are_those_of_the_composed_configuration(part):
    for choices in part:
        composed = compose([f"{group}='{option}'" for group, option in choices.items()])
        plain = Merge(search_path(), choices).run()
        expected = {key: value for key, value in flat(composed).items() if key != "experiment"}
        keys = {key for key in flat(plain) if key != "experiment"}
        assert keys == {*expected}, choices
        for group, (_, name) in REGISTERED.items():
            assert plain[group][name] == composed[group][name], choices


def typed(hint: object) -> Values:
    """Return the values of a type, as the running code knows it."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        return typed(args[0])
    if origin is typing.Literal:
        return Values(tuple(map(str, args)))
    if hint is bool:
        return Values(("true", "false"))
    if hint is type(None):
        return Values(("null",))
    if origin in (list, tuple):
        return Values(typed(args[0]).listed, True)
    if origin in (types.UnionType, typing.Union):
        parts = [typed(arg) for arg in args]
        listed = tuple(word for part in parts for word in part.listed)
        several = any(part.is_list for part in parts)
        return Values(listed if {*listed} - {"null"} else (), several)
    return Values()


def fields_of(cls: type, before: tuple[str, ...] = ()) -> typing.Iterator[tuple[list[str], Values]]:
    for name, hint in typing.get_type_hints(cls, include_extras=True).items():
        if name not in {field.name for field in dataclasses.fields(cls)}:
            continue
        if isinstance(hint, type) and dataclasses.is_dataclass(hint):
            yield from fields_of(hint, (*before, name))
        else:
            yield [*before, name], typed(hint)


def test_values_are_those_of_the_types_of_all_options():
    listed = 0
    for path, expected in fields_of(Run):
        assert declared_values(Run, path) == expected, path
    for group in {**REGISTERED, **GROUPS}:
        kind, key = REGISTERED.get(group, ("", "name"))
        for name in registry.built_in(kind) if kind else GROUPS[group]:
            cls = registry.options_of(kind, name) if kind else GROUPS[group][name]
            for path, expected in fields_of(cls):
                found = values_of(".".join([group, *path]), {group: {key: name}})
                assert found == expected, (group, name, path)
                listed += bool(found.listed)
    for name in registry.built_in("probe"):
        for path, expected in fields_of(registry.options_of("probe", name)):
            key = ".".join(["probe", name, *path])
            assert values_of(key, {"probe": {name: {}}}) == expected, key
    assert listed > 80


def test_values_of_lists_and_of_several_runs_continue_after_a_comma():
    train = "sparsepretrain train"
    classes = f"{train} task=sequence_classification task.metrics="
    assert complete(classes)[0] == "task.metrics=[accuracy"
    assert complete(f"{classes}[accuracy,f") == ["task.metrics=[accuracy,f1"]
    assert complete(f"{train} guard=stop,sk") == [], "one run takes one value"
    assert complete(f"{train} --multirun guard=stop,sk") == ["guard=stop,skip"]
    assert complete(f"{train} -m seed=0,1 sparsity=ste,sst") == ["sparsity=ste,sste"]
    assert complete(f"{train} ema=") == complete(f"{train} seed=") == []
    assert complete(f"{train} guard='sk") == ["guard='skip"]


def test_values_that_are_paths_are_completed(tmp_path):
    (tmp_path / "runs" / "x").mkdir(parents=True)
    (tmp_path / "text.txt").touch()
    (tmp_path / "more.py").touch()
    (tmp_path / ".hidden").mkdir()
    train = "sparsepretrain train"
    assert complete(f"{train} resume=r") == ["resume=runs/"]
    assert complete(f"{train} resume=") == ["resume=auto", "resume=never", "resume=runs/"]
    assert complete(f"{train} init.path=runs/") == ["init.path=runs/x/"]
    assert complete(f"{train} data=text_files data.files=[t") == ["data.files=[text.txt"]
    assert complete(f"{train} data=text_files data.files=['a.txt','t") == [
        "data.files=['a.txt','text.txt"
    ]
    assert complete(f"{train} plugins=[m") == ["plugins=[more.py"]
    assert complete("sparsepretrain eval runs/x out=t") == ["out=text.txt"]
    assert complete("sparsepretrain eval ") == ["runs/"], "no flags among paths"
    assert complete("sparsepretrain eval .") == [".hidden/"]
    assert complete("sparsepretrain eval nowhere/x") == []
    assert complete("sparsepretrain report runs/x ") == ["runs/"]
    home = str(tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", home)
        assert complete("sparsepretrain eval ~/r") == ["~/runs/"]


def test_own_keys_of_verbs_are_completed(tmp_path):
    assert "split=" in complete("sparsepretrain eval x ")
    assert complete("sparsepretrain eval x split=t") == ["split=test"]
    assert complete("sparsepretrain export x a") == ["average="]
    assert complete("sparsepretrain export x seed") == []


def test_a_plug_in_is_not_imported(tmp_path):
    (tmp_path / "mine.py").write_text("raise SystemExit('imported')\n")
    (tmp_path / "my" / "sparsity").mkdir(parents=True)
    (tmp_path / "my" / "sparsity" / "mine.yaml").write_text("name: mine\nfast: true\nrate: 1\n")
    line = f"sparsepretrain train plugins=[{tmp_path}/mine.py] --config-dir my sparsity=mine"
    assert complete(f"{line} sparsity.") == ["sparsity.name=", "sparsity.fast=", "sparsity.rate="]
    assert complete(f"{line} sparsity.fast=") == ["sparsity.fast=true", "sparsity.fast=false"]


def test_parsers_without_help_texts_are_completed():
    bare = argparse.ArgumentParser(add_help=False)
    bare.add_argument("--flag")
    assert candidates(["train"], "--", lambda name: bare) == {"--flag": ""}
