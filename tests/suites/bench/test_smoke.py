"""``smoke`` on the CPU."""

from harness import Options, attempt
from smoke import works


def first():
    return next(iter(works(Options(quick=True)).items()))


def test_a_smoke_run_trains_saves_and_resumes():
    (case,) = attempt(*first())
    assert case.status == "ok" and case.detail["rounds"] == 3


def test_a_run_that_fails_is_reported(monkeypatch):
    def fails(*_, **__):
        raise TypeError("no such argument")

    monkeypatch.setattr("smoke.train", fails)
    (case,) = attempt(*first())
    assert case.status.startswith("failed") and case.ok is False
