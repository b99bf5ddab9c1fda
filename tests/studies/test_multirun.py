"""``train -m``: words, mistakes, our engine, and launchers of other plug-ins."""

import pickle
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from sparsepretrain import cli
from sparsepretrain.runs.directory import find_runs
from sparsepretrain.studies import plugins
from sparsepretrain.studies.launchers import SlurmQueueConf
from sparsepretrain.studies.multirun import read_axes, read_command
from support import ROOT


def train(*words: str) -> int:
    return cli.main(["train", "-m", *words])


def test_words_become_values_and_seeds():
    found = read_axes([
        "sparsity=ste,srste", "seed=0,1,2", "optim.lr=1e-3,2e-3", "steps=range(4,9,2)",
        "sparsity.targets=[ffn,attention]", "batch.size=4", "schedule=glob(co*)",
        "clip=choice(1,2)", "clip=3", "+ema=0.9,0.99",
    ])  # fmt: skip
    assert found.seeds == [0, 1, 2]
    assert found.values == {
        "sparsity": ["ste", "srste"], "optim.lr": ["0.001", "0.002"], "steps": ["4", "6", "8"],
        "schedule": ["constant", "cosine"], "ema": ["0.9", "0.99"],
    }  # fmt: skip
    assert found.fixed == ["sparsity.targets=[ffn,attention]", "batch.size=4", "clip=3"]
    assert read_axes(["seed=3,5,3"]).seeds == [3, 5] and read_axes(["seed=4"]).seeds == [4]


SLURM = "hydra/launcher=submitit_slurm"


@pytest.mark.parametrize(
    ("words", "lines"),
    [
        (["optim.lr=interval(0,1)"], ["optim.lr=interval(0,1): expected values, such as"]),
        (["name=a,b"], ["name=a,b: expected a plain directory name"]),
        (["sparsity=glob(q*)"], ["sparsity=glob(q*): expected at least one value"]),
        (["optim.lr=glob(*)"], ["optim.lr=glob(*): expected values"]),
        (["steps=range(0,4,0)"], ["steps=range(0,4,0): expected a step that is not 0"]),
        (["seed=range(0,1000000000)"], ["expected at most 10,000 values, got more"]),
        (
            ["seed=range(0,1000)", "steps=range(1,101)"],
            ["expected at most 10,000 runs, got 100,000: shorten a list"],
        ),
        (["steps=1,x"], ["steps=x: steps must be an integer, got 'x'"]),
        (["seed=a,b"], ["seed=a: seed must be an integer"]),
        (["sparsity=[ste,sste"], ["run: override 'sparsity=[ste,sste' cannot be read"]),
        (
            ["optim.lt=1,2", "sparsity=ste,srtse", "hydra/launcher=jolib", "hydra.run.dir=x"],
            [
                "hydra.run.dir=x: a run has a directory of its own",
                "hydra/launcher has no option 'jolib' (did you mean 'joblib'?)",
                "unknown key 'optim.lt' (did you mean 'optim.lr'?)",
                "sparsity has no option 'srtse'",
            ],
        ),
        (["hydra.job.chdir=true"], ["hydra.job.chdir=true: data and plug-ins are found"]),
        (["hydra.output_subdir=x"], ["hydra.output_subdir=x: a run keeps its configuration in"]),
        (["hydra.sweep.dir=x"], ["hydra.sweep.dir=x: the runs of a study are in runs_dir/NAME"]),
        (["hydra.searchpath=[x]"], ["hydra.searchpath=[x]: give --config-dir DIR"]),
        (
            [SLURM, "hydra.launcher.partitoin=gpu", "hydra.launcher.nodes=1,2"],
            ["'hydra.launcher.partitoin' (did you mean 'hydra.launcher.partition'?)", "one value"],
        ),
        (
            [SLURM, "hydra.launcher.timeout_min=1", "hydra.launcher.tasks_per_node=2"],
            ["tasks_per_node must be 1, got 2", "signal_delay_s must be below timeout_min (60 s)"],
        ),
        (
            ["hydra.launcher.partition=x", "hydra.sweeper.n_trials=3"],
            [
                "'hydra.launcher.partition': choose what has it with hydra/launcher=NAME",
                "'hydra.sweeper.n_trials': choose what has it with hydra/sweeper=NAME",
            ],
        ),
        ([SLURM, "hydra.launcher.mem_gb=a"], ["hydra.launcher.mem_gb must be a number or null"]),
        (["hydra/launcher=joblib", "hydra.launcher.n_jobs=a"], ["hydra.launcher.n_jobs: Value"]),
        (["hydra/sweeper=optuna"], ["hydra/sweeper=optuna needs a searched key"]),
        ([SLURM, "--jobs", "2"], ["--jobs is for this machine"]),
        (["optim.lr=0.1,0.2", "--cfg", "job"], ["--cfg prints one configuration"]),
    ],
)  # fmt: skip
def test_mistakes_are_lines_before_anything_is_written(words, lines, tmp_path, capsys):
    assert train(*words) == 2
    out, err = capsys.readouterr()
    assert not out and all(line in err for line in lines), err
    assert all(line.startswith("sparsepretrain: ") for line in err.splitlines())
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["train", "hydra/launcher=joblib"], "is for several runs: `sparsepretrain train -m`"),
        (["train", "hydra.run.dir=x"], "is for several runs"),
        (["train", "--jobs", "2"], "--jobs is for several runs: add -m"),
        (["train", "~seed"], "this syntax of Hydra is not supported"),
        (["reproduce", "match", "hydra/launcher=joblib"], "no stages of a table"),
        (["reproduce", "match", "hydra/sweeper=optuna"], "a table has its runs"),
        (["reproduce", "match", "hydra.launcher.x=1"], "unknown key 'hydra.launcher.x'"),
    ],
)
def test_words_of_hydra_belong_to_several_runs(words, line, capsys):
    assert cli.main(words) == 2
    assert line in capsys.readouterr().err


def test_a_launcher_in_a_file_comes_too_late(tmp_path, capsys):
    files = {
        "launcher": "defaults: [{override /hydra/launcher: submitit_local}]",
        "params": "hydra: {sweeper: {params: {seed: '1,2'}}}",
    }
    folder = tmp_path / "mine" / "experiment"
    folder.mkdir(parents=True)
    for name, text in files.items():
        (folder / f"{name}.yaml").write_text(f"# @package _global_\n{text}\n")
        assert train(f"experiment={name}", "--config-dir", str(tmp_path / "mine")) == 2
        assert "in a file comes too late" in capsys.readouterr().err


def test_a_file_of_ones_own_chooses_launcher_and_parameters(tmp_path):
    files = {
        "launcher/ours": {"defaults": ["submitit_slurm", "_self_"], "partition": "gpu", "nodes": 2},
        "sweeper/rates": {"defaults": ["basic", "_self_"], "params": {"optim.lr": "1e-3,2e-3"}},
    }
    for name, node in files.items():
        file = tmp_path / "mine/hydra" / f"{name}.yaml"
        file.parent.mkdir(parents=True)
        file.write_text(yaml.safe_dump(node))
    words = ["hydra/launcher=ours", "hydra.launcher.nodes=3", "hydra/sweeper=rates", "seed=1,2"]
    found = read_command(words, [tmp_path / "mine"])
    assert found.launcher.partition == "gpu" and found.launcher.nodes == 3
    assert found.part is not None and len(found.part.cells) == 4
    assert {cell.run.optim.lr for cell in found.part.cells} == {0.001, 0.002}


def test_our_launcher_wins_over_an_installed_one_of_the_same_name():
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher")
    found = read_command([SLURM, "hydra.launcher.max_num_timeout=7"])
    assert isinstance(found.launcher, SlurmQueueConf) and found.launcher.max_num_timeout == 7
    assert read_command([SLURM]).launcher.max_num_timeout > 0, "the other one has 0"


def test_batches_are_shared_by_all_nodes_of_a_run():
    words = ["parallel=ddp", "parallel.nproc=2", "batch.size=8", SLURM, "hydra.launcher.nodes=2"]
    found = read_command(words)
    assert found.part is not None and found.part.cells[0].run.batch.micro == 2


def test_several_runs_print_their_report_command(tiny, in_process, capsys):
    words = [*tiny.overrides("sparsity=dense,ste", "seed=1,2"), "name=pair"]
    assert train(*words, "--stop-after", "1") == 0
    *_, last = capsys.readouterr().out.splitlines()
    command = shlex.split(last)
    assert command[:2] == ["sparsepretrain", "report"]
    runs = {run.path for run in find_runs([tiny.root / "runs"])}
    assert {run.path for run in find_runs([Path(word) for word in command[2:]])} == runs
    names = sorted(f"{p.parent.name} {p.name[-2:]}" for p in runs)
    assert names == [f"sparsity_{m} s{s}" for m in ("dense", "ste") for s in (1, 2)]
    assert {p.parent.parent.name for p in runs} == {"pair"}
    assert train(*words, "--dry-run") == 0
    assert capsys.readouterr().out.count("from step 1") == 4
    assert train(*words, "--commands") == 0
    assert capsys.readouterr().out.count("sparsepretrain train runs_dir") == 0


def test_the_loader_composes_the_same_run_after_pickling(tiny):
    words = tiny.overrides("sparsity=dense,ste", "seed=1,2")
    found = read_command([*words, "hydra/launcher=joblib", "name=x"])
    assert found.part is not None
    loader = pickle.loads(pickle.dumps(found.loader))
    for cell in found.part.cells:
        config = loader.load_sweep_config(found.config, list(cell.words))
        plain = {key: value for key, value in config.items() if key != "hydra"}
        assert plain["seed"] == cell.seed and plain["name"] == cell.run.name
        assert config.hydra.overrides.task == list(cell.words)


def test_failures_of_jobs_can_be_pickled():
    failed = pickle.loads(pickle.dumps(plugins.CellFailed(-9, "killed")))
    assert failed.exit_code == 1 and str(failed) == "killed"


@pytest.mark.slow
def test_joblib_trains_all_cells_and_names_every_failure(tiny):
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher")
    words = tiny.overrides("optim.lr=1e-3,1e30", "seed=0,1", "name=x", "hydra/launcher=joblib")
    command = [sys.executable, "-m", "sparsepretrain", "train", "-m", *words]
    command.append("hydra.launcher.n_jobs=2")
    done = subprocess.run(command, capture_output=True, text=True, cwd=tiny.root)
    assert done.returncode == 1, done.stderr
    assert "x: 2 finished, 2 failed" in done.stdout and "2 of 4 cells failed" in done.stderr
    assert done.stdout.count("failed (exit code 5: diverged") == 2
    runs = find_runs([tiny.root / "runs"])
    assert len(runs) == 4 and all(
        "$ sparsepretrain train" in r.console_log.read_text() for r in runs
    )
    again = subprocess.run(command, capture_output=True, text=True, cwd=tiny.root)
    assert again.stdout.count("nothing to do") == 2


def test_hydras_plugins_are_imported_without_torch():
    code = "import sys, hydra_plugins.sparsepretrain\n"
    code += "sys.exit(bool({'torch', 'submitit', 'optuna'} & {*sys.modules}))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0
