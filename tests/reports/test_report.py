"""Figures and pages of synthetic run directories."""

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from sparsepretrain import registry
from sparsepretrain.errors import ConfigError
from sparsepretrain.reports import plots
from sparsepretrain.reports.differences import Difference
from sparsepretrain.reports.figures import of_runs
from sparsepretrain.reports.report import report
from sparsepretrain.reports.runs import differences, labels, load, pair, smooth
from support.run_directories import make_run

pytestmark = pytest.mark.usefixtures("quick_files")


def test_report_of_one_run_has_figures_and_numbers(tmp_path, drawn):
    run = make_run(tmp_path / "run")
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 101, "loss": null}\n')
    written = report([run])
    names = [path.relative_to(run).as_posix() for path in written]
    pictures = [f"plots/{name}.png" for name in ("loss", "flip_rate", "flip_rate_layers", "lr")]
    assert names == [*pictures, "report.md"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in written[:-1])
    page = written[-1].read_text()
    numbers = {"steps": "101 of 100", "train loss": "1.0000", "validation loss": "2.5000"}
    numbers |= {"peak flip rate": "1.00e-01, step 10", "density": "0.5000", "tokens/s": "128"}
    for name, number in {**numbers, "time": "0:50"}.items():
        assert f"| {name} | {number} |" in page
    assert all(f"({picture})" in page for picture in pictures)


def test_report_leaves_out_missing_records(tmp_path):
    run = make_run(tmp_path / "run", "dense", flips=False)
    (run / "environment.json").unlink()
    written = report([run], out=tmp_path / "out")
    assert [path.name for path in written] == ["loss.png", "lr.png", "report.md"]
    assert not (run / "plots").exists()


def test_heat_map_has_short_layer_names_and_masks_zeros(tmp_path):
    axes = plots.layers_figure(load(make_run(tmp_path / "run"))).axes[0]
    names = [tick.get_text() for tick in axes.get_yticklabels()]
    assert names == ["0.mlp.c_fc", "0.mlp.c_proj", "1.mlp.c_fc", "1.mlp.c_proj"]
    assert axes.get_ylabel() == "layer of transformer.h"
    shown = np.ma.getmaskarray(axes.collections[0].get_array())
    assert shown.shape == (4, 5) and shown[:, -1].all() and not shown[:, :-1].any()


@pytest.mark.parametrize(
    ("phases", "switches"),
    [
        ({1: 1.0}, []),
        ({1: 0.0, 10: 1.0, 83: 0.0}, [(10, "dense → sparse"), (83, "sparse → dense")]),
    ],
)
def test_phase_switches_are_marked_in_curves(tmp_path, phases, switches):
    run = load(make_run(tmp_path / "run", phases=phases))
    axes = plots.loss_figure(run).axes[0]
    raw, mean, validation, *_ = axes.lines
    np.testing.assert_allclose(raw.get_ydata(), 5.0 - 0.04 * np.arange(1, 101))
    assert mean.get_label() == "train, running mean over 2 steps"
    np.testing.assert_allclose(validation.get_ydata(), [3.5, 2.5])
    texts = [text.get_text().strip() for text in axes.texts]
    assert texts == [f"{change} at {step}" for step, change in switches]
    page = report([tmp_path / "run"])[-1].read_text()
    assert all(f"| {change} | at step {step} |" in page for step, change in switches)


def figures_of(runs: list[Path]) -> dict[str, Any]:
    data = [load(run) for run in runs]
    return of_runs(pair(data, labels(data)))


def test_flip_rates_of_different_intervals_are_labeled(tmp_path):
    runs = [make_run(tmp_path / "a"), make_run(tmp_path / "b", "dense", interval=5)]
    figure = figures_of(runs)["difference"]
    (legend,) = figure.legends
    assert "dense (flips over 5 steps)" in [text.get_text() for text in legend.get_texts()]
    flips = figure.axes[-1]
    assert flips.get_yscale() == "log" and "intervals differ" in flips.get_ylabel()
    np.testing.assert_array_equal(flips.lines[1].get_xdata(), 64 * np.arange(5, 101, 5))
    page = report(runs, out=tmp_path / "out")[-1].read_text()
    assert "| 1.00e-02 over 5 steps |" in page


def test_report_of_several_runs_compares_them(tmp_path):
    make_run(Path("runs/a"), "dense")
    make_run(Path("runs/b"), "sste", sparsity={"gamma": 0.2})
    written = report([Path("runs")])
    assert {path.parent for path in written} == {Path("reports/dense-sste")}
    pictures = [f"{name}.png" for name in ("difference", "overlay")]
    assert [path.name for path in written] == [*pictures, "report.md"]
    page = written[-1].read_text()
    row = "| sste | sste | 100 of 100 | 1.0200 | 2.5000 | 1.00e-02 | 1.00e-01, step 10 | 0.5000 |"
    assert row in page and "| minus dense |" in page and "| +0.0000 |" in page
    assert "| `sparsity.gamma` | – | 0.2 |" in page
    assert "`../../runs/b`" in page and "`train sparsity=sste`" in page
    paths = [make_run(tmp_path / str(i), seed=i, clip=i, flips=False) for i in range(8)]
    first, second = (report(some)[-1].parent.name for some in (paths, paths[1:]))
    assert first != second and first.startswith("8-runs-")
    axes = figures_of(paths)["overlay"].axes
    assert len(axes) == 2, "no flip rates"
    looks = {(line.get_color(), line.get_linestyle()) for line in axes[0].lines}
    assert len(looks) == 8


@pytest.mark.parametrize(
    ("method", "rule", "interval", "ratio"),
    [
        ("tsrste", "transposable", 5, "0.700"),
        ("srste", "magnitude", 5, "0.700"),
        ("tsrste", "magnitude", 5, None),
        ("tsrste", "transposable", 1, None),
        ("unknown", "magnitude", 5, None),
    ],
)
def test_flips_over_dense_are_shown_for_equal_mask_rules_and_intervals(
    tmp_path, method, rule, interval, ratio
):
    dense = make_run(tmp_path / "a", "dense", sparsity={"flip_rule": rule}, interval=interval)
    other = make_run(tmp_path / "b", method, sparsity={"decay": 1e-4}, interval=5, rate=0.007)
    lines = report([dense, other], tmp_path / "out")[-1].read_text().splitlines()
    header, _, _, second = [x.strip("| ").split(" | ") for x in lines if x[:2] == "| "][:4]
    found = dict(zip(header, second, strict=True)).get("flips / dense")
    assert found == ratio and any("μ of arXiv:2404.01847" in x for x in lines) == bool(ratio)


DENSE, STE, SSTE = ({"method": name} for name in ("dense", "ste", "sste"))
ONE_OF_8 = {"sparsity": {"n": 1, "m": 8}}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ([STE, SSTE], ["ste", "sste"]),
        ([{"seed": 0}, {"seed": 1}], ["seed=0", "seed=1"]),
        ([STE, SSTE, {**SSTE, "seed": 1}], ["ste", "sste seed=0", "sste seed=1"]),
        (
            [{"sparsity": {"gamma": 0.0}}, {"sparsity": {"gamma": 0.2}, "clip": 1.0}],
            ["gamma=0.0", "gamma=0.2"],
        ),
        ([{"runs_dir": "a"}, {"runs_dir": "b"}], ["r/0", "r/1"]),
        # evaluation settings are not part of a label
        ([{"eval": {"batches": 4}}, {"eval": {"batches": 8}, "name": "x"}], ["r/0", "r/1"]),
        (
            [DENSE, {"precision": {"name": "fp8_sim"}}, ONE_OF_8],
            ["dense", "sste fp8_sim", "sste 1:8"],
        ),
        (
            [DENSE, {"method": "tsrste", "sparsity": {"decay": 1e-4, "refresh": 40}}],
            ["dense", "tsrste"],
        ),
        ([ONE_OF_8, {"sparsity": {"n": 2, "m": 4}}], ["sste 1:8", "sste"]),
        ([STE, DENSE, {**DENSE, "experiment": "half"}], ["ste", "dense", "dense half"]),
        ([STE, STE, DENSE], ["ste r/0", "ste r/1", "dense"]),
    ],
)
def test_labels_name_what_differs(tmp_path, changes, expected):
    runs = [load(make_run(tmp_path / "r" / str(i), **c)) for i, c in enumerate(changes)]
    assert labels(runs) == expected
    if "clip" in changes[-1]:
        assert differences(runs)["clip"] == ["–", 1.0]


def test_unusable_paths_are_refused(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError) as error:
        report([tmp_path / "empty", tmp_path / "missing"])
    empty, missing = error.value.messages
    assert empty.startswith(f"{tmp_path / 'empty'} ") and "metrics.jsonl" in empty
    assert missing.startswith(f"{tmp_path / 'missing'} ")
    (tmp_path / "empty" / "metrics.jsonl").write_text("")
    with pytest.raises(ConfigError, match="has no records yet"):
        report([tmp_path / "empty"])
    run = make_run(tmp_path / "run")
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot write the report"):
        report([run], out=tmp_path / "file")
    (run / "environment.json").write_text("{")
    for runs, words in (([run], r"environment\.json cannot be read"), ([], "no run given")):
        with pytest.raises(ConfigError, match=words):
            report(runs)


@given(st.lists(st.floats(-100, 100) | st.just(math.nan), min_size=1, max_size=200))
def test_smooth_is_the_mean_of_the_last_values(values):
    mean, width = smooth(np.array(values))
    assert width == max(1, len(values) // 40)
    for i in range(len(values)):
        part = [v for v in values[max(0, i + 1 - width) : i + 1] if not math.isnan(v)]
        expected = np.mean(part) if part else math.nan
        np.testing.assert_allclose(mean[i], expected, atol=1e-9)


def test_reports_need_no_display_and_no_pyplot(tmp_path):
    run = make_run(tmp_path / "run")
    code = (
        "import sys; from pathlib import Path; from sparsepretrain.reports.report import report;"
        f"report([Path({str(run)!r})]);"
        "assert 'matplotlib.pyplot' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def with_scores(run: Path, task: str, scores: dict[str, list[float | None]]) -> Path:
    """Add scores to the two validation lines of a run."""
    config = yaml.safe_load((run / "config.yaml").read_text())
    (run / "config.yaml").write_text(yaml.safe_dump(config | {"task": {"name": task}}))
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for index, line in enumerate(line for line in lines if "split" in line):
        found = {name: values[index] for name, values in scores.items() if index < len(values)}
        line.update(found | {"signature": "a string"})
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return run


class Pictures:
    """Task that counts images."""

    unit = "images"
    metric = "top1"


@pytest.fixture
def pictures(monkeypatch):
    monkeypatch.setitem(registry._registered["task"], "pictures", Pictures)


def test_scores_have_panels_and_columns(tmp_path, pictures):
    runs = []
    for i, name in enumerate(("dense", "sste")):
        scores = {"top5": [60.0, 80.0], "top1": [30.0 + i, 50.0 + i], "perplexity": [33.1, 12.2]}
        runs.append(with_scores(make_run(tmp_path / name, name), "pictures", scores))
    page = report(runs[1:])[-1].read_text()
    assert "| top1 | 51.00 |" in page and "| perplexity | 12.20 |" in page
    assert "| images/s | 128 |" in page and "![metric](plots/metric.png)" in page
    main, other = plots.metric_figure(load(runs[1])).axes[0].lines
    assert (main.get_label(), other.get_label()) == ("top1", "top5"), "perplexity has no panel"
    np.testing.assert_array_equal(main.get_ydata(), [31.0, 51.0])
    figures = figures_of(runs)
    curves = figures["overlay"].axes[2]
    assert curves.get_ylabel() == "validation top1 (%)"
    assert [list(line.get_ydata()) for line in curves.lines] == [[30.0, 50.0], [31.0, 51.0]]
    page = report(runs, out=tmp_path / "out")[-1].read_text()
    head = next(line for line in page.splitlines() if line.startswith("| run | method"))
    assert "| top5 | top1 | perplexity | flip rate |" in head and head.endswith("| minus dense |")
    text = make_run(tmp_path / "text", "ste")
    with_scores(text, "plug-in", {"bleu": [None, 27.25]})
    assert plots.metric_figure(load(text)) is None, "a single point is not a curve"
    page = report([runs[0], text], out=tmp_path / "mixed")[-1].read_text()
    assert "| images/s |" in page and "| tokens/s |" in page


def last_loss(run: Path, value: float, before: float = 2.5) -> Path:
    """Replace the last validation loss."""
    text = (run / "metrics.jsonl").read_text()
    (run / "metrics.jsonl").write_text(text.replace(f'"loss": {before}}}', f'"loss": {value}}}'))
    return run


def cut(run: Path, last: int) -> Path:
    """Cut the record after step ``last`` and add an evaluation at step 0."""
    lines = [{"step": 0, "split": "validation", "loss": 4.5}]
    records = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    lines += [line for line in records if line["step"] <= last]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return run


def test_runs_of_unequal_length_are_compared_where_both_were_evaluated(tmp_path):
    runs = [cut(make_run(tmp_path / "dense", "dense"), 100)]
    runs += [cut(make_run(tmp_path / f"s{last}", "sste"), last) for last in (60, 40)]
    last_loss(runs[1], 3.75, before=3.5)
    page = report(runs, out=tmp_path / "out")[-1].read_text()
    assert "| +0.2500 (step 50) |" in page
    assert "+0.0000" not in page, "step 0 compares initial weights"


def test_differences_are_paired_by_seed_and_data(tmp_path):
    more: list[dict[str, Any]] = [{"seed": 0}, {"seed": 1}, {"seed": 0, "data": {"name": "other"}}]
    dense = [make_run(tmp_path / f"d{i}", "dense", **options) for i, options in enumerate(more)]
    sparse = [make_run(tmp_path / f"s{i}", "sste", **o) for i, o in enumerate([*more, {"seed": 2}])]
    for i, path in enumerate(dense):
        last_loss(path, 2.0 + i)
    for i, path in enumerate(sparse):
        last_loss(path, 2.25 + 2 * i)
    runs = [load(path) for path in [*sparse, *dense]]
    paired = pair(runs, labels(runs))
    assert paired.reference == "dense"
    assert paired.partners == [*runs[4:], None, *runs[4:]]
    page = report([*sparse, *dense], out=tmp_path / "out")[-1].read_text()
    for value in ("+0.2500", "+1.2500", "+2.2500"):
        assert f"| {value} |" in page
    assert "Without such a run: sste." in page and "95 % intervals over seeds" in page
    figures = of_runs(pair(runs[:2] + runs[4:6], labels(runs[:2] + runs[4:6])))
    train, validation, _ = figures["difference"].axes
    assert train.get_ylabel() == "train loss\n(cross-entropy, nats)\nminus that of dense"
    np.testing.assert_allclose(validation.lines[0].get_ydata(), [0, 0.75])
    (low, high) = Difference("", [0.25, 1.25]).interval()
    edges = validation.collections[0].get_paths()[0].get_extents().intervaly
    np.testing.assert_allclose(edges, [min(0, low), high])


def test_without_a_dense_run_the_first_is_the_reference(tmp_path):
    runs = [make_run(tmp_path / "a", "ste"), last_loss(make_run(tmp_path / "b", "sste"), 2.75)]
    page = report(runs, out=tmp_path / "out")[-1].read_text()
    assert "Differences are to ste" in page and "| +0.2500 |" in page
    page = report([runs[0], make_run(tmp_path / "c", seed=1)], out=tmp_path / "two")[-1].read_text()
    assert "No two runs share seed" in page
    assert not (tmp_path / "two" / "difference.png").exists()


def test_a_narrower_dense_model_is_compared_with_the_one_of_the_methods(tmp_path):
    models = {"half": {"width": 1}, "dense": {"width": 2}, "sste": {"width": 2}}
    methods = {"half": "dense"}
    paths = [make_run(tmp_path / k, methods.get(k, k), model=m) for k, m in models.items()]
    runs = half, dense, _ = [load(path) for path in paths]
    assert pair(runs, list(models)).partners == [dense, dense, dense]
    assert not pair([half], ["half"]).has_pairs


def test_runs_with_other_evaluation_samples_are_not_paired(tmp_path):
    paths = []
    for i, samples in enumerate(("a", "a", "b", None)):
        paths.append(make_run(tmp_path / str(i), "ste" if i else "dense"))
        (paths[-1] / "environment.json").write_text(json.dumps({"hashes": {"evaluation": samples}}))
    dense, same, *others = [load(path) for path in paths]
    assert pair([dense, same, *others], list("abcd")).partners == [dense, dense, None, None]
    assert "Without such a run: ste" in report(paths, out=tmp_path / "out")[-1].read_text()


def test_short_records_are_drawn_as_points(tmp_path):
    run = make_run(tmp_path / "run", interval=100)
    shown = plots.flip_figure(load(run))
    assert shown is not None and len(shown.axes[0].lines) == 1
    assert shown.axes[0].lines[0].get_marker() == "."
    assert shown.axes[0].lines[0].get_label() == "as logged"
    assert plots.layers_figure(load(run)) is None
