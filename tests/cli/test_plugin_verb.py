"""Verbs of plug-ins."""

import functools
import signal
import subprocess
import sys

import pytest

from sparsepretrain import cli

VERB = """
from dataclasses import dataclass
from sparsepretrain.cli import ConfiguredVerb, Verb, read_settings
from sparsepretrain.registry import register

@dataclass(kw_only=True)
class Settings:
    times: int = 1
    greeting: str = "hello"

@register("verb", "greet")
class Greet(Verb):
    summary = "say something"

    def add_arguments(self, parser):
        parser.add_argument("name", choices=["you", "me"])
        parser.add_argument("settings", nargs="*")

    def run(self, args):
        settings = read_settings(Settings, args.settings)
        print(" ".join([settings.greeting] * settings.times), args.name)
        return 7

@register("verb", "count-keys")
class CountKeys(ConfiguredVerb):
    summary = "count the keys of a configuration"

    def run(self, args):
        from sparsepretrain import config
        print(len(config.load(args.overrides, args.config_dir).plugins))
        return 0
"""


@pytest.fixture(scope="module")
def plugin(tmp_path_factory):
    file = tmp_path_factory.mktemp("verb") / "my_verb.py"
    file.write_text(VERB)
    return f"plugins=['{file}']"


def call(capsys, *argv: str) -> tuple[int, str]:
    code = cli.main(argv)
    captured = capsys.readouterr()
    return code, captured.out + captured.err


def test_plugin_verb_runs_if_named(plugin, capsys):
    code, text = call(capsys, "greet", "you")
    assert code == 2 and "unknown verb 'greet'" in text
    assert call(capsys, "greet", plugin, "you", "times=2") == (7, "hello hello you\n")
    assert call(capsys, plugin, "greet", "me", "greeting=hi") == (7, "hi me\n")
    assert call(capsys, "count-keys", plugin) == (0, "1\n"), "plug-ins are part of a configuration"


def test_help_lists_a_named_plugin_verb(plugin, capsys):
    code, text = call(capsys, "--help", plugin)
    assert code == 0 and "  greet       say something\n" in text
    code, text = call(capsys, "greet", "--help", plugin)
    assert code == 0 and "usage: sparsepretrain greet" in text and "{you,me}" in text


@pytest.mark.parametrize(
    ("name", "words"),
    [("train", ["verb 'train' exists already"]), ("greet", ["my_verb.py, line 2", "Mine"])],
)
def test_bad_plugin_verbs_are_refused(name, words, tmp_path, capsys):
    file = tmp_path / "my_verb.py"
    text = f"from sparsepretrain.registry import register\n@register('verb', '{name}')\n"
    file.write_text(text + "class Mine: pass")
    code, text = call(capsys, "greet", f"plugins=['{file}']")
    assert code == 2 and text.count("\n") == 1 and all(word in text for word in words), text


def test_help_works_with_a_broken_plugin(tmp_path, capsys):
    code, text = call(capsys, "--help", f"plugins=['{tmp_path}/none.py']")
    assert code == 0 and "warning: plugin" in text and "  train " in text
    file = tmp_path / "half_a_verb.py"
    file.write_text(VERB.replace("def run", "def runs"))
    code, text = call(capsys, "greet", f"plugins=['{file}']")
    assert code == 2 and "Greet lacks run" in text and "half_a_verb.py, line " in text


INTERRUPTED = """
import os, signal
from sparsepretrain.cli import Verb
from sparsepretrain.registry import register

def interrupt():
    exec("os.kill(os.getpid(), signal.SIGINT); print('not at once')")

@register("verb", "wait")
class Wait(Verb):
    summary = "wait"

    def run(self, args):
        interrupt()
"""


@pytest.mark.parametrize("last", ["", "interrupt()"], ids=["in a string", "in an import"])
def test_interrupt_always_exits_with_130(last, tmp_path):
    # CPython itself would die of the signal after both
    file = tmp_path / "waits.py"
    file.write_text(INTERRUPTED + last)
    command = [sys.executable, "-m", "sparsepretrain", "wait", f"plugins=['{file}']"]
    # as in a terminal: background jobs of a shell ignore SIGINT
    usual = functools.partial(signal.signal, signal.SIGINT, signal.default_int_handler)
    done = subprocess.run(command, capture_output=True, text=True, preexec_fn=usual)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "sparsepretrain: interrupted\n")
