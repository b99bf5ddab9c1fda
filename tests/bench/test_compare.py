"""``bench compare``: what counts as a regression, and what is refused."""

import copy
import json

import pytest

from sparsepretrain import cli
from sparsepretrain.bench.compare import Change, Reading
from sparsepretrain.bench.kernels import Timed
from sparsepretrain.bench.timing import Case, ratio

HARDWARE = {"device": "GPU", "cores": 2, "threads": 1}


def results(*cases, suite="kernels", quick=False, hardware=HARDWARE):
    rows = [case.as_dict() for case in cases]
    return {"suite": suite, "quick": quick, "environment": {"hardware": hardware}, "cases": rows}


def timed(us, impl="triton", status="ok", spread=0.02):
    times = us and {"p10": us * (1 - spread), "p50": us, "p90": us * (1 + spread), "rounds": 9}
    return Timed(case="a", shape=[4, 4], impl=impl, status=status, us=times)


@pytest.fixture
def compare(tmp_path, capsys):
    """``compare(old, new, *words)``: exit code and what was printed."""

    def run(old, new, *words):
        paths = [tmp_path / "old.json", tmp_path / "new.json"]
        for path, content in zip(paths, (old, new), strict=True):
            path.write_text(content if isinstance(content, str) else json.dumps(content))
        code = cli.main(["bench", "compare", *map(str, paths), *words])
        return code, "".join(capsys.readouterr())

    return run


def test_times(compare):
    old = results(timed(100.0), timed(100.0, "reference"), timed(100.0, "gone"))
    new = results(timed(120.0), timed(80.0, "reference"), timed(1.0, "fresh"))
    code, text = compare(old, new)
    assert code == 1
    slow = next(line for line in text.splitlines() if line.startswith("a, 4×4, triton"))
    assert "1.200" in slow and slow.rstrip().endswith("regressed")
    assert "1.153 to 1.249" in slow  # 117.6/102 and 122.4/98
    assert "improved" in text and "new.json: a, 4×4, fresh" in text
    assert "1 cases are measured no more: a, 4×4, gone" in text
    assert "1 of 3 cases regressed by more than 10%: a, 4×4, triton" in text
    assert compare(results(timed(100.0)), new, "threshold=0.25")[0] == 0
    assert compare(new, new)[0] == 0


def test_noise_is_no_regression(compare):
    code, text = compare(results(timed(100.0, spread=0.3)), results(timed(120.0, spread=0.3)))
    assert code == 0 and "same" in text


def test_what_was_right_and_is_wrong(compare):
    code, text = compare(results(timed(100.0)), results(timed(None, status="wrong")))
    assert code == 1 and "regressed" in text
    skipped = results(timed(None, status="skipped: needs a CUDA GPU"))
    code, text = compare(results(timed(100.0)), skipped)
    assert code == 1 and "lost" in text
    assert compare(skipped, skipped)[0] == compare(skipped, results(timed(1.0)))[0] == 0


def test_ratios_and_their_better_side(compare):
    def file(step, speed, share):
        return results(
            ratio("step", [step] * 8, [1.0] * 8, at_most=1.05),
            ratio("speed", [speed] * 8, [1.0] * 8, at_least=15),
            ratio("neither", [speed] * 8, [1.0] * 8),
            Case(name="waiting", value=share, unit="%", at_most=3, detail={}),
            Case(name="start", value=8.0, unit="s", at_most=8, detail={"seconds": [7.9, 8, 8.1]}),
            suite="cpu",
        )

    code, text = compare(file(1.0, 16.0, 0.2), file(1.3, 12.0, 0.9))
    assert code == 1 and "2 of 5 cases regressed by more than 10%: step; speed" in text
    lines = [line.split() for line in text.splitlines()]
    verdicts = {words[0]: " ".join(words[-2:]) for words in lines if len(words) > 3}
    assert verdicts["neither"] == verdicts["waiting"] == "not judged"
    assert "0.975 to 1.025" in text  # of the start
    code, text = compare(file(1.3, 12.0, 0.9), file(1.0, 16.0, 0.2))
    assert code == 0 and text.count("improved") == 2


def test_a_value_of_nothing():
    for old, new in ((0.0, 1.0), (None, 1.0)):
        change = Change("x", Reading(old, more_is_better=False), Reading(new), 0.1)
        assert change.verdict == "not measured in both"
    more = Reading(2.0, more_is_better=True)
    assert Change("x", more, Reading(0.0, more_is_better=True), 0.1).verdict == "regressed"


def test_refusals(compare, tmp_path, capsys):
    good = results(timed(100.0))
    for bad, told in (
        (results(timed(1.0), suite="linear"), 'suite of {old} is "kernels", of {new} "linear"'),
        (results(timed(1.0), quick=True), "quick of {old} is false, of {new} true"),
        (results(timed(1.0), hardware={**HARDWARE, "device": "other"}), 'hardware of {old} is {{"'),
        ("{", "{new} holds no JSON"),
        ({**good, "cases": [{"name": "x"}]}, "{new} has a damaged case (KeyError('value'))"),
        ("[]", "{new} is no results file of `sparsepretrain bench`"),
    ):
        code, text = compare(copy.deepcopy(good), bad)
        places = {"old": tmp_path / "old.json", "new": tmp_path / "new.json"}
        assert code == 2 and told.format(**places) in text and len(text.splitlines()) == 1
    code, text = compare(good, good, "threshold=-1")
    assert code == 2 and "threshold must be ≥ 0, got -1" in text
    assert cli.main(["bench", "compare", "one.json"]) == 2
    assert "takes two results files, OLD and NEW, got one.json" in capsys.readouterr().err
    assert cli.main(["bench", "compare", "no.json", "none.json"]) == 2
    assert "cannot read no.json: No such file" in capsys.readouterr().err
