"""HTML page: content, size, no network."""

import base64
import re

import numpy as np

from sparsepretrain.reports.page import html_page
from sparsepretrain.reports.plots import new_figure
from sparsepretrain.reports.report import report
from support.run_directories import make_run


def figures_of(page: str) -> list[str]:
    """Return the SVG text of every figure of a page."""
    found = re.findall(r'src="data:image/svg\+xml;base64,([^"]+)"', page)
    return [base64.b64decode(text).decode() for text in found]


def test_a_page_of_several_runs_needs_no_network_and_is_below_1_mb(tmp_path):
    runs = [make_run(tmp_path / m, m, seed=0) for m in ("dense", "ste", "srste", "sste")]
    *_, page, markdown = report(runs, out=tmp_path / "out", page=True)
    text = page.read_text()
    assert (page.name, markdown.name) == ("report.html", "report.md")
    assert page.stat().st_size < 1_000_000
    assert not re.search(r"""(src|href)=["']?(http|//)""", text) and "<script" not in text
    assert text.count("<img") == len(figures_of(text)) == 2
    assert "What differs" in text and "<td>sste</td>" in text


def test_a_page_of_long_runs_of_large_models_stays_below_1_mb():
    generator = np.random.default_rng(0)
    figure, panels = new_figure((8, 4), columns=4)
    for axes in panels:
        for shift in range(13):
            axes.plot(generator.random(5000) + shift, label=str(shift))
            axes.fill_between(np.arange(5000), generator.random(5000), 2)
    figures = {"curves": figure}
    for index in range(4):
        figures[str(index)], (axes,) = new_figure((8, 4))
        axes.pcolormesh(generator.random((48, 1000)), rasterized=True)
    page = html_page("# Large\n\n" + "\n".join(f"![x]({name})" for name in figures), figures)
    assert len(page.encode()) < 1_000_000 and len(figures_of(page)) == 5


def test_figures_with_many_dots_are_rasterized():
    generator = np.random.default_rng(0)
    figure, panels = new_figure((12, 8), columns=4, rows=3)
    for axes in panels:
        predicted = generator.lognormal(size=5000)
        actual = predicted * generator.normal(1, 0.1, size=5000)
        axes.scatter(predicted, actual, c=np.arange(5000), s=7, linewidths=0)
    page = html_page("# Dots\n\n![x](dots.png)", {"dots.png": figure})
    assert len(page.encode()) < 400_000  # 11 MB as dots


def test_figures_take_the_place_of_their_images():
    figures = {}
    for name in ("f.png", "g.png"):
        figures[name], (axes,) = new_figure((4, 2))
        axes.plot([1, 2, 3], [0.5, 0.25, 0.125])
        axes.set_title(f"<b> & {name}", loc="left")
    markdown = "# A page\n\n![f](f.png)\n![g](g.png)\n\nend <script>x</script>"
    text = html_page(markdown, figures)
    assert "<title>A page</title>" in text and "<script>" not in text
    first, second = figures_of(text)
    assert "&lt;b&gt; &amp; f.png" in first and "g.png" in second, "text stays text"
    assert html_page(markdown, figures) == text
