"""Verbs, exit codes, streams and start-up cost of the command."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

import sparsepretrain
import sparsepretrain.data
from sparsepretrain import __version__, cli, registry
from sparsepretrain.errors import CheckpointError, ConfigError, DataError, DivergedError

VERBS = registry.built_in("verb")


def run(*argv: str, **options) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own."""
    command = [sys.executable, "-m", "sparsepretrain", *argv]
    return subprocess.run(command, capture_output=True, text=True, **options)


def replace(monkeypatch, room: str, **functions) -> None:
    monkeypatch.setattr(sparsepretrain, room, SimpleNamespace(**functions), raising=False)


def replace_training(monkeypatch, module: str, **functions) -> None:
    """A module of the room that trains, imported by a verb when it is needed."""
    name = f"sparsepretrain.training.{module}"
    monkeypatch.setitem(sys.modules, name, SimpleNamespace(**functions))


@pytest.mark.parametrize("argv", [["--help"], ["-h"], ["help"]])
def test_help(argv, capsys):
    assert cli.main(argv) == 0
    out = capsys.readouterr().out
    assert all(f"  {verb} " in out for verb in VERBS)
    assert "__complete" not in out and max(map(len, out.splitlines())) <= 100


@pytest.mark.parametrize("verb", list(VERBS))
def test_help_of_a_verb(verb, capsys):
    assert cli.main([verb, "--help"]) == 0
    assert f"usage: sparsepretrain {verb}" in capsys.readouterr().out


def test_no_verb_is_a_usage_error_that_shows_the_help(capsys):
    assert cli.main([]) == 2
    assert "usage:" in capsys.readouterr().out


def test_version(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"sparsepretrain {__version__}\n"


def test_what_a_model_and_a_method_bring_together_is_said(capsys):
    words = ["train", "model=gpt2_350m", "sparsity=tsrste"]
    assert cli.main([*words, "--cfg", "job"]) == 0
    first, *rest = capsys.readouterr().out.splitlines()
    assert first.startswith("# sparsity.decay=0.0002") and "  decay: 0.0002" in rest


def test_cfg_job_is_the_resolved_configuration(capsys):
    assert cli.main(["train", "seed=4", "--cfg", "job", "sparsity=ste"]) == 0
    plain = yaml.safe_load(capsys.readouterr().out)
    assert plain["seed"] == 4 and plain["sparsity"]["name"] == "ste"
    assert plain["data"]["vocab_size"] == 256, "what null stands for is filled in"


def test_train_passes_the_run_and_returns_its_code(monkeypatch):
    calls = []
    replace_training(
        monkeypatch, "trainer", train=lambda run, console, stop_after: calls.append(run) or 143
    )
    assert cli.main(["train", "seed=4"]) == 143
    assert calls[0].seed == calls[0].plain["seed"] == 4


def test_dry_run(monkeypatch):
    calls = []
    replace_training(monkeypatch, "plan", dry_run=lambda run, console: calls.append(run.steps))
    assert cli.main(["train", "--dry-run", "steps=9"]) == 0
    assert calls == [9]


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (DataError("no file"), 3, "sparsepretrain: data error: no file\n"),
        (CheckpointError("torn"), 4, "sparsepretrain: checkpoint error: torn\n"),
        (DivergedError("step 5\nloss"), 5, "sparsepretrain: diverged: step 5 loss\n"),
        (
            ConfigError(["a", "b"]),
            2,
            "sparsepretrain: config error: a\nsparsepretrain: config error: b\n",
        ),
        (KeyboardInterrupt(), 130, "sparsepretrain: interrupted\n"),
    ],
)
def test_exit_codes(monkeypatch, capsys, error, code, line):
    def train(run, console, stop_after):
        raise error

    replace_training(monkeypatch, "trainer", train=train)
    assert cli.main(["train"]) == code
    assert capsys.readouterr().err == line


def test_a_bug_keeps_its_traceback(monkeypatch):
    def train(run, console, stop_after):
        raise RuntimeError("bug")

    replace_training(monkeypatch, "trainer", train=train)
    with pytest.raises(RuntimeError, match="bug"):
        cli.main(["train"])


def test_a_plugin_that_exits_is_an_error(monkeypatch, capsys):
    replace_training(monkeypatch, "trainer", train=lambda run, console, stop_after: sys.exit(0))
    assert cli.main(["train"]) == 1
    line = capsys.readouterr().err
    assert "test_cli.py, line" in line and "called sys.exit(0)" in line and line.count("\n") == 1


def test_somebody_elses_broken_pipe_is_not_ours(monkeypatch, capfd):
    def train(run, console, stop_after):
        raise BrokenPipeError

    replace_training(monkeypatch, "trainer", train=train)
    with capfd.disabled(), pytest.raises(BrokenPipeError), open(os.devnull, "w") as output:
        monkeypatch.setattr(sys, "stdout", output)
        cli.main(["train"])


def test_prepare(monkeypatch, capsys):
    seen = {}

    def prepare(options, *, workers, on_progress):
        seen.update(source=options.source, workers=workers)
        tokens = {"train": range(30_000), "validation": range(2_000)}
        return SimpleNamespace(tokens=tokens, directory=Path("/cache/x"), end_of_text=None)

    replace(monkeypatch, "data", prepare=prepare, amounts=sparsepretrain.data.amounts)
    assert cli.main(["prepare", "data=python_source", "--workers", "3"]) == 0
    assert seen == {"source": "python_source", "workers": 3}
    out = capsys.readouterr().out
    assert "/cache/x" in out and "32.0k tokens" in out and "tokens/s" in out


def test_methods(capsys):
    assert cli.main(["methods"]) == 0
    out = capsys.readouterr().out
    for word in ("dense", "ste", "srste", "sste", "M∘W", "MVUE", "arXiv:2409.09099"):
        assert word in out
    assert max(map(len, out.splitlines())) <= 100


@pytest.mark.parametrize("width", [60, 80])
def test_methods_fit_a_narrow_terminal(width, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(width))
    assert cli.main(["methods"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines[:-2])) <= width
    assert any("U(G) = MVUE(G)" in line for line in lines)


def test_methods_of_a_plugin(tmp_path, capsys):
    plugin = tmp_path / "bare.py"
    plugin.write_text(
        "from sparsepretrain.registry import register\n"
        "@register('method', 'mine_bare')\nclass Bare: pass\nprint('noise')\n"
    )
    assert cli.main(["methods", f"plugins=[{plugin}]"]) == 0
    out, err = capsys.readouterr()
    assert "mine_bare" in out and "noise" in err and "noise" not in out


def test_configs(tmp_path, capsys):
    (tmp_path / "sparsity").mkdir()
    (tmp_path / "sparsity/mine.yaml").write_text("name: mine\n")
    assert cli.main(["configs", "--config-dir", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert f"{tmp_path}/sparsity/mine.yaml" in out
    assert "sste *" in out and "gpt2_nano *" in out and "configs/model/gpt2_1558m.yaml" in out
    assert "ste *" not in out.replace("sste *", "")


def test_configs_prints_the_keys_of_an_option(tmp_path, capsys):
    (tmp_path / "sparsity").mkdir()
    (tmp_path / "sparsity/mine.yaml").write_text("name: mine  # a comment\n")
    words = ["configs", "sparsity=sste", "sparsity=mine", "--config-dir", str(tmp_path)]
    assert cli.main(words) == 0
    out = capsys.readouterr().out
    assert "gamma: 0.0" in out and "# threshold between" in out
    assert f"# {tmp_path}/sparsity/mine.yaml\nname: mine  # a comment\n" in out
    for word, told in (("sparsty=ste", "'sparsity'"), ("sparsity=sst", "'sparsity=sste'")):
        assert cli.main(["configs", word]) == 2
        assert f"(did you mean {told}?)" in capsys.readouterr().err


@pytest.mark.parametrize("verb", ["train", "finetune"])
def test_help_has_examples_that_are_accepted(verb, capsys):
    assert cli.main([verb, "--help"]) == 0
    out = capsys.readouterr().out
    examples = [line.split() for line in out.splitlines() if line.startswith("  sparsepretrain ")]
    assert len(examples) == 2 and "sparsepretrain configs" in out
    for _, own, *words in examples:
        assert own == verb
        if verb == "train":
            assert cli.main(["train", *[w for w in words if w != "--dry-run"], "--cfg", "job"]) == 0


def test_report(monkeypatch, capsys):
    seen = []

    def report(runs, out, page):
        seen.append((runs, out))
        return [Path("a.png")]

    replace(monkeypatch, "reports", report=report)
    assert cli.main(["report", "r1", "--out", "o", "r2"]) == 0
    assert seen == [([Path("r1"), Path("r2")], Path("o"))]
    assert capsys.readouterr().out == "a.png\n"


def test_closed_output_is_not_an_error():
    # a pipe whose reader is gone before the first byte
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "sparsepretrain", "train", "--cfg", "job"]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, check=False)
    os.close(write)
    assert (done.returncode, done.stderr) == (0, b"")


def test_a_full_disk_behind_the_output_has_its_exit_code():
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "sparsepretrain", "--version"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 4 and "disk full" in done.stderr


def test_an_ascii_terminal(tmp_path):
    done = run("methods", env={**os.environ, "PYTHONIOENCODING": "ascii"}, cwd=tmp_path)
    assert done.returncode == 0 and "?" in done.stdout


def test_errors_go_to_stderr_and_leave_nothing(tmp_path):
    done = run("train", "+sparsity.gama=0.2", cwd=tmp_path)
    expected = "unknown key 'sparsity.gama' (did you mean 'sparsity.gamma'?)"
    assert done.stderr == f"sparsepretrain: config error: {expected}\n"
    assert (done.returncode, done.stdout) == (2, "")
    assert not list(tmp_path.iterdir())


LOADED = "import sys; from sparsepretrain.cli import main; main(sys.argv[1:]); print(*sys.modules)"


@pytest.mark.parametrize(
    ("argv", "absent", "most"),
    [
        (["--help"], {"torch", "numpy", "hydra", "omegaconf", "yaml", "rich"}, 220),
        (["train", "--cfg", "job"], {"torch", "numba", "transformers", "datasets", "rich"}, 480),
        (["methods"], {"torch", "transformers"}, 480),
        (["__complete", "train", "sparsity."], {"torch", "rich"}, 460),
    ],
)
def test_what_starting_loads(argv, absent, most):
    """Modules are counted, not seconds, which say more of the machine than of the code."""
    command = [sys.executable, "-c", LOADED, *argv]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    loaded = set(done.stdout.splitlines()[-1].split())
    assert not absent & loaded
    assert len(loaded) < most


def test_a_finished_run_answers_without_torch(tiny, capfd, monkeypatch):
    """Neither its steps nor its epochs need the model; its report is left as it is."""
    from sparsepretrain.cli import train

    loaded = "torch" in sys.modules
    runs = [tiny.overrides("steps=2"), tiny.overrides("steps=0", "epochs=0.002")]
    for words in runs:
        monkeypatch.setattr(train, "illustrate", lambda run: run.report_file.touch())
        assert cli.main(["train", *words]) == 0
    said = capfd.readouterr().out.count("loading PyTorch and the model")
    assert said == (not loaded), "once, and only where it takes seconds"
    code = (
        "import json, sys; from sparsepretrain.cli import main\n"
        "for words in json.load(sys.stdin): assert main(['train', *words]) == 0\n"
        "assert not {'torch', 'matplotlib', 'transformers'} & set(sys.modules)"
    )
    command, text = [sys.executable, "-c", code], json.dumps(runs)
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert [line.rpartition("is ")[2] for line in lines] == [
        "finished (2 steps): nothing to do",
        "finished (1 steps): nothing to do",
    ]


def test_an_interrupt_that_a_library_swallows_still_ends_the_command(tiny, monkeypatch, capfd):
    """It was lost, and the run went on to its last step."""
    from sparsepretrain.training import plan

    def library(run):
        try:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1)
        except BaseException:
            return

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs ignore it
    try:
        with monkeypatch.context() as patch:
            patch.setattr(plan, "require_a_sparse_step", library)
            assert cli.main(["train", *tiny.overrides()]) == 130
    finally:
        signal.signal(signal.SIGINT, before)
    assert capfd.readouterr().err == "sparsepretrain: interrupted\n"
    assert cli.main(["train", *tiny.overrides("steps=1")]) == 0, "the next command is another one"
