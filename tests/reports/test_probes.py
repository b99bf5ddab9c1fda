"""Figures and table of synthetic probe lines."""

import json
from pathlib import Path

import numpy as np
import pytest

from sparsepretrain.errors import DataError
from sparsepretrain.reports import probes
from sparsepretrain.reports.report import report
from sparsepretrain.reports.runs import labels, load, pair
from support.run_directories import make_run

pytestmark = pytest.mark.usefixtures("quick_files")
STEPS = range(5, 101, 5)


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


def test_report_of_a_run_has_a_figure_of_every_recorded_probe(tmp_path):
    run = make_probed(tmp_path / "run", 0.0)
    names = {"descent", "descent_masks", "scale", "lifetime", "estimator"}
    pictures = {f"probe_{name}.png" for name in names}
    assert {file.name for file in report([run]) if "probe" in file.name} == pictures
    page = (run / "report.md").read_text()
    assert all(f"(plots/{picture})" in page for picture in pictures)
    assert "from 15% to 60% of the run" in page
    assert "| nano, sste, seed 0 | 1 | 10 | 1.000 | 0.0 % | 0.50 | 0.00 |" in page


@pytest.mark.parametrize("name", [{}, {"probe": None}, {"probe": ["scale"]}])
def test_a_line_that_names_no_probe_is_refused(tmp_path, name):
    run = make_probed(tmp_path / "run", 0.0)
    with (run / "probes.jsonl").open("a") as file:
        file.write(json.dumps({"step": 99} | name) + "\n")
    with pytest.raises(DataError, match=r"the line of step 99 with step.* names no `probe`"):
        report([run])


def test_figures_of_lifetime_and_estimator_show_the_recorded_values(tmp_path):
    drawn = probes.of_run(load(make_probed(tmp_path / "run", 0.0)))
    (dots, line) = drawn["probe_estimator"].axes[0].lines[:2]
    assert np.allclose(dots.get_ydata()[:2], [0.1, -0.1])
    assert line.get_ydata()[-1] == pytest.approx(0)
    gaps = drawn["probe_lifetime"].axes[2].lines[0].get_ydata()
    assert gaps == pytest.approx([0.1 / (k + 1) for k in range(11)]), "in the order of numbers"


def test_report_of_several_runs_compares_descent_and_scales(tmp_path):
    runs = [make_probed(tmp_path / "a", 0.0), make_probed(tmp_path / "b", 0.5, method="ste")]
    runs.append(make_run(tmp_path / "c", method="dense"))
    written = report(runs, tmp_path / "out")
    names = ("descent_masks", "descent", "scale")
    pictures = [f"probe_{name}.png" for name in names]
    assert [file.name for file in written if "probe" in file.name] == pictures
    assert "| sste | 1 | 10 | 1.000 | 0.0 % | 0.50 | 0.00 |" in written[-1].read_text()
    data = [load(run) for run in runs]
    assert labels(data) == ["sste", "ste", "dense"], "probes are no part of a name"
    groups = pair(data, labels(data)).seeds()
    table = {row[:2]: row[2:] for row in probes.descent_table(groups)[1:]}
    assert set(table) == {(name, part) for name in ("sste", "ste") for part in ("1", "0.1")}
    assert table["sste", "0.1"][:2] == ("10", "1.000")
    predicted, actual = probes.measured([data[1]], "descent", "predicted", "actual_1")[2:12, 1:].T
    correlation = np.corrcoef(predicted, actual)[0, 1]
    assert table["ste", "1"][1:3] == (f"{correlation:.3f}", f"{100 * np.mean(actual > 0):.1f} %")
    figure = probes.descent_figure(groups)
    first = figure.axes[0].collections[0].get_offsets()
    assert np.allclose(first, np.transpose([1 / np.array(STEPS), 0.5 / np.array(STEPS)]))
    titles = [axes.get_title() for axes in figure.axes[:3]]
    assert titles == [f"{what}\nε = 1" for what in ("sste", "ste", "share of steps below")]


def test_runs_without_probes_have_no_such_figures(tmp_path):
    run = make_run(tmp_path / "run")
    assert not probes.of_run(load(run)) and not probes.of_groups({"run": [load(run)]})
    assert not any("probe" in file.name for file in report([run]))
    assert "loss of a step's own batch" not in (run / "report.md").read_text()


def test_lines_that_are_not_finite_are_left_out(tmp_path):
    run = make_probed(tmp_path / "run", 0.0)
    with (run / "probes.jsonl").open("a") as file:
        line = {"step": 50, "probe": "descent", "loss": None, "predicted": None, "actual_1": None}
        file.write(json.dumps(line) + "\n")
    (row, _) = probes.descent_table({"run": [load(run)]})[1:]
    assert row[:4] == ("run", "1", "10", "1.000")


def test_seeds_of_one_name_are_pooled(tmp_path):
    data = [load(make_probed(tmp_path / str(i), 0.1, seed=i)) for i in range(2)]
    groups = pair([*data, load(make_run(tmp_path / "c", "dense"))], ["a seed=0", "a seed=1", "b"])
    assert probes.descent_table(groups.seeds())[1][:3] == ("a", "1", "20")
    flips, scales = probes.scale_figure(groups.seeds()).axes
    assert [line.get_label() for line in flips.lines] == ["a", "b"]
    assert np.allclose(scales.lines[0].get_ydata(), 1.45)
