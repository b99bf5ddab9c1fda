"""Figures and table of synthetic probe lines."""

import json
import runpy
from pathlib import Path

import numpy as np
import pytest
from test_report import make_run

from sparsepretrain.reports.runs import labels, load, pair

pytestmark = pytest.mark.usefixtures("quick_files")
STEPS = range(5, 101, 5)
DRAW = runpy.run_path(str(Path(__file__).parents[2] / "docs/examples/probe_figures.py"))
"""The example that draws the figures of probes."""


def make_probed(path: Path, noise: float, **config) -> Path:
    run = make_run(path, **config)
    generator, lines = np.random.default_rng(0), []
    for step in STEPS:
        predicted = -1.0 / step
        line = {"probe": "descent", "loss": 4.0, "predicted": predicted, "weights_only": predicted}
        for epsilon in (1, 0.1):
            actual = 0.5 * epsilon * predicted + noise * generator.normal()
            line[f"actual_{epsilon:g}"] = actual
        lines.append({"step": step, **line})
        scales = {"beta/a": 1.5, "beta/b": 1.4, "best/a": 1.6, "best/b": 1.5}
        lines.append({"step": step, "probe": "scale", **scales})
        counts = dict.fromkeys(("deaths", "births", "resurrections"), 0.01)
        counts |= {"age_10": 1, "age_50": 2, "age_90": step, "restless": 0.1, "untouched": 0.5}
        counts |= {f"flips_gap_{k}": 0.1 / (k + 1) for k in range(11)}
        lines.append({"step": step, "probe": "lifetime", **counts})
        sign = 1 if step % 10 else -1
        health = {"layer": "a", "wgrad_variance": 0.5, "wgrad_bias": 0.1 * sign}
        lines.append({"step": step, "probe": "estimator", **health})
    (run / "probes.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return run


def test_one_run_has_a_picture_of_every_probe(tmp_path):
    run = make_probed(tmp_path / "run", 0.0)
    (dots, line) = DRAW["estimator_figure"](load(run)).axes[0].lines[:2]
    assert np.allclose(dots.get_ydata()[:2], [0.1, -0.1])
    assert line.get_ydata()[-1] == pytest.approx(0)
    gaps = DRAW["lifetime_figure"](load(run)).axes[2].lines[0].get_ydata()
    assert gaps == pytest.approx([0.1 / (k + 1) for k in range(11)]), "in the order of numbers"


def test_the_example_draws_the_figures_of_the_paper(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    runs = [make_probed(tmp_path / "a", 0.0), make_probed(tmp_path / "b", 0.5, method="ste")]
    runs.append(make_run(tmp_path / "c", method="dense"))
    DRAW["main"](["."])
    names = {f"figure{number}.png" for number in (1, 2, 4)}
    names |= {
        f"{probe}-{tmp_path.name}-{run}.png" for probe in ("lifetime", "estimator") for run in "ab"
    }
    assert {file.name for file in tmp_path.glob("*.png")} == names
    assert "| sste | 1 | 10 | 1.000 | 0.0 % | 0.50 | 0.00 |" in capsys.readouterr().out
    data = [load(run) for run in runs]
    assert labels(data) == ["sste", "ste", "dense"], "probes are no part of a name"
    groups = pair(data, labels(data)).seeds()
    table = {row[:2]: row[2:] for row in DRAW["descent_table"](groups)[1:]}
    assert set(table) == {(name, part) for name in ("sste", "ste") for part in ("1", "0.1")}
    assert table["sste", "0.1"][:2] == ("10", "1.000")
    predicted, actual = DRAW["measured"]([data[1]], "descent", "predicted", "actual_1")[2:12, 1:].T
    correlation = np.corrcoef(predicted, actual)[0, 1]
    assert table["ste", "1"][1:3] == (f"{correlation:.3f}", f"{100 * np.mean(actual > 0):.1f} %")
    figure = DRAW["figure_2"](groups)
    first = figure.axes[0].collections[0].get_offsets()
    assert np.allclose(first, np.transpose([1 / np.array(STEPS), 0.5 / np.array(STEPS)]))
    titles = [axes.get_title() for axes in figure.axes[:3]]
    assert titles == [f"{what}\nε = 1" for what in ("sste", "ste", "share of steps below")]


def test_runs_without_probes_have_no_such_figures(tmp_path):
    run = load(make_run(tmp_path / "run"))
    assert DRAW["lifetime_figure"](run) is DRAW["estimator_figure"](run) is None
    assert DRAW["descent_table"]({"run": [run]}) == []
    assert not any(DRAW[f"figure_{number}"]({"run": [run]}) for number in (1, 2, 4))


def test_seeds_of_one_name_are_pooled(tmp_path):
    data = [load(make_probed(tmp_path / str(i), 0.1, seed=i)) for i in range(2)]
    groups = pair([*data, load(make_run(tmp_path / "c", "dense"))], ["a seed=0", "a seed=1", "b"])
    assert DRAW["descent_table"](groups.seeds())[1][:3] == ("a", "1", "20")
    flips, scales = DRAW["figure_4"](groups.seeds()).axes
    assert [line.get_label() for line in flips.lines] == ["a", "b"]
    assert np.allclose(scales.lines[0].get_ydata(), 1.45)
