"""Training of ``smoke`` on the CPU."""

from harness import Options, attempt
from smoke import RUNS, works


def first():
    return next(iter(works(Options(quick=True)).items()))


def test_runs_cover_every_pair_of_settings():
    for i, j in ((0, 1), (0, 2), (1, 2)):
        assert len({(run[i], run[j]) for run in RUNS}) == 4


def test_a_smoke_run_trains_saves_and_resumes():
    (case,) = attempt(*first())
    assert case.status == "ok" and case.detail["rounds"] == 3


def test_a_run_that_fails_is_reported(monkeypatch):
    def fails(*_, **__):
        raise TypeError("no such argument")

    monkeypatch.setattr("smoke.train", fails)
    (case,) = attempt(*first())
    assert case.status.startswith("failed") and case.ok is False
