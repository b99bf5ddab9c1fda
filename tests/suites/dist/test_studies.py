"""Several runs with two ranks each, from the shell."""

import os
import signal
import subprocess
import sys
import time

import pytest

from sparsepretrain.runs.directory import find_runs
from support.tiny_runs import metrics

pytestmark = [pytest.mark.dist, pytest.mark.timeout(900)]


@pytest.mark.parametrize(("first", "then"), [("ddp", "fsdp"), ("fsdp", "ddp")])
def test_interrupted_command_of_two_ranks_continues(tiny, first, then):
    """SIGINT to the process group, as from a terminal; only the device is part of a run."""
    own = ("steps=100000", "eval.batches=0", "checkpoint.every=0", "batch.micro=2")
    words = [*tiny.overrides(*own), "sparsity=ste,sste", "parallel.nproc=2"]
    command = [sys.executable, "-m", "sparsepretrain", "train", "-m", "name=two", *words]
    options = {"env": {**os.environ, "OMP_NUM_THREADS": "1"}, "start_new_session": True}
    options |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen([*command, f"parallel={first}"], **options)
    runs = tiny.root / "runs/two"
    while not any(file.stat().st_size for file in runs.glob("*/*/metrics.jsonl")):
        assert process.poll() is None
        time.sleep(0.1)
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 130, out + err
    assert err == "sparsepretrain: stopped: the same command continues where this one stopped\n"
    assert "1 stopped, 1 waiting" in out
    (run,) = find_runs([runs])
    assert run.status() == 130
    saved = max(int(p.name.removeprefix("step_")) for p in run.checkpoints.iterdir())

    end = saved + 2
    command += [f"parallel={then}", "--stop-after", str(end)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"from step {saved}, {end} steps" in done.stdout and "two: 2 partial" in done.stdout
    for made in find_runs([runs]):
        assert [line["step"] for line in metrics(made.path)] == list(range(1, end + 1))
        assert made.environment()["command"].startswith("sparsepretrain train ")
        assert made.console_log.read_text().count("target layers") == 1, "rank 0 prints"
