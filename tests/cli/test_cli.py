"""Verbs, exit codes, output streams and start-up of the command."""

import json
import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import yaml

from sparsepretrain import __version__, cli, processes, registry
from sparsepretrain.cli import train
from sparsepretrain.errors import CheckpointError, ConfigError, DataError, DivergedError

VERBS = registry.built_in("verb")


def replace_training(monkeypatch, module: str, **functions) -> None:
    """Replace a module of the trainer, which verbs import on first use."""
    name = f"sparsepretrain.training.{module}"
    monkeypatch.setitem(sys.modules, name, SimpleNamespace(**functions))


@pytest.mark.parametrize(("argv", "code"), [(["--help"], 0), (["-h"], 0), (["help"], 0), ([], 2)])
def test_help_lists_verbs(argv, code, capsys):
    assert cli.main(argv) == code
    out = capsys.readouterr().out
    assert all(f"  {verb} " in out for verb in VERBS)
    assert max(map(len, out.splitlines())) <= 100
    listed = [
        line.split()[0] for line in out.partition("\n\n  ")[2].partition("\n\n")[0].split("\n")
    ]
    assert listed[:4] == ["train", "finetune", "eval", "export"] and sorted(listed) == sorted(VERBS)


@pytest.mark.parametrize("flag", ["-m", "--multirun"])
def test_the_flags_of_many_runs_name_the_command_that_trains_them(flag, capsys):
    assert cli.main(["finetune", flag, "run", "seed=0,1"]) == 2
    assert "sparsepretrain train -m" in capsys.readouterr().err


def test_every_verb_has_help(capsys):
    for verb in VERBS:
        assert cli.main([verb, "--help"]) == 0
        assert f"usage: sparsepretrain {verb}" in capsys.readouterr().out
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"sparsepretrain {__version__}\n"


def test_cfg_job_prints_the_resolved_configuration(capsys):
    words = ["train", "model=gpt2_350m", "sparsity=tsrste", "seed=4"]
    assert cli.main([*words, "--cfg", "job"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("# sparsity.decay=0.0002"), "published for the model with the method"
    plain = yaml.safe_load(out)
    assert (plain["seed"], plain["sparsity"]["decay"]) == (4, 0.0002)
    assert plain["data"]["vocab_size"], "defaults are filled in"


@pytest.mark.parametrize(
    ("outcome", "code", "lines"),
    [
        (143, 143, []),
        (DataError("no file"), 3, ["data error: no file"]),
        (CheckpointError("torn"), 4, ["checkpoint error: torn"]),
        (DivergedError("step 5\nloss"), 5, ["diverged: step 5 loss"]),
        (ConfigError(["a", "b"]), 2, ["config error: a", "config error: b"]),
        (KeyboardInterrupt(), 130, ["interrupted"]),
    ],
)
def test_errors_become_lines_and_exit_codes(monkeypatch, capsys, outcome, code, lines):
    def train(run, console, stop_after):
        if isinstance(outcome, int):
            return outcome
        raise outcome

    replace_training(monkeypatch, "launch", train_or_launch=train)
    assert cli.main(["train"]) == code
    assert capsys.readouterr().err == "".join(f"sparsepretrain: {line}\n" for line in lines)


def test_plugin_that_exits_is_an_error(monkeypatch, capsys):
    replace_training(monkeypatch, "launch", train_or_launch=lambda *_: sys.exit(0))
    assert cli.main(["train"]) == 1
    line = capsys.readouterr().err
    assert "test_cli.py, line" in line and "called sys.exit(0)" in line and line.count("\n") == 1


def test_methods_lists_operands_and_plugins(tmp_path, capsys):
    assert cli.main(["methods"]) == 0
    out = capsys.readouterr().out
    for word in ("dense", "ste", "srste", "sste", "M∘W", "MVUE", "arXiv:2409.09099"):
        assert word in out
    plugin = tmp_path / "bare.py"
    text = "from sparsepretrain.registry import register\n@register('method', 'mine_bare')\n"
    plugin.write_text(text + "class Bare: pass\nprint('noise')\n")
    assert cli.main(["methods", f"plugins=[{plugin}]"]) == 0
    out, err = capsys.readouterr()
    assert "mine_bare" in out and "noise" in err and "noise" not in out


def test_configs_prints_options_and_their_keys(tmp_path, capsys):
    (tmp_path / "sparsity").mkdir()
    (tmp_path / "sparsity/mine.yaml").write_text("name: mine  # a comment\n")
    words = ["configs", "sparsity=sste", "sparsity=mine", "--config-dir", str(tmp_path)]
    assert cli.main(words) == 0
    out = capsys.readouterr().out
    assert "gamma: 0.0" in out and "# threshold between" in out
    assert f"# {tmp_path}/sparsity/mine.yaml\nname: mine  # a comment\n" in out
    assert cli.main(["configs", "--config-dir", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert f"{tmp_path}/sparsity/mine.yaml" in out and "gpt2_nano *" in out
    for word, near in (("sparsty=ste", "'sparsity'"), ("sparsity=sst", "'sparsity=sste'")):
        assert cli.main(["configs", word]) == 2
        assert f"(did you mean {near}?)" in capsys.readouterr().err


def test_closed_output_is_not_an_error():
    # a pipe without a reader
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "sparsepretrain", "train", "--cfg", "job"]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, check=False)
    os.close(write)
    assert (done.returncode, done.stderr) == (0, b"")


def test_python_without_docstrings_is_one_line():
    command = [sys.executable, "-OO", "-m", "sparsepretrain", "train", "--cfg", "job"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and done.stdout == ""
    assert "usage error: Python runs without docstrings" in done.stderr
    assert done.stderr.count("\n") == 1


def test_full_disk_exits_with_4():
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "sparsepretrain", "--version"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 4 and "disk full" in done.stderr


LOADED = "import sys; from sparsepretrain.cli import main; main(sys.argv[1:]); print(*sys.modules)"


@pytest.mark.parametrize(
    ("argv", "absent"),
    [
        (["--help"], {"torch", "numpy", "hydra", "omegaconf", "yaml", "rich"}),
        (["train", "--help"], {"torch", "numpy", "hydra", "omegaconf", "yaml", "rich"}),
        (["configs"], {"torch"}),
        (["train", "--cfg", "job"], {"numba", "transformers", "datasets", "rich"}),
    ],
)
def test_start_up_imports_few_libraries(argv, absent):
    command = [sys.executable, "-c", LOADED, *argv]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    loaded = set(done.stdout.splitlines()[-1].split())
    assert not absent & loaded


def test_finished_run_loads_no_model(tiny, capfd, monkeypatch):
    loaded = "transformers" in sys.modules
    runs = [tiny.overrides("steps=2"), tiny.overrides("steps=0", "epochs=0.002")]
    for words in runs:
        monkeypatch.setattr(train, "illustrate", lambda run: run.report_file.touch())
        assert cli.main(["train", *words]) == 0
    announced = capfd.readouterr().out.count("loading the model")
    assert announced == (not loaded)
    code = (
        "import json, sys; from sparsepretrain.cli import main\n"
        "for words in json.load(sys.stdin): assert main(['train', *words]) == 0\n"
        "assert not {'matplotlib', 'transformers'} & set(sys.modules)"
    )
    command, text = [sys.executable, "-c", code], json.dumps(runs)
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=True)
    ends = [line.rpartition("is ")[2] for line in done.stdout.splitlines()]
    assert ends == [f"finished ({steps} steps): nothing to do" for steps in (2, 1)]


@pytest.mark.parametrize("then", ["goes on", "fails"])
def test_an_interrupt_that_a_library_swallows_still_ends_the_command(
    tiny, monkeypatch, capfd, then
):
    """Numpy, interrupted while it is imported, fails at its next use."""
    from sparsepretrain.training import plan

    def library(run):
        try:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1)
        except BaseException:
            pass
        if then == "fails":
            broken()

    def broken():
        broken()  # RecursionError, which names no interrupt

    monkeypatch.setattr(plan, "require_a_sparse_step", library)
    monkeypatch.setattr(processes, "interrupted", False)
    monkeypatch.setattr(sys, "argv", ["sparsepretrain", "train", *tiny.overrides()])
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs ignore it
    try:
        assert cli.main() == 130
    finally:
        signal.signal(signal.SIGINT, before)
    assert capfd.readouterr().err == "sparsepretrain: interrupted\n"


@pytest.mark.parametrize(
    "words",
    [
        ("RUN", "plugins=[a.py]", "--method", "wanda", "--out", "o", "--layers", "ffn", "!*.up"),
        ("RUN", "--method", "wanda", "--out", "o", "--layers", "ffn", "!*.up", "plugins=[a.py]"),
        ("RUN", "--layers", "ffn", "!*.up", "plugins=[a.py]", "--method", "wanda", "--out", "o"),
    ],
)
@pytest.mark.parametrize("first", [True, False])
def test_overrides_are_no_layers(monkeypatch, words, first):
    from sparsepretrain.export import prune

    requests = []
    monkeypatch.setattr(prune, "prune_checkpoint", lambda request, _: requests.append(request))
    rest = [word for word in words if word != "plugins=[a.py]"]
    assert cli.main(["plugins=[a.py]", "prune", *rest] if first else ["prune", *words]) == 0
    (request,) = requests
    assert (request.checkpoint, request.layers) == ("RUN", ["ffn", "!*.up"])
    assert request.overrides == ["plugins=[a.py]"]
