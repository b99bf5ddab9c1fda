"""Two processes as the command starts them: exit codes, and the first error shown once."""

import signal
import subprocess
import time
from pathlib import Path

import pytest

from sparsepretrain.runs.checkpoint import Checkpoint
from sparsepretrain.runs.directory import RunDirectory
from support.launches import FAULT, end, start
from support.ranks import variant
from support.tiny_runs import metrics

pytestmark = [pytest.mark.dist, pytest.mark.timeout(900)]

DDP = ("parallel=ddp", "parallel.nproc=2", "parallel.timeout=60")


def directory(tiny, *words):
    plugin = f"plugins=['{FAULT}']"
    return RunDirectory(tiny.directory(*variant("sste"), "steps=8", plugin, *words))


def start_until_a_checkpoint(tiny, **options):
    """The process and the directory of an endless run, once it has saved."""
    words = ("steps=100000", "eval.every=0")
    process, place = start(tiny, *DDP, *words, **options), directory(tiny, *words)
    while not any(place.checkpoints.glob("step_*")):
        assert process.poll() is None
        time.sleep(0.1)
    return process, place


@pytest.mark.parametrize(
    ("fault", "code", "line"),
    [
        ("data:1:5", 3, "sparsepretrain: data error: rank 1: a shard cannot be read"),
        ("data:0:5", 3, "sparsepretrain: data error: a shard cannot be read"),
        ("SIGKILL:1:5", 137, "sparsepretrain: error: rank 1 died of SIGKILL"),
        ("nan:1:5", 5, "sparsepretrain: diverged: step 3: the loss is nan; nothing was updated."),
        ("hang:1:5", 1, "sparsepretrain: error: the others did not answer for parallel.timeout=60"),
    ],
)
def test_the_first_error_is_shown_once(tiny, fault, code, line):
    began = time.monotonic()
    words = (*DDP, f"parallel.grace={5 if fault.startswith('hang') else 120}")
    got, out, errors = end(start(tiny, *words, fault=fault))
    assert (got, len(errors)) == (code, 1), (out, errors)
    assert errors[0].startswith(line)
    assert time.monotonic() - began < 300
    assert out.count("step 1/8") == 1, "only one process prints"


def test_a_defect_shows_its_traceback(tiny):
    code, _, errors = end(start(tiny, *DDP, fault="defect:1:5"))
    assert code == 1
    assert errors[-1] == "sparsepretrain: error: rank 1: KeyError: 'a defect'"
    assert sum("Traceback" in line for line in errors) == 1


def test_an_error_of_all_processes_is_shown_once(tiny):
    code, _, errors = end(start(tiny, *DDP, "sparsity.targets=['*.nothing']"))
    assert (code, len(errors)) == (2, 1) and "sparsity.targets" in errors[0]
    assert not (tiny.root / "runs").exists()


def test_a_signal_to_one_process_stops_all_at_the_same_step(tiny):
    code, out, errors = end(start(tiny, *DDP, fault="SIGTERM:1:5"))
    assert (code, errors) == (143, []), out
    assert "stopped by a signal after step 3; checkpoint saved" in out
    assert directory(tiny).status() == 143
    code, out, errors = end(start(tiny, *DDP))
    assert (code, errors) == (0, []) and "(step 3)" in out
    assert directory(tiny).status() == 0
    one = tiny.train(*variant("sste"), "steps=8", "name=alone").directory
    for mine, theirs in zip(metrics(directory(tiny).path), metrics(one), strict=True):
        assert abs(mine["loss"] - theirs["loss"]) <= 2e-6


@pytest.mark.parametrize("launcher", [(), ("-m", "torch.distributed.run", "--nproc-per-node=2")])
def test_a_signal_to_the_launcher_leaves_a_checkpoint_and_a_status(tiny, launcher):
    process, place = start_until_a_checkpoint(tiny, launcher=launcher)
    process.send_signal(signal.SIGTERM)
    code, out, errors = end(process)
    assert "checkpoint saved" in out
    assert place.status() == 143
    if not launcher:
        assert (code, errors) == (143, [])


def test_ranks_save_and_end_with_a_killed_launcher(tiny):
    process, place = start_until_a_checkpoint(tiny)
    process.kill()
    _, out, _ = end(process)  # the ranks hold the other end of the pipe
    assert "checkpoint saved" in out and place.status() == 143


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)], ids=["term", "int"]
)
def test_two_signals_to_the_launcher(tiny, number, code):
    """The second comes while the processes save: all are gone soon, and the code is documented."""
    process, place = start_until_a_checkpoint(tiny)
    found = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True)
    children = found.stdout.split()
    assert len(children) >= 2
    began = time.monotonic()
    process.send_signal(number)
    time.sleep(0.05)
    process.send_signal(number)
    got, out, errors = end(process)
    assert time.monotonic() - began < 120
    assert (got, errors) == (code, []), (out, errors)
    assert not any(Path(f"/proc/{child}").exists() for child in children)
    assert Checkpoint(sorted(place.checkpoints.glob("step_*"))[-1]).problem() is None
