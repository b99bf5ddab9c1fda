"""Pages of reports: Markdown tables, and the Markdown with its figures as SVG in one HTML file."""

from __future__ import annotations

import base64
import html
import io
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import matplotlib
from markdown_it import MarkdownIt
from matplotlib.figure import Figure

from sparsepretrain.errors import ConfigError
from sparsepretrain.files import write_atomic, writer_tag
from sparsepretrain.runs.directory import RunDirectory

STYLE = """
body {font: 15px/1.5 system-ui, sans-serif; color: #1c1c1c; max-width: 1250px; margin: auto;
      padding: 0 16px 48px}
h1 {font-size: 1.6em} h2 {margin-top: 2em; border-bottom: 1px solid #ddd}
table {border-collapse: collapse; display: block; overflow-x: auto; font-size: .88em}
td, th {border: 1px solid #ddd; padding: 3px 9px; text-align: left; vertical-align: top}
th {background: #f5f5f5} tr:nth-child(even) td {background: #fafafa}
pre {background: #f5f5f5; padding: 10px; overflow: auto; max-height: 30em; font-size: .85em}
img {max-width: 100%; height: auto}
"""

SVG: Any = {  # matplotlib 3.11 types the keys one by one
    "svg.fonttype": "none",  # text stays text: a tenth of the bytes of outlines
    "svg.hashsalt": "sparsepretrain",  # equal figures give equal bytes
    "font.family": "sans-serif",
}

POINTS = 4000
DPI = 80
"""Figures with more points have rasterized curves: a point takes about 18 bytes of SVG, and ten
figures have to stay below 1 MB."""


def html_page(markdown: str, figures: Mapping[str, Figure]) -> str:
    """Return the page as one self-contained text that loads nothing from a network."""
    body = MarkdownIt("commonmark", {"html": False}).enable("table").render(markdown)
    for name, figure in figures.items():
        body = body.replace(f'src="{html.escape(name)}"', f'src="{_data_url(figure)}"')
    title = html.escape(markdown.splitlines()[0].removeprefix("# "))
    head = f'<meta charset="utf-8"><title>{title}</title>'
    head += '<meta name="viewport" content="width=device-width, initial-scale=1">'
    head += f"<style>{STYLE}</style>"
    return f"<!doctype html><html lang='en'><head>{head}</head><body>{body}</body></html>\n"


def _data_url(figure: Figure) -> str:
    """Encode a figure as SVG in a data URL: ids of several figures on a page cannot clash."""
    artists = [a for axes in figure.axes for a in (*axes.lines, *axes.collections)]
    if sum(map(_points, artists)) > POINTS:
        for artist in artists:
            artist.set_rasterized(True)
    file = io.BytesIO()
    with matplotlib.rc_context(SVG):
        figure.savefig(file, format="svg", dpi=DPI, metadata={"Date": None})
    return "data:image/svg+xml;base64," + base64.b64encode(file.getvalue()).decode()


def _points(artist: Any) -> int:
    """Count the points that an SVG holds for a curve, a band or the dots of a scatter plot."""
    if artist.get_rasterized():
        return 0
    if hasattr(artist, "get_xydata"):
        return len(artist.get_xydata())
    # a scatter plot has one path, a marker, and an offset per dot; a band has one path
    return max(len(artist.get_offsets()), sum(len(path) for path in artist.get_paths()))


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return a Markdown table as lines."""
    body = [header, ["---"] * len(header), *rows]
    return ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in body]


@dataclass(slots=True)
class Page:
    """Markdown page with its figures."""

    lines: list[str] = field(default_factory=list)
    figures: dict[str, Figure] = field(default_factory=dict)
    """File name -> figure."""

    @property
    def markdown(self) -> str:
        """Text of the file."""
        return "\n".join(self.lines).rstrip() + "\n"


def write_page(out: Path, made: Page, name: str | None = None, *, page: bool) -> list[Path]:
    """Write pictures, Markdown (returned last) and the HTML page."""
    file = out / name if name else RunDirectory(out).report_file
    written = [*map(out.joinpath, made.figures)]
    try:
        for path in [*written, file]:
            path.parent.mkdir(parents=True, exist_ok=True)
        for picture, figure in made.figures.items():
            # several processes may write one page, also on several machines
            temporary = out / f".{writer_tag()}{Path(picture).suffix}"
            figure.savefig(temporary)
            os.replace(temporary, out / picture)
        write_atomic(file, made.markdown, tag=writer_tag())
        if page:
            written.append(file.with_suffix(".html"))
            text = html_page(made.markdown, made.figures)
            write_atomic(written[-1], text, tag=writer_tag())
    except OSError as error:
        where = f"{error.filename}: {error.strerror}"
        raise ConfigError(f"cannot write the report: {where}; choose another --out") from error
    return [*written, file]
