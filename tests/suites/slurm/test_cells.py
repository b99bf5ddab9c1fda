"""Cells of ``train -m`` as Slurm jobs: requeued, canceled, killed, preempted, watched again."""

import contextlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from sparsepretrain.runs.directory import find_runs
from support.slurm import Command, ask, facts, jobs, steps, wait_for
from support.tiny_runs import assert_same_run, final_state, metrics

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(600)]

QUIET = ("eval.batches=0", "checkpoint.every=0", "log.layers_every=0")
ENDLESS = ("steps=100000", *QUIET)


def trained_here(tiny, *words, end):
    """Train the same run in one go, without Slurm; return its directory."""
    here = tiny.overrides(*words, "name=x", f"runs_dir='{tiny.root / 'here'}'")
    command = [sys.executable, "-m", "sparsepretrain", "train", *here, "--stop-after", str(end)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tiny.root)
    assert done.returncode == 0, done.stdout + done.stderr
    (run,) = find_runs([tiny.root / "here"])
    return run.path


def saved(run):
    return max(int(p.name.removeprefix("step_")) for p in (run / "checkpoints").glob("step_*"))


def test_an_array_of_two_cells_of_which_one_diverges(study):
    study.runs.mkdir(parents=True)
    command = study.start("optim.lr=1e-3,1e30", own=["hydra.launcher.array_parallelism=1"])
    out = command.end(1)
    assert "cells: 1 finished, 1 failed" in out and "exit code 5: diverged" in out
    assert re.search(r"job (\d+)_0\b", out) and re.search(r"job (\d+)_1\b", out)
    assert set(jobs().values()) == {"COMPLETED"}, "Slurm knows nothing of the failure"
    again = study.start("optim.lr=1e-3,1e30").end(1)
    assert "nothing to do" in again and "1 finished, 1 failed" in again


def test_two_ranks_save_and_continue_after_the_signal_of_the_time_limit(study):
    words = ("parallel=ddp", "parallel.nproc=2", "batch.micro=2", "steps=500", *QUIET)
    command = study.start(*words)
    study.trains()
    (job,) = jobs()
    ask("scancel", "--signal=USR2", job)
    wait_for(lambda: facts(job).get("Restarts") == "1")
    out = command.end(0)
    assert "queued again; it continues from its checkpoint" in out, out
    (run,) = steps(study.runs)
    assert "continuing from" in (run / "console.log").read_text()
    assert_same_run(run, trained_here(study.tiny, *words, end=500))


def test_the_time_limit_saves_and_continues(study):
    limits = ["hydra.launcher.timeout_min=2", "hydra.launcher.signal_delay_s=60"]
    command = study.start(*ENDLESS, own=limits)  # USR2 comes up to a minute early
    study.trains()
    (job,) = jobs()
    wait_for(lambda: facts(job).get("Restarts") == "1", 150)
    (run,) = steps(study.runs)
    at = saved(run)
    wait_for(lambda: steps(study.runs)[run] > at + 2)
    ask("scancel", job)
    out = command.end(1)
    assert "canceled" in out
    assert_same_run(run, trained_here(study.tiny, *ENDLESS, end=saved(run)))


def test_scancel_ends_a_cell_for_good_and_the_same_command_submits_it_again(study):
    command = study.start(*ENDLESS)
    study.trains()
    (job,) = jobs()
    ask("scancel", job)
    out = command.end(1)
    (run,) = steps(study.runs)
    at = saved(run)
    assert f"CANCELLED: job {job}, from step {at}" in out and "1 canceled" in out
    assert facts(job)["JobState"] == "CANCELLED" and facts(job)["Restarts"] == "0"
    out = Command([*study.words(*ENDLESS), "--stop-after", str(at + 2)], study.tiny.root).end(0)
    assert f"from step {at}" in out and "1 partial" in out
    assert_same_run(run, trained_here(study.tiny, *ENDLESS, end=at + 2))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_jobs_outlive_the_command_and_the_same_one_watches_them(study, number):
    words = ("steps=3000", "sparsity=ste,sste", *QUIET)
    command = study.start(*words)
    study.trains()
    before = set(jobs())
    command.signal(number)
    out = command.end({2: 130, 15: 143, 9: -9}[number])
    if number != signal.SIGKILL:
        array = min(before).partition("_")[0]
        assert f"detached; to end the jobs: scancel {array}_[0-1]" in out
        assert "the jobs go on, and the same command watches them again" in out
    out = study.start(*words).end(0)
    assert "goes on" in out and "cells: 2 finished" in out
    assert set(jobs()) == before, "nothing was submitted twice"


def test_two_commands_at_once_submit_each_cell_once(study):
    commands = [study.start("seed=0,1", "steps=400", *QUIET) for _ in range(2)]
    outputs = [command.end(0) for command in commands]
    assert all("cells: 2 finished" in out for out in outputs)
    assert len(jobs()) == 2


def test_a_command_killed_while_it_submits_finds_its_jobs(study):
    command = study.start("steps=3000", *QUIET)
    ledger = study.tiny.root / "runs/.submitit/jobs.json"
    study.trains()
    command.signal(signal.SIGKILL)
    command.end(-9)
    text = re.sub(r',\s*"id": "\d+"', "", ledger.read_text())
    assert '"id"' not in text and text != ledger.read_text()
    ledger.write_text(text)
    assert "goes on" in study.start("steps=3000", *QUIET).end(0)
    assert len(jobs()) == 1


def test_a_job_killed_by_the_kernel_is_a_row_with_its_reason(study):
    command = study.start(*ENDLESS)
    study.trains()
    (job,) = jobs()
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            line = file.read_text()
            if "submitit.core._submit" in line and "srun" not in line:
                os.kill(int(file.parent.name), signal.SIGKILL)
    out = command.end(1)
    assert f"job {job}: killed by SIGKILL (FAILED)" in out and "1 failed" in out, out


def test_a_preempted_job_continues(study):
    command = study.start(*ENDLESS, own=["+hydra.launcher.additional_parameters.exclusive=true"])
    study.trains()
    (job,) = jobs()
    both = ["--partition=high", "--nodes=2", "--exclusive", "--wrap", "sleep 3"]
    ask("sbatch", "--parsable", "--output=/dev/null", *both)
    (run,) = steps(study.runs)
    # Slurm counts the restart at once, while the run still saves
    wait_for(lambda: "continuing from" in (run / "console.log").read_text())
    assert facts(job)["Restarts"] == "1"
    at = saved(run)
    wait_for(lambda: steps(study.runs)[run] > at + 2)
    ask("scancel", job)
    command.end(1)
    assert_same_run(run, trained_here(study.tiny, *ENDLESS, end=saved(run)))


def test_two_nodes_train_one_run(study):
    words = ("parallel=ddp", "parallel.nproc=1", "batch.micro=2", "steps=30", *QUIET)
    study.start(*words, own=["hydra.launcher.nodes=2"]).end(0)
    (run,) = steps(study.runs)
    assert find_runs([run])[0].environment()["processes"]["count"] == 2
    same = ("parallel=ddp", "parallel.nproc=2", *words[2:])
    assert_same_run(run, trained_here(study.tiny, *same, end=30))


def test_gpus_are_counted_and_seen(study):
    words = ["hydra.launcher.gpus_per_node=1", "hydra.launcher.setup=[echo]"]
    study.start("steps=1,2", *QUIET, own=words).end(0)
    for job in jobs():
        assert "gres/gpu" in facts(job).get("TresPerNode", "") or "gpu:1" in str(facts(job))
    assert all(len(metrics(run)) for run in steps(study.runs))
    assert final_state(next(iter(steps(study.runs))))["step"]


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["hydra.launcher.partition=gpu"], "invalid partition specified: gpu"),
        (["hydra.launcher.gpus_per_node=9"], "Requested node configuration is not available"),
        (["+hydra.launcher.additional_parameters.wrong=1"], "unrecognized option '--wrong=1'"),
    ],
)
def test_a_refusal_of_slurm_is_one_line(study, words, line):
    process = subprocess.run(
        [sys.executable, "-m", "sparsepretrain", *study.words(), *words],
        capture_output=True, text=True, cwd=study.tiny.root,
    )  # fmt: skip
    assert process.returncode == 2
    assert line in process.stderr and process.stderr.count("\n") == 1, process.stderr
    assert set(jobs().values()) <= {"FAILED"}, "Slurm may keep what it refused"
