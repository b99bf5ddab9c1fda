"""The HTML page: what is in it, that it needs nothing else, and its size."""

from __future__ import annotations

import json
import re

import numpy as np
from test_report import LAYERS, make_run

from sparsepretrain.reports import report
from sparsepretrain.reports.page import html_page
from sparsepretrain.reports.plots import new_figure


def charts(page):
    """(traces, layout) of every chart of a page."""
    found = re.findall(r"Plotly\.newPlot\( \"[\w-]+\", (\[.*?\]), (\{.*?\}), \{\"", page)
    return [(json.loads(traces), json.loads(layout)) for traces, layout in found]


def numbers(coded):
    import base64

    return np.frombuffer(base64.b64decode(coded["bdata"]), dtype=np.float32)


def test_several_runs_are_one_page_that_needs_no_network(tmp_path):
    runs = [make_run(tmp_path / m, m, seed=0) for m in ("dense", "ste", "srste", "sste")]
    *_, page, markdown = report(runs, out=tmp_path / "out", page=True)
    text = page.read_text()
    assert (page.name, markdown.name) == ("report.html", "report.md")
    assert page.stat().st_size < 5_000_000
    own = text.replace(re.search(r"<script>.*?</script>", text, re.DOTALL)[0], "")
    assert not re.search(r"""(src|href)=["']?(http|//)""", own) and "<img" not in own
    shown = charts(own)
    maps = [traces[0] for traces, _ in shown if traces and traces[0].get("type") == "heatmap"]
    assert len(maps) == 4 and maps[0]["y"] == [
        name.removeprefix("transformer.h.") for name in LAYERS
    ]
    edges = numbers(maps[0]["x"])
    assert list(edges) == [0, 20, 40, 60, 80, 100], "columns end where the run ends"
    names = {trace.get("name") for traces, _ in shown for trace in traces}
    assert {"ste", "srste", "sste"} <= names
    assert "What differs" in own and "<td>sste</td>" in own


def test_one_run_has_its_coverage_and_environment(tmp_path):
    run = make_run(tmp_path / "run")
    about = json.loads((run / "environment.json").read_text())
    about["coverage"] = ["layer  out × in", "h.0    8 × 4"]
    (run / "environment.json").write_text(json.dumps(about))
    page = report([run], page=True)[-2].read_text()
    assert "<h2>Coverage</h2>" in page and "h.0    8 × 4" in page
    assert "0123456789abcdef" in page and "window:" in page


def test_a_page_of_long_runs_of_large_models_stays_below_5_mb():
    figure, panels = new_figure((8, 4), columns=4)
    steps = np.arange(5000)
    for axes in panels:
        for shift in range(13):
            axes.plot(steps, np.sin(steps) + shift, label=str(shift))
            axes.fill_between(steps, np.sin(steps), np.cos(steps))
    figures = {"curves": figure}
    for index in range(4):
        figures[str(index)], axes = new_figure((8, 4))
        axes.pcolormesh(np.random.default_rng(0).random((48, 1000)))
    page = html_page("# Large", figures)
    assert 4_000_000 < len(page.encode()) < 5_000_000
    assert len(numbers(charts(page)[0][0][-1]["y"])) >= 20


def test_charts_hold_the_numbers_of_the_figure():
    figure, (left, right) = new_figure((8, 4), columns=2)
    left.plot([1, 2, 3], [0.5, 0.25, 0.125], label="a", color="#0072B2", linestyle="--")
    left.fill_between([1, 2, 3], [0, 0, 0], [1, 1, 1])
    left.axhline(0)
    left.set_title("<b> & c", loc="left")
    right.plot([1.0], [1], "o", label="b")
    right.set_yticks([0, 1], ["x", "y"])
    right.set_ylim(1.5, -0.5)
    text = html_page("# A page\n\n![f](f.png)\n\nend <script>x</script>", {"f.png": figure})
    assert "<title>A page</title>" in text and "<script>x" not in text.split("<body>")[1]
    (first, layout), (second, other) = charts(text)
    band, line = first
    np.testing.assert_allclose(numbers(line["y"]), [0.5, 0.25, 0.125])
    assert line["line"]["dash"] == "dash" and line["name"] == "a" and band["fill"] == "toself"
    assert len(layout["shapes"]) == 1 and layout["shapes"][0]["xref"] == "x domain"
    assert second[0]["mode"] == "markers" and other["yaxis"]["ticktext"] == ["x", "y"]
    assert other["yaxis"]["range"] == [1.5, -0.5]
