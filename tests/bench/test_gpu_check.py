"""``scripts/gpu_check.sh``: pieces, failures, packed results."""

import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest

from harness import Case
from sparsepretrain.files import write_atomic
from summary import summary

SCRIPT = Path(__file__).parents[2] / "scripts" / "gpu_check.sh"
PIECES = ["smoke", "doctor", "trust", "linear", "linear-auto", "train-sste", "train-sste-auto"]
PIECES += ["kernels", "tests", "triton", "products", "linear-fp8", "linear-fp8-auto"]
PIECES += ["blocks", "blocks-auto", "linear-all"]
PYTHON = """#!/bin/bash
# fake Python: records its calls
echo "$*" >> "{calls}"
words=$*
out=${{words##*--out }}
case "$*" in
    *get_device_name*)
        if [ ! -e "{gpu}" ]; then echo "no driver" >&2; exit 1; fi
        echo "NVIDIA H200" ;;
    *"import xdist"*) [ -e "{xdist}" ] ;;
    *"import hydra"*) [ -e "{hydra}" ] ;;
    *tests/gpu*) [ ! -e "{broken}" ] ;;
    *benchmarks/linear.py*) echo '{{}}' > "$out"; exit 1 ;;
    *benchmarks/products.py*)
        echo '{{"cases": 1}}' > "$out"
        if [ -e "{slow}" ]; then sleep 60 & wait; fi ;;
    *summary.py*) ;;
    *benchmarks/*) echo '{{}}' > "$out" ;;
esac
"""
FLAGS = ("gpu", "hydra", "xdist", "broken", "slow")


def start(*words, **settings):
    """Start the script; its output is one pipe."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    command = ["bash", str(SCRIPT), *words]
    return subprocess.Popen(command, env=os.environ | settings, **pipes)


def packed(out):
    """Return name -> text of the packed files."""
    with tarfile.open(out / "results.tar.gz") as tar:
        files = [member for member in tar if member.isfile()]
        return {Path(m.name).name: tar.extractfile(m).read().decode() for m in files}


class Check:
    """The script on a machine with a fake GPU and a fake Python."""

    def __init__(self, root):
        self.root, self.results = root, root / "out" / "nvidia-h200"
        self.flags = {name: root / name for name in FLAGS}
        python = root / "python"
        python.write_text(PYTHON.format(calls=root / "calls", **self.flags))
        python.chmod(0o755)
        for name in ("gpu", "hydra", "xdist"):
            self.flags[name].touch()
        self.settings = {"PYTHON": str(python), "OUT": str(root / "out"), "METHODS": "sste"}

    def start(self, *words, **settings):
        (self.root / "calls").unlink(missing_ok=True)
        return start(*words, **self.settings | settings)

    def __call__(self, *words, **settings):
        """Return exit code, output and the calls of Python."""
        process = self.start(*words, **settings)
        text, _ = process.communicate(timeout=120)
        calls = self.root / "calls"
        return process.returncode, text, calls.read_text().splitlines() if calls.exists() else []

    def packed(self):
        return packed(self.root / "out")


@pytest.fixture
def check(tmp_path):
    return Check(tmp_path)


def test_pieces_run_in_order_and_are_resumed(check):
    check.flags["broken"].touch()
    code, text, calls = check()
    assert code == 1 and "gpu_check: failed: tests\n" in text
    begun = [line.split()[1].strip(":") for line in text.splitlines() if line.startswith("== ")]
    assert list(dict.fromkeys(begun)) == PIECES
    finished = {path.stem for path in check.results.glob("*.log")}
    assert finished == {*PIECES} - {"tests"}, "a failure does not stop the other pieces"
    assert "== linear: a goal was missed" in text and (check.results / "linear.json").exists()
    out, budget = check.results, "--budget 480"
    for expected, name in (
        ("smoke.py --budget 60", "smoke"),
        (f"train.py --methods sste --backend auto {budget}", "train-sste-auto"),
        (f"linear.py --methods sste,tsrste,slope --backend auto --fp8 {budget}", "linear-fp8-auto"),
        (f"blocks.py --backend auto {budget}", "blocks-auto"),
        (f"linear.py {budget}", "linear-all"),
    ):
        assert f"benchmarks/{expected} --out {out}/{name}.json" in calls
    assert all("-n 8 tests/" in call for call in calls if "-m pytest" in call)
    check.flags["broken"].unlink()
    check.flags["xdist"].unlink()
    code, text, calls = check()
    assert code == 0 and text.count("was finished before") == len(finished)
    assert [call.split()[-1] for call in calls if "-m pytest" in call] == ["tests/gpu"]
    assert not any("-n 8" in call for call in calls)
    (check.results / "kernels.log").unlink()
    code, text, calls = check("kernels", "linear")
    assert code == 0 and sum("benchmarks/" in call and "summary" not in call for call in calls) == 1


def test_results_are_packed_after_every_piece(check):
    for piece in ("doctor", "kernels"):
        assert check(piece)[0] == 0
        assert f"{piece}.log" in check.packed()
    assert {"doctor.log", "kernels.log", "kernels.json"} <= check.packed().keys()
    code, text, _ = check("products", TAR=str(check.root / "elsewhere" / "a.tar.gz"))
    assert code == 0 and "elsewhere/a.tar.gz" in text
    assert (check.root / "elsewhere" / "a.tar.gz").exists()


def test_results_of_a_piece_out_of_time_are_kept(check):
    check.flags["slow"].touch()
    check.flags["hydra"].unlink()
    code, text, _ = check("products", "smoke", "doctor", LIMIT="2")
    assert code == 1 and "== products: FAILED with exit code 124 after" in text
    assert "== doctor: done" in text and "gpu_check: failed: products\n" in text
    assert "== smoke: skipped, training needs hydra-core" in text
    assert json.loads(check.packed()["products.json"]) == {"cases": 1}
    assert "FAILED with exit code 124" in check.packed()["products.log.part"]


def test_results_are_packed_when_the_script_is_stopped(check):
    check.flags["slow"].touch()
    process = check.start("doctor", "products", "kernels")
    deadline = time.monotonic() + 60
    while not (check.results / "products.json").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    text, _ = process.communicate(timeout=30)
    assert process.returncode == 143 and "== kernels" not in text
    assert {"doctor.log", "products.json", "products.log.part"} <= check.packed().keys()


def test_unknown_piece_and_missing_gpu_are_refused(check):
    code, text, calls = check("kernel")
    assert code == 2 and not calls
    assert "'kernel'" in text and "kernels" in text
    check.flags["gpu"].unlink()
    code, text, _ = check("kernels")
    assert code == 1 and "no driver" in text and "--fake" in text


def test_summary_lists_pieces_and_cases(tmp_path):
    speed = {"times_as_fast_as": {"reference": 3.0}}
    goal = Case(name="a, bandwidth over a device copy's", value=0.8, unit="×", at_least=0.85)
    skipped = Case(name="b, triton", status="skipped: needs a CUDA GPU")
    cases = [Case(name="a, triton", value=2.0, detail=speed), goal, skipped]
    environment = {"hardware": {"device": "NVIDIA H200"}, "commit": "abc"}
    environment["packages"] = {"torch": "2.15.0", "triton": "3.9.0"}
    found = {"script": "kernels", "quick": False, "environment": environment}
    found["cases"] = [case.as_dict() for case in cases]
    write_atomic(tmp_path / "kernels.json", json.dumps(found))
    (tmp_path / "kernels.log").touch()
    (tmp_path / "tests.log.part").touch()
    text = summary(tmp_path)
    assert "Finished: kernels." in text and "Not finished: tests." in text
    assert "- a, triton: 2 µs, 3.00× reference\n" in text
    assert "device copy's: 0.8 × (≥ 0.85, missed)\n" in text
    assert "- b, triton: skipped: needs a CUDA GPU\n" in text
    assert "NVIDIA H200, torch 2.15.0, triton 3.9.0, commit abc\n" in text


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_rehearsal_survives_a_killed_piece_and_leaves_one_tar(tmp_path):
    """All pieces on the CPU, of which one is killed while it measures."""
    pids, python, results = tmp_path / "pids", tmp_path / "python", tmp_path / "out" / "fake"
    python.write_text(f'#!/bin/bash\necho "$$ $*" >> {pids}\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    settings = {"PYTHON": str(python), "OUT": str(tmp_path / "out"), "METHODS": "sste"}
    process = start("--fake", **settings)
    lines = []
    for line in process.stdout:
        lines.append(line)
        if line.startswith("== kernels: ") and "kernels.py" in line:
            while not (results / "kernels.json").exists() and process.poll() is None:
                time.sleep(0.02)
            calls = pids.read_text().splitlines()
            os.kill(int(next(c for c in calls if "kernels.py" in c).split()[0]), signal.SIGKILL)
    assert process.wait(timeout=60) == 1, "".join(lines)
    text = "".join(lines)
    assert "== kernels: FAILED with exit code 137" in text
    assert "gpu_check: failed: kernels\n" in text
    assert {path.stem for path in results.glob("*.log")} == {*PIECES} - {"kernels"}
    files = packed(tmp_path / "out")
    assert files.keys() == {path.name for path in results.iterdir()}
    assert json.loads(files["kernels.json"])["cases"]
    summarized = (results / "summary.md").read_text()
    assert "Not finished: kernels." in summarized
    assert "few rounds: no figure means anything" in summarized
    assert "skipped: needs a CUDA GPU" in summarized and "1.00× nn.Linear" in summarized
    assert "tiny, backend=auto, sste: " in summarized
