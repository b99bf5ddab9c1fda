"""``hydra/sweeper=optuna``: parameters, trials, storage, failures."""

import math

import pytest
import yaml
from hydra.core.utils import JobStatus

from sparsepretrain import cli
from sparsepretrain.errors import ConfigError, DivergedError
from sparsepretrain.runs.directory import find_runs
from sparsepretrain.studies import engine, plugins, search
from sparsepretrain.studies.progress import StudyCell
from support.tiny_runs import metrics

optuna = pytest.importorskip("optuna")


class Search:
    """Command of a search over tiny runs."""

    def __init__(self, tiny):
        self.tiny, self.storage = tiny, tiny.root / "search.log"

    def __call__(self, *words, trials=3, rate="tag(log,interval(1e-4,1e-2))"):
        own = ["name=find", f"optim.lr={rate}", "hydra/sweeper=optuna"]
        own += [f"hydra.sweeper.n_trials={trials}", f"hydra.sweeper.storage={self.storage}"]
        overrides = self.tiny.overrides("steps=4", "log.layers_every=0")
        return cli.main(["train", "-m", *overrides, *own, *words])

    @property
    def trials(self):
        backend = optuna.storages.journal.JournalFileBackend(str(self.storage))
        storage = optuna.storages.JournalStorage(backend)
        return optuna.load_study(study_name="find", storage=storage).trials

    def run(self, number):
        (found,) = find_runs([self.tiny.root / f"runs/find/trial_{number}"])
        return found


@pytest.fixture
def find(tiny, in_process):
    return Search(tiny)


def test_words_become_distributions():
    words = ["a=interval(0.1,1)", "b=tag(log,interval(1e-4,1e-2))", "c=int(interval(1,8))"]
    words += ["d=range(1,9,2)", "e=x,y", "f=3", "g=choice(1,2)", "g=4", "h=range(0.,1.,0.5)"]
    space = search.read_space({"f": "1,2", "i": {"j": "choice(a,b)"}}, words)
    kinds = space.distributions
    assert kinds["a"] == optuna.distributions.FloatDistribution(0.1, 1)
    assert kinds["b"] == optuna.distributions.FloatDistribution(1e-4, 1e-2, log=True)
    assert kinds["c"] == optuna.distributions.IntDistribution(1, 8)
    assert kinds["d"] == optuna.distributions.IntDistribution(1, 9, step=2)
    assert kinds["e"] == optuna.distributions.CategoricalDistribution(["x", "y"])
    assert kinds["h"] == optuna.distributions.FloatDistribution(0, 1, step=0.5)
    assert list(kinds) == ["i.j", "a", "b", "c", "d", "e", "h"]
    assert space.fixed == ["f=3", "g=4"]
    assert len(space.examples()) == 8 and "e=y" in space.examples()[-2]


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["a=interval(2,1)"], "a=interval(2,1): "),
        (["a=tag(log,interval(0,1))"], "a=tag(log,interval(0,1)): "),
        (["seed=1,2"], "seed=1,2: a search has one seed"),
        (["sparsity=glob(*)"], "sparsity=glob(*): expected the choices"),
    ],
)
def test_wrong_parameters_are_refused(words, line):
    with pytest.raises(ConfigError) as refused:
        search.read_space({}, words)
    assert str(refused.value).startswith(line)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["hydra.sweeper.n_trails=3"], "(did you mean 'hydra.sweeper.n_trials'?)"),
        (["hydra.sweeper.n_trials=0"], "hydra.sweeper.n_trials must be > 0"),
        (["hydra.sweeper.direction=down"], "direction must be one of minimize, maximize"),
        (["hydra/sweeper/sampler=tep"], "hydra/sweeper/sampler has no option 'tep'"),
        (
            ["hydra.sweeper.sampler.n_startup_trials=x"],
            "n_startup_trials must be of type int",
        ),
        (["hydra/sweeper/sampler=grid"], "optim.lr: a grid needs values"),
        (["hydra.sweeper.storage=nodb://x"], "hydra.sweeper.storage=nodb://x cannot be opened"),
        (["sparsity=ste,srtse"], "sparsity has no option 'srtse'"),
        (["--dry-run"], "they cannot be listed"),
    ],
)
def test_mistakes_are_one_line(find, capsys, words, line):
    assert find(*words) == 2
    assert line in capsys.readouterr().err
    assert not (find.tiny.root / "runs").exists()


def test_the_best_of_all_trials_is_found_and_finished_trials_are_kept(find, capsys):
    assert find("sparsity=dense,ste", "hydra.sweeper.n_jobs=1", trials=2) == 0
    assert [t.number for t in find.trials] == [0, 1]
    for trial in find.trials:
        run = find.run(trial.number)
        assert run.config()["optim"]["lr"] == trial.params["optim.lr"]
        assert run.config()["sparsity"]["name"] == trial.params["sparsity"]
        losses = [line["loss"] for line in metrics(run.path) if line.get("split")]
        assert trial.value == losses[-1]
    capsys.readouterr()
    assert find("sparsity=dense,ste", trials=3) == 0  # the total: one more
    out = capsys.readouterr().out
    assert "trial_2" in out and "trial_1, seed" not in out
    best = min(find.trials, key=lambda t: t.value)
    left = yaml.safe_load((find.tiny.root / "runs/find/optimization_results.yaml").read_text())
    assert left == {"name": "optuna", "best_params": best.params, "best_value": best.value}


def test_a_diverged_trial_is_the_worst_one(find):
    assert find("hydra/sweeper/sampler=grid", rate="1e-3,1e30", trials=2) == 0
    assert sorted(t.value for t in find.trials)[1] == math.inf


def test_a_failed_trial_stays_open_and_is_tried_again(find, capsys, monkeypatch):
    start = engine.start_child

    def fail(work, **about):
        return start(lambda console: 1, **about)

    monkeypatch.setattr(engine, "start_child", fail)
    assert find("hydra.sweeper.n_jobs=1") == 1
    assert "trial_0, seed 0: " in capsys.readouterr().err
    (trial,) = find.trials
    assert trial.state.name == "RUNNING"
    monkeypatch.setattr(engine, "start_child", start)
    assert find("hydra.sweeper.n_jobs=1", trials=2) == 0
    assert [t.state.name for t in find.trials] == ["COMPLETE", "COMPLETE"]
    assert find.trials[0].params == trial.params


def test_settings_that_no_call_can_train_are_failed_trials(find, capsys):
    """The recipe of 5 heads is refused when its model is built, after the words are checked."""
    heads = ["model.n_head=choice(5)", "hydra.sweeper.n_jobs=1"]
    assert find(*heads, trials=1) == 2 and "n_head" in capsys.readouterr().err


def test_an_interrupted_trial_continues_from_its_checkpoint(find, capsys, stop_after):
    stop_after(2)
    assert find("hydra.sweeper.n_jobs=1", trials=1) == 143
    assert [t.state.name for t in find.trials] == ["RUNNING"]
    stop_after(-1)
    capsys.readouterr()
    assert find("hydra.sweeper.n_jobs=1", trials=1) == 0
    assert "trial_0, seed 0: from step 2" in capsys.readouterr().out
    assert find.trials[0].value is not None


@pytest.mark.parametrize("name", sorted(search.SAMPLERS))
def test_every_sampler_proposes_values(name, tmp_path):
    if name == "cmaes":
        pytest.importorskip("cmaes")
    space = search.read_space({}, ["a=range(1,5)", "b=choice(x,y)"])
    sampler = {"name": name, **search.SAMPLERS[name], "seed": 1}
    conf = search.OptunaConf(sampler=sampler, storage=str(tmp_path / "s.log"))
    first = search.open_study(conf, "s", space)
    asked = [first.ask(space.distributions).params for _ in range(2)]
    second = search.open_study(conf, "s", space)
    asked.append(second.ask(space.distributions).params)
    assert all(set(params) == {"a", "b"} for params in asked)
    with pytest.raises(ConfigError, match="direction=maximize"):
        search.open_study(search.OptunaConf(direction="maximize", storage=conf.storage), "s", space)


@pytest.mark.parametrize(
    ("state", "code", "status"),
    [
        ("finished", 0, JobStatus.COMPLETED),
        ("failed", DivergedError.exit_code, JobStatus.COMPLETED),
        ("failed", 4, JobStatus.FAILED),
        ("canceled", 0, JobStatus.FAILED),
        ("stopped", 143, JobStatus.FAILED),
        ("partial", 0, JobStatus.FAILED),
    ],
)
def test_only_trials_that_end_have_a_loss(tiny, monkeypatch, state, code, status):
    """A canceled job has a loss as well, of the step at which it was canceled."""
    monkeypatch.setattr(plugins, "loss_of", lambda directory: 2.5)
    cell = StudyCell("x", tiny.load(), None, ())
    cell.state, cell.exit_code = state, code
    found = plugins.outcome(cell)
    assert found.status == status
    if status == JobStatus.COMPLETED:
        assert found.return_value == (2.5 if state == "finished" else math.inf)
    else:
        with pytest.raises(plugins.CellFailed, match=state if state != "failed" else "x"):
            _ = found.return_value
