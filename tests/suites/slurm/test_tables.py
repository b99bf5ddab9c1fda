"""Tables as Slurm jobs: stages, tuning, and judged runs that wait for it."""

import signal

import pytest
import yaml

from support.slurm import Command, ask, facts, jobs, steps, wait_for

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(600)]

LAUNCHER = ("hydra/launcher=submitit_slurm", "hydra.launcher.gpus_per_node=0")


class Table:
    """A table of tiny runs."""

    def __init__(self, tiny):
        self.tiny, self.runs = tiny, tiny.root / "runs/small"

    def write(self, **nano):
        table = {
            "title": "two methods",
            "rows": {"dense": ["sparsity=dense"], "STE": ["sparsity=ste"]},
            "metrics": {"loss": {"label": "loss", "key": "loss", "better": "lower"}},
            "scales": {"nano": {"overrides": self.tiny.overrides()[:-1], "seeds": 1, **nano}},
        }
        file = self.tiny.root / "mine/table/small.yaml"
        file.parent.mkdir(parents=True)
        file.write_text(yaml.safe_dump(table, sort_keys=False))

    def start(self, *words):
        own = ["--config-dir", "mine", f"runs_dir='{self.tiny.root / 'runs'}'"]
        return Command(["reproduce", "small", *own, *LAUNCHER, *words], self.tiny.root)

    def names(self):
        return sorted(run.parent.name for run in steps(self.runs))


@pytest.fixture
def table(cluster, tiny):
    return Table(tiny)


def test_stages_follow_in_the_job_of_their_run(table):
    table.write(stages=[{"name": "all", "evaluate": "validation"}])
    out = table.start().end(0)
    assert len(jobs()) == 2 and "small: 4 finished" in out and "STE, seed 0, all" in out
    assert table.start().end(0).count("nothing to do") == 4
    assert len(jobs()) == 2, "nothing is submitted again"
    for run in steps(table.runs):  # a stage that is left alone gets a job
        (run / "eval.jsonl").unlink()
    out = table.start("--only", "STE").end(0)
    assert "small: 2 finished" in out and len(jobs()) == 3


TUNE = {"seeds": [5], "grid": ["optim.lr=1e-3,1e30"]}


def test_judged_runs_wait_for_the_tuning_runs(table):
    table.write(tune=TUNE)
    command = table.start("--only", "dense", "steps=300", "checkpoint.every=0")
    wait_for(lambda: len(jobs()) == 3)
    (judged,) = [job for job in jobs() if "Dependency" in facts(job) and "_" not in job]
    assert facts(judged)["Dependency"].startswith("afterany:")
    out = command.end(0)
    assert "1 runs wait for the chosen settings as job" in out
    assert "exit code 5: diverged" in out, "the worst setting, and no failure of the table"
    assert f"dense, seed 0: job {judged} goes on" in out or "nothing to do" in out
    assert table.names() == ["dense", "dense--optim.lr_1e-3", "dense--optim.lr_1e30"]
    assert len(jobs()) == 3, "the judged run was submitted once"


def test_a_table_that_is_left_alone_trains_its_judged_runs(table):
    table.write(tune={"seeds": [5], "grid": ["optim.lr=1e-3,2e-3"]})
    command = table.start("--only", "dense")
    wait_for(lambda: len(jobs()) == 3)
    command.signal(signal.SIGINT)
    out = command.end(130)
    assert "detached; to end the jobs: scancel " in out
    wait_for(lambda: set(jobs().values()) == {"COMPLETED"}, 200)
    assert table.names() == ["dense", "dense--optim.lr_1e-3", "dense--optim.lr_2e-3"]
    out = table.start("--only", "dense").end(0)
    assert out.count("nothing to do") == 3 and len(jobs()) == 3


def test_a_canceled_tuning_run_leaves_no_judged_run(table):
    table.write(tune={"seeds": [5], "grid": ["optim.lr=1e-3"]})
    command = table.start("--only", "dense", "steps=100000", "checkpoint.every=0")
    wait_for(lambda: max(steps(table.runs).values(), default=0) > 3)
    (tuning,) = [job for job, state in jobs().items() if state == "RUNNING"]
    ask("scancel", tuning)
    assert "1 canceled" in command.end(1)
    wait_for(lambda: set(jobs().values()) <= {"COMPLETED", "CANCELLED"})
    assert table.names() == ["dense--optim.lr_1e-3"]
