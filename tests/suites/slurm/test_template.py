"""scripts/slurm/train.sbatch on one and two nodes: saved, requeued, ended for good, refused."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from sparsepretrain.runs.directory import RunDirectory, find_runs
from support import ROOT
from support.slurm import ask, facts, steps, wait_for
from support.tiny_runs import assert_same_run

from .test_cells import QUIET, saved, trained_here

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(600)]

LONG = ("steps=100000", *QUIET)


class Template:
    """Jobs of the template."""

    def __init__(self, tiny):
        self.tiny, self.runs, self.log = tiny, tiny.root / "runs", tiny.root / "job.log"

    def submit(self, nodes, *words, time=30):
        options = [f"--nodes={nodes}", "--gpus-per-node=1", "--cpus-per-task=1", f"--time={time}"]
        options += ["--signal=B:TERM@60", f"--output={self.log}", "--parsable"]
        command = ["sbatch", *options, str(ROOT / "scripts/slurm/train.sbatch")]
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        # on two nodes batch.micro is the recipe's, which the processes cannot share
        own = self.tiny.overrides(*words)
        own = [word for word in own if nodes == 1 or word != "batch.micro=4"]
        done = subprocess.run(
            [*command, *own],
            env=os.environ | {"WARNING": "60", "PATH": path},
            capture_output=True, text=True, check=True, cwd=self.tiny.root,
        )  # fmt: skip
        return done.stdout.strip()

    def trains(self, least=5):
        wait_for(lambda: max(steps(self.runs).values(), default=0) >= least)
        (run,) = steps(self.runs)
        return run

    def ends(self, job, state):
        wait_for(lambda: facts(job)["JobState"] not in ("PENDING", "RUNNING", "COMPLETING"), 200)
        found = facts(job)
        assert found["JobState"] == state, (found, self.log.read_text())
        return found["ExitCode"].partition(":")[0]


@pytest.fixture
def template(cluster, tiny):
    assert shutil.which("torchrun", path=str(Path(sys.executable).parent))
    return Template(tiny)


@pytest.mark.parametrize("nodes", [1, 2])
def test_the_warning_saves_and_requeues(template, nodes):
    job = template.submit(nodes, *LONG)
    run = template.trains()
    ask("scancel", "--batch", "--signal=TERM", job)
    wait_for(lambda: facts(job).get("Restarts") == "1")
    at = saved(run)
    wait_for(lambda: steps(template.runs)[run] > at + 2)
    ask("scancel", job)
    template.ends(job, "CANCELLED")
    assert facts(job)["Restarts"] == "1", "scancel ends it"
    assert RunDirectory(run).status() == 143
    both = ["parallel=ddp", "parallel.nproc=2", "batch.micro=2"] if nodes == 2 else []
    assert_same_run(run, trained_here(template.tiny, *LONG, *both, end=saved(run)))


def test_preemption_requeues_once(template):
    job = template.submit(2, *LONG)
    run = template.trains()
    both = ["--partition=high", "--nodes=2", "--exclusive", "--wrap", "sleep 3"]
    ask("sbatch", "--output=/dev/null", *both)
    # Slurm counts the restart at once, while the processes still save
    wait_for(lambda: "continuing from" in template.log.read_text())
    at = saved(run)
    wait_for(lambda: steps(template.runs)[run] > at + 2)
    assert facts(job)["Restarts"] == "1"


def test_an_error_is_final_and_has_its_exit_code(template):
    job = template.submit(1, "optim.lr=1e30", "steps=9")
    assert template.ends(job, "FAILED") == "5"
    assert facts(job)["Restarts"] == "0"


def test_a_finished_run_completes(template):
    job = template.submit(2, "steps=4")
    assert template.ends(job, "COMPLETED") == "0"
    (run,) = find_runs([template.runs])
    assert run.environment()["processes"]["count"] == 2


@pytest.mark.parametrize(
    ("words", "line"), [([], "--time: expected more than the 60 s"), (["optim.lt=1"], "optim.lt")]
)
def test_mistakes_end_before_a_process_starts(template, words, line):
    job = template.submit(1, *words, time=30 if words else 1)
    assert template.ends(job, "FAILED") == "2"
    assert line in template.log.read_text()
    assert not template.runs.exists()
