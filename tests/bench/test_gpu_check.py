"""``scripts/gpu_check.sh``: pieces, what is skipped, what a failure does; and its rehearsal."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sparsepretrain.bench.kernels import Timed
from sparsepretrain.bench.summary import summary
from sparsepretrain.files import write_atomic

SCRIPT = Path(__file__).parents[2] / "scripts" / "gpu_check.sh"
PIECES = ["tests", "triton", "doctor", "kernels", "linear", "linear-auto"]
PIECES += ["linear-fp8", "linear-fp8-auto", "block", "block-auto", "products"]
TRAIN = ["train-sste", "train-sste-auto"]
PYTHON = """#!/bin/bash
# stands in for Python: writes down what it was asked for
echo "$*" >> "{calls}"
words=$*
out=${{words##*out=}}
case "$*" in
    *get_device_name*) [ -e "{gpu}" ] && echo "NVIDIA H200" ;;
    *tests/gpu*) [ ! -e "{broken}" ] ;;
    *suite=linear*) echo '{{}}' > "$out"; exit 1 ;;
    *suite=*) echo '{{}}' > "$out" ;;
esac
"""


@pytest.fixture
def check(tmp_path):
    """``check(*words)``: exit code, output and the calls of Python, on a machine with a GPU."""
    files = {name: tmp_path / name for name in ("calls", "gpu", "broken")}
    python = tmp_path / "python"
    python.write_text(PYTHON.format(**files))
    python.chmod(0o755)
    files["gpu"].touch()

    def run(*words):
        files["calls"].unlink(missing_ok=True)
        settings = {"PYTHON": str(python), "OUT": str(tmp_path / "out"), "METHODS": "sste"}
        done = subprocess.run(
            ["bash", str(SCRIPT), *words], capture_output=True, text=True, env=os.environ | settings
        )
        calls = files["calls"].read_text().splitlines() if files["calls"].exists() else []
        return done.returncode, done.stdout + done.stderr, calls

    return run


def test_pieces_are_resumed(check, tmp_path):
    (tmp_path / "broken").touch()
    code, text, calls = check()
    results = tmp_path / "out" / "nvidia-h200"
    assert code == 1 and "gpu_check: failed: tests;" in text
    finished = {path.stem for path in results.glob("*.log")}
    assert finished == {*PIECES, *TRAIN} - {"tests"}, "a failure keeps no other piece from running"
    assert "== linear: a goal was missed" in text and (results / "linear.json").exists()
    assert [call.partition(" bench ")[2] for call in calls if "suite=train" in call] == [
        f"suite=train methods=sste quick=false out={results}/train-sste.json",
        f"suite=train methods=sste backend=auto quick=false out={results}/train-sste-auto.json",
    ]
    assert [call.partition(" bench ")[2] for call in calls if "fp8=true" in call] == [
        f"suite=linear fp8=true quick=false out={results}/linear-fp8.json",
        f"suite=linear backend=auto fp8=true quick=false out={results}/linear-fp8-auto.json",
    ]
    assert calls[-1] == f"-m sparsepretrain.bench.summary {results}"
    (tmp_path / "broken").unlink()
    code, text, calls = check()
    assert code == 0 and text.count("was finished before") == len(finished)
    assert len(calls) == 3 and "tests/gpu" in calls[1], "the name, what had failed, the summary"
    (results / "kernels.log").unlink()
    code, text, calls = check("kernels", "linear")
    assert code == 0 and len(calls) == 3 and "suite=kernels" in calls[1]


def test_what_is_refused(check, tmp_path):
    code, text, calls = check("kernel")
    assert code == 2 and not calls
    assert text.startswith("gpu_check: unknown piece 'kernel'; known are: tests triton doctor")
    (tmp_path / "gpu").unlink()
    code, text, _ = check("kernels")
    assert code == 1 and "no CUDA GPU here; --fake rehearses on the CPU" in text


def test_summary(tmp_path):
    times = {"p10": 1.0, "p50": 2.0, "p90": 3.0, "rounds": 3}
    row = Timed(case="a", shape=[4, 4], impl="triton", us=times, frac_of_copy=0.8, goal=0.85)
    row.ratio_to = {"reference": 3.0}
    skipped = Timed(case="b", shape=[4], impl="triton", status="skipped: needs a CUDA GPU")
    environment = {
        "hardware": {"device": "NVIDIA H200"},
        "packages": {"torch": "2.15.0", "triton": "3.9.0"},
        "commit": "abc",
    }
    cases = [row.as_dict(), skipped.as_dict()]
    found = {"suite": "kernels", "quick": False, "environment": environment, "cases": cases}
    found["ceilings"] = {"copy_gbps": 4012.3, "bf16_tflops": 700.4}
    write_atomic(tmp_path / "kernels.json", json.dumps(found))
    (tmp_path / "kernels.log").touch()
    (tmp_path / "tests.log.part").touch()
    text = summary(tmp_path)
    assert "Finished: kernels." in text and "Not finished: tests." in text
    assert "| a, 4×4, triton | 2 µs, 80% of copy | reference 3.00 | ≥ 85% of copy, NO |" in text
    assert "| b, 4, triton | skipped: needs a CUDA GPU |  |  |" in text
    assert "Ceilings, measured: 4012 GB/s, 700 TFLOP/s." in text
    assert "NVIDIA H200, torch 2.15.0, triton 3.9.0, commit abc" in text


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_rehearsal(tmp_path):
    settings = {"PYTHON": sys.executable, "OUT": str(tmp_path), "METHODS": "sste"}
    command = ["bash", str(SCRIPT), "--fake"]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | settings)
    assert done.returncode == 0, done.stdout + done.stderr
    results = tmp_path / "fake"
    assert {path.stem for path in results.glob("*.log")} == {*PIECES, *TRAIN}
    drawn = {path.stem for path in results.glob("*.png")}
    assert drawn == {*PIECES[4:], *TRAIN}
    text = (results / "summary.md").read_text()
    assert "Not finished" not in text and "few rounds: no figure means anything" in text
    assert "skipped: needs a CUDA GPU" in text and "nn.Linear 1.00" in text
    assert "backend=auto, 2×64, sste |" in text
