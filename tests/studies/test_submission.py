"""Jobs that outlive the command, without a scheduler: states, lost ids, and local processes."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from sparsepretrain import cli
from sparsepretrain.console import Console
from sparsepretrain.runs.directory import find_runs
from sparsepretrain.studies import jobs, launchers, schedulers, submission
from sparsepretrain.studies.multirun import read_command
from sparsepretrain.studies.progress import StudyCell
from sparsepretrain.studies.reproduce import study_of, to_run
from sparsepretrain.studies.schedulers import JobState
from support.tiny_runs import assert_same_run

pytest.importorskip("submitit")
SLURM = ("hydra/launcher=submitit_slurm", "hydra.launcher.gpus_per_node=0", "name=x")


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ("JobState=CANCELLED Reason=None ExitCode=0:15", "CANCELLED"),
        ("JobState=TIMEOUT ExitCode=0:15", "TIMEOUT"),
        ("JobState=FAILED Reason=NonZeroExitCode ExitCode=137:0", "killed by SIGKILL (FAILED)"),
        ("JobState=OUT_OF_MEMORY ExitCode=0:125", "OUT_OF_MEMORY"),
        ("JobState=NODE_FAIL ExitCode=1:0", "NODE_FAIL, exit code 1"),
        (None, "forgotten by Slurm"),
    ],
)
def test_the_end_of_a_job_is_told_in_words(monkeypatch, facts, words):
    monkeypatch.setattr(schedulers, "_ask", lambda *command: facts)
    assert schedulers.slurm_ending("7") == words


def test_states_are_those_of_all_elements_of_an_array(monkeypatch):
    shown = "7_0|8|RUNNING|None\n7_1|9|PENDING|JobArrayTaskLimit\n10|10|COMPLETED|None\n"
    monkeypatch.setattr(schedulers, "_ask", lambda *command: shown)
    states = schedulers.slurm_states(["7_0", "7_1", "7_2"])
    assert states == {"7_0": JobState("RUNNING"), "7_1": JobState("PENDING", "JobArrayTaskLimit")}
    monkeypatch.setattr(schedulers, "_ask", lambda *command: None)
    assert schedulers.slurm_states(["7"]) is None, "no answer is not the end of all jobs"


def test_the_command_that_ends_jobs_is_short():
    assert schedulers.stop_command(["7_0", "7_1", "7_2", "7_5", "9"], local=False) == (
        "scancel 9 7_[0-2,5]"
    )
    assert schedulers.stop_command(["12", "7"], local=True) == "kill 7 12"


def test_ids_of_a_killed_submission_are_found_in_its_files(tmp_path):
    folder = tmp_path / "abc"
    folder.mkdir()
    for name in ("7_0_submitted.pkl", "7_1_submitted.pkl"):
        (folder / name).touch()
    entries = {f"cell {k}": {"folder": str(folder), "index": k} for k in range(3)}
    (tmp_path / "jobs.json").write_text(json.dumps(entries))
    ledger = submission.Ledger(tmp_path)
    with ledger.open():
        pass
    assert [ledger.id(f"cell {k}") for k in range(3)] == ["7_0", "7_1", ""]


class Slurm:
    """Stand-in for a cluster: each question for the states returns the next ones."""

    def __init__(self, monkeypatch, *answers):
        self.submitted, self.answers = [], iter(answers)
        monkeypatch.setattr(submission, "submit", self.submit)
        monkeypatch.setattr(schedulers, "slurm_states", lambda ids: next(self.answers))
        monkeypatch.setattr(schedulers, "slurm_ending", lambda number: "NODE_FAIL")
        monkeypatch.setattr(submission, "POLL_SECONDS", 0.0)

    def submit(self, conf, folder, name, gpus, jobs, extra):
        self.submitted.append((list(jobs), gpus, extra))
        first = 10 * len(self.submitted)
        return [f"{first}_{k}" for k in range(len(jobs))]


def states(**names):
    return {f"10_{key[1:]}": JobState(name) for key, name in names.items()}


def test_jobs_are_watched_until_all_are_over(tiny, monkeypatch, capsys):
    words = tiny.overrides("seed=0,1,2", "steps=2", *SLURM)
    command = read_command(words)
    cells = to_run([command.part], Console.silent())
    finished = tiny.train("name=run", "steps=2", f"runs_dir='{tiny.root}/runs/x'")
    assert finished.directory == cells[0].directory.path
    monkeypatch.setattr(StudyCell, "note", lambda cell: None)
    Slurm(
        monkeypatch,
        states(j0="PENDING", j1="PENDING"),
        states(j0="RUNNING", j1="PENDING"),
        states(j0="PENDING", j1="RUNNING"),
        states(j0="CANCELLED"),
        states(),
    )
    assert cli.main(["train", "-m", *words]) == 1
    out = capsys.readouterr().out
    assert "seed 0: " in out and "nothing to do" in out
    assert "run, seed 1: to run, job 10_0" in out and "run, seed 1: queued again" in out
    assert "run, seed 1: CANCELLED: job 10_0, to run" in out
    assert "job 10_1: NODE_FAIL; see " in out and "x: 1 finished, 1 canceled, 1 failed" in out


def test_runs_with_unknown_ranks_or_gpus_are_grouped_or_refused(tiny, monkeypatch, capsys):
    words = tiny.overrides("parallel=ddp", "batch.micro=2", *SLURM)
    assert cli.main(["train", "-m", *words]) == 2
    assert "parallel.nproc: expected the ranks on each node" in capsys.readouterr().err
    words = tiny.overrides("parallel=ddp", "parallel.nproc=1,2", "batch.micro=2", SLURM[0])
    words += ["parallel.device=auto", "name=x"]
    found = read_command(words)
    slurm = Slurm(monkeypatch, {}, {}, {})
    with study_of([found.part], Console.silent(), None, found.launcher) as study:
        study.run(to_run([found.part], Console.silent()))
    assert [gpus for _, gpus, _ in slurm.submitted] == [1, 2]


def test_local_jobs_get_the_gpus_that_this_machine_has(tiny, monkeypatch, capsys):
    words = tiny.overrides("parallel.device=auto", "hydra/launcher=submitit_local", "name=x")
    cells = read_command(words).part.cells

    def given(devices, *more):
        slurm = Slurm(monkeypatch)
        monkeypatch.setattr(submission, "visible_devices", lambda: devices)
        monkeypatch.setattr(schedulers, "local_states", lambda ids: {})
        found = read_command([*words, *more])
        with study_of([found.part], Console.silent(), None, found.launcher) as study:
            monkeypatch.setattr(study, "_end", lambda cell, state: None)
            study.run(to_run([found.part], Console.silent()))
        return [(gpus, extra.get("visible_gpus")) for _, gpus, extra in slurm.submitted]

    assert len(cells) == 1
    assert given(["0", "1"]) == [(1, [0])]
    assert given([]) == [(0, None)], "parallel.device=auto trains on the CPU there"
    with pytest.raises(submission.Refused, match=r"gpus_per_node: expected at most 1 GPUs, got 2"):
        given(["0"], "hydra.launcher.gpus_per_node=2")
    two = ("parallel=ddp", "parallel.nproc=2", "batch.micro=1")
    with pytest.raises(submission.Refused, match=r"nproc: expected at most 1 GPUs, got 2"):
        given(["0"], *two)
    assert given([], *two) == [(0, None)]


def test_a_job_runs_its_cell_and_notes_what_a_run_does_not(tiny, capsys):
    command = read_command(tiny.overrides("steps=2", "data.files=['/nowhere/x']", *SLURM))
    (cell,) = command.part.cells
    place = (cell.row, cell.column, cell.seed, cell.words)
    job = jobs.Job("run", ("train",), cell.run.plain, None, command.part, place)
    before = signal.getsignal(signal.SIGTERM)
    try:
        assert job() == 3
    finally:
        signal.signal(signal.SIGTERM, before)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR2})
    (failure,) = StudyCell("", cell.run).directory.failures().values()
    assert failure["exit_code"] == 3 and "/nowhere" in failure["error"]


def test_defaults_of_the_launchers_requeue():
    assert launchers.SlurmQueueConf().max_num_timeout > 0
    assert launchers.LocalQueueConf().array_parallelism == 1


@pytest.mark.slow
def test_local_jobs_outlive_the_command_and_continue_bit_exactly(tiny):
    """SIGINT detaches; `kill` saves and ends a job for good; the same command continues it."""
    quiet = ("steps=100000", "eval.batches=0", "checkpoint.every=0", "log.layers_every=0")
    words = ["train", "-m", *tiny.overrides(*quiet, "name=x"), "hydra/launcher=submitit_local"]
    command = [sys.executable, "-m", "sparsepretrain", *words]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}

    def start():
        return subprocess.Popen(command, cwd=tiny.root, start_new_session=True, **pipes)

    def wait(condition):
        deadline = time.monotonic() + 120
        while not condition():
            assert time.monotonic() < deadline
            time.sleep(0.1)

    def lines():
        files = list(tiny.root.glob("runs/x/*/*/metrics.jsonl"))
        return files[0].read_bytes().count(b"\n") if files else 0

    process = start()
    wait(lambda: lines() > 5)
    os.killpg(process.pid, signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 130 and "detached; to end the jobs: kill " in out
    number = out.partition("to end the jobs: kill ")[2].split()[0]
    before = lines()
    wait(lambda: lines() > before + 5)

    process = start()
    assert any(f"job {number} goes on" in line for line in process.stdout)
    os.kill(int(number), signal.SIGTERM)
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 1 and "x: 1 failed" in out
    (run,) = find_runs([tiny.root / "runs/x"])
    saved = max(int(p.name.removeprefix("step_")) for p in run.checkpoints.iterdir())

    command += ["--stop-after", str(saved + 2)]
    out, _ = start().communicate(timeout=120)
    assert f"from step {saved}, job " in out and "x: 1 partial" in out
    here = [*tiny.overrides(*quiet, "name=y"), "--stop-after", str(saved + 2)]
    assert cli.main(["train", *here]) == 0
    (same,) = find_runs([tiny.root / "runs/y"])
    assert_same_run(run.path, same.path)
