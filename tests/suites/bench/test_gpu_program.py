"""``scripts/gpu/run.py``: limits, lost stages, what counts as passed, files that come back."""

import fnmatch
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest

import blocks
from harness import Options
from support import ROOT

SCRIPT = ROOT / "scripts" / "gpu" / "run.py"

spec = importlib.util.spec_from_file_location("gpu_run", SCRIPT)
program = importlib.util.module_from_spec(spec)
sys.modules["gpu_run"] = program
spec.loader.exec_module(program)

OK = {"name": "a", "value": 1.0, "status": "ok", "ok": None}


def python(code, seconds=60, kind="text"):
    return program.Stage(seconds, ("-c", code), kind=kind)


def writes(*cases, code=0, seconds=60):
    """Return a stage like a benchmark: it writes these cases and ends with this exit code."""
    text = json.dumps({"cases": cases})
    lines = "import pathlib, sys; pathlib.Path(sys.argv[1]).write_text(sys.argv[2])"
    quoted = text.replace("{", "{{").replace("}", "}}")
    return program.Stage(seconds, ("-c", f"{lines}; sys.exit({code})", "{out}", quoted))


@pytest.fixture
def call(tmp_path, monkeypatch):
    """``call(stages, **options)``: a call that has run, its exit code and the archive's texts."""
    monkeypatch.setattr(program.Call, "describe", lambda self: {"unknown": "a test", "gpu": {}})
    monkeypatch.setattr(program, "SHORTEST", 1)
    monkeypatch.setattr(program, "RESERVE", 0)
    monkeypatch.setattr(program, "GRACE", 1)

    def call(stages, *, seconds=60, files=8, **options):
        work = tmp_path / "work"
        work.mkdir()
        out = tmp_path / "out"
        out.mkdir()
        made = program.Call([*stages], out, seconds, files, stages=stages, work=work, **options)
        code = made.run()
        return made, code, packed(out)

    return call


def packed(out):
    with tarfile.open(out / "results.tar.gz") as archive:
        found = {Path(m.name).name: archive.extractfile(m) for m in archive if m.isfile()}
        return {name: file.read().decode() for name, file in found.items()}


def test_a_call_succeeds_only_if_every_stage_passed(call):
    made, code, files = call({"good": python("print('hello')"), "also": writes(OK)})
    assert code == 0 and {o.status for o in made.outcomes.values()} == {"passed"}
    assert files["good.log"] == "hello\n" and "all 2 stages passed" in files["summary.txt"]
    assert {"summary.json", "also.json", "also.log", "tables.txt"} <= files.keys()


@pytest.mark.parametrize(
    ("stage", "status"),
    [
        (python("import sys; sys.exit(3)"), "failed with exit code 3"),
        (python("import os, signal; os.kill(os.getpid(), signal.SIGKILL)"), "failed"),
        (python("import time; time.sleep(60)", seconds=1), "out of time"),
        (python("print('3 skipped in 1 s')", kind="tests"), "incomplete"),
        (python("print('0 passed, 3 skipped')", kind="tests"), "incomplete"),
        (python("print('1 failed, 2 passed')\nraise SystemExit(1)", kind="tests"), "failed"),
        (writes(OK, {**OK, "status": "skipped: 10 s are over"}), "incomplete"),
        (writes(OK, {**OK, "status": "wrong: 2"}, code=1), "failed"),
        (writes(OK, {**OK, "ok": False}, code=1), "missed a goal"),
        (writes(), "failed"),
        (python("print('no results file')", kind="bench"), "failed"),
    ],
)
def test_anything_else_counts_as_missing(call, stage, status):
    made, code, files = call({"odd": stage, "next": python("print('1 passed')", kind="tests")})
    assert code == 1 and made.outcomes["odd"].status.startswith(status)
    assert made.outcomes["next"].status == "passed", "a failure does not stop the other stages"
    assert "missing: odd" in files["summary.txt"] and "==== odd" in files["failures.txt"]


def test_a_rehearsal_may_skip_what_needs_a_gpu(call):
    stage = writes(OK, {**OK, "status": "skipped: needs a CUDA GPU"})
    assert call({"a": stage}, rehearsal=True)[1] == 0


def test_a_stage_that_does_not_fit_is_missing(call):
    slow = python("import time; time.sleep(60)", seconds=50)
    made, code, files = call({"slow": slow, "never": python("pass")}, seconds=3)
    assert code == 1 and made.outcomes["slow"].status == "out of time"
    assert made.outcomes["never"].status == "not begun"
    assert "missing: slow, never" in files["summary.txt"]


def test_a_stage_at_its_limit_may_save_what_it_has(call):
    code = (
        "import pathlib, signal, sys, time\n"
        "def save(*_):\n"
        "    pathlib.Path(sys.argv[1]).write_text(sys.argv[2])\n"
        "    sys.exit(143)\n"
        "signal.signal(signal.SIGTERM, save)\n"
        "time.sleep(60)"
    )
    text = json.dumps({"cases": [OK]}).replace("{", "{{").replace("}", "}}")
    stage = program.Stage(2, ("-c", code, "{out}", text))
    made, _, files = call({"slow": stage})
    assert made.outcomes["slow"].status == "out of time"
    assert "1 of 1 cases" in files["summary.txt"] and "slow.json" in files


def test_processes_that_a_stage_leaves_are_ended(call, tmp_path):
    code = "import subprocess; print(subprocess.Popen(['sleep', '60']).pid)"
    _, _, files = call({"a": python(code)})
    process = int(files["a.log"])
    for _ in range(100):
        state = Path(f"/proc/{process}/stat")
        if not state.exists() or state.read_text().split()[2] == "Z":
            return
        time.sleep(0.1)
    pytest.fail("the process still runs")


@pytest.mark.parametrize("files", [2, 3, 8])
def test_few_files_come_back(call, files):
    made, _, _ = call({"a": python("pass"), "b": python("raise SystemExit(1)")}, files=files)
    found = {path.name for path in made.out.iterdir()}
    assert len(found) == min(files, 4) and {"results.tar.gz", "summary.txt"} <= found


def test_checkpoints_and_large_files_do_not_travel(call, monkeypatch):
    monkeypatch.setattr(program, "SIZE", 1000)
    code = (
        "import pathlib; here = pathlib.Path('{work}'); (here / 'checkpoints').mkdir();"
        "(here / 'checkpoints' / 'a').write_text('a'); (here / 'large').write_text('a' * 1001)"
    )
    _, _, files = call({"a": python(code)})
    assert not {"a", "large"} & files.keys() and "a.log" in files


RUN = """
import sys
sys.path.insert(0, {scripts!r})
import run
run.Call.describe = lambda self: {{"gpu": {{}}}}
run.prepared = lambda work: dict(__import__("os").environ)
quick = run.Stage(60, ("-c", "pass"), kind="text")
slow = run.Stage(60, ("-c", "import time; time.sleep(60)", {out!r}), kind="text")
run.STAGES.clear()
run.STAGES.update(first=quick, second=slow, third=quick)
sys.exit(run.main(["first", "second", "third", "--out", {out!r}]))
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_call_loses_the_stage_that_ran(tmp_path, number):
    text = RUN.format(scripts=str(SCRIPT.parent), out=str(tmp_path))
    process = subprocess.Popen(
        [sys.executable, "-c", text], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    for line in process.stdout:
        if line.startswith("== second"):
            break
    os.kill(process.pid, number)
    assert process.wait(240) == (-9 if number == signal.SIGKILL else 143)
    summary = packed(tmp_path)["summary.txt"]
    assert "first: passed" in summary and "second: begun" in summary
    assert "third: not begun" in summary and "missing: second, third" in summary
    # the stage has a session of its own; other tests run processes that sleep too
    subprocess.run(["pkill", "-KILL", "-f", rf"time.sleep\(60\) {tmp_path}"], check=False)


def run(*words, **settings):
    command = [sys.executable, str(SCRIPT), *words]
    return subprocess.run(command, capture_output=True, text=True, env=os.environ | settings)


def test_unknown_stages_are_refused_with_the_known_ones(tmp_path):
    done = run("1", "smok", "--out", str(tmp_path))
    assert done.returncode == 2 and "smok" in done.stderr and "smoke" in done.stderr


def test_a_missing_package_is_named_before_a_stage_begins(tmp_path, monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(
        program.importlib.util, "find_spec", lambda n: None if n == "hydra" else found(n)
    )
    monkeypatch.setattr(program, "CARRIED", tmp_path / "nothing")
    with pytest.raises(SystemExit, match=r"has no hydra.*prepare\.sh"):
        program.main(["facts", "--out", str(tmp_path / "out")])
    assert [path.name for path in (tmp_path / "out").iterdir()] == [".part"]


def test_a_machine_without_a_gpu_is_told_so_at_once(call, monkeypatch, capsys):
    monkeypatch.setattr(program.Call, "describe", lambda self: {"unknown": "a test", "gpu": None})
    made, code, files = call({"a": python("pass")})
    assert code == 1 and made.outcomes["a"].status == "not begun"
    assert "no CUDA GPU" in capsys.readouterr().out and "missing: a" in files["summary.txt"]
    monkeypatch.undo()


def test_an_import_that_fails_is_named(tmp_path):
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}  # without benchmarks/
    made = program.Call([], tmp_path, 60, 8, work=tmp_path, environment=environment)
    assert made.describe() == {"unknown": "ModuleNotFoundError: No module named 'harness'"}


def test_a_folder_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").touch()
    done = run("facts", "--out", str(tmp_path / "file"))
    assert done.returncode == 2 and "--out" in done.stderr and "Traceback" not in done.stderr


def test_every_call_and_script_exists():
    for names in program.CALLS.values():
        assert {*names} <= program.STAGES.keys()
        # what the page asks for fits: the limits of stages may exceed the call's, not by much
        assert sum(program.STAGES[name].seconds for name in names) <= 1.8 * 560
    for stage in program.STAGES.values():
        for word in stage.command:
            if word.startswith(("benchmarks/", "tests/")):
                assert (ROOT / word).exists(), word


def test_the_cases_that_a_stage_chooses_exist(monkeypatch):
    monkeypatch.setattr(blocks.torch.cuda, "is_available", lambda: True)
    names = fnmatch.filter(blocks.works(Options(sparse_matmuls="auto")), program.FFN)
    sizes = [name.split("N=")[1].partition(" h=")[0] for name in names]
    assert sizes == ["4 n=2048 d=2048", "16 n=2048 d=2048", "4 n=2048 d=4096"]


def test_the_page_lists_every_stage_with_its_limit():
    page = (ROOT / "docs" / "gpu.md").read_text(encoding="utf-8")
    for name, stage in program.STAGES.items():
        short = name.replace("train-", "-") if name in ("train-sste", "train-srste") else name
        assert f"`{short}`" in page, name
        if name in program.CALLS["1"] + program.CALLS["2"]:
            assert f"| `{name}` | {stage.seconds} |" in page, name
