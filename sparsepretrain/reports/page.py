"""One HTML page of a report: its Markdown, with the pictures as charts that answer to the mouse.

Nothing is loaded from a network: plotly's script (4.8 MB) stands in the file.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from sparsepretrain.errors import ConfigError, needs

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

POINTS, LEAST, MOST = 8000, 20, 250
"""Points of all curves and cells of all heat maps: what is left of 5 MB beside the script; each has
so many at least and at most (a heat map along the steps)."""

DASHES = {"-": "solid", "--": "dash", "-.": "dashdot", ":": "dot", "None": None}
SYMBOLS = {"s": "square", "D": "diamond", "^": "triangle-up", "v": "triangle-down", "P": "cross"}

STYLE = """
body {font: 15px/1.5 system-ui, sans-serif; color: #1c1c1c; max-width: 1250px; margin: auto;
      padding: 0 16px 48px}
h1 {font-size: 1.6em} h2 {margin-top: 2em; border-bottom: 1px solid #ddd}
table {border-collapse: collapse; display: block; overflow-x: auto; font-size: .88em}
td, th {border: 1px solid #ddd; padding: 3px 9px; text-align: left; vertical-align: top}
th {background: #f5f5f5} tr:nth-child(even) td {background: #fafafa}
pre {background: #f5f5f5; padding: 10px; overflow: auto; max-height: 30em; font-size: .85em}
.charts {display: grid; gap: 8px;
         grid-template-columns: repeat(auto-fill, minmax(min(440px, 100%), 1fr))}
.charts > div {min-width: 0}
"""


def html_page(markdown: str, figures: Mapping[str, Figure]) -> str:
    """The page as one self-contained text.

    Args:
        markdown: what it says, from its title on; a picture in it is replaced by charts.
        figures: file name of a picture -> figure; those that are not in the text come at the end.

    Raises:
        ConfigError: plotly is not installed.
    """
    with needs("the HTML page", "plotly", "report", error=ConfigError):
        from plotly.offline import get_plotlyjs
    from markdown_it import MarkdownIt

    parts = [p for f in figures.values() for a in f.axes for p in (*a.lines, *a.collections)]
    points = max(LEAST, min(MOST, POINTS // sum(map(_rows, parts)) if parts else MOST))
    parser = MarkdownIt("commonmark", {"html": False}).enable("table")
    body = parser.render(markdown)
    others = ""
    for name, figure in figures.items():
        start = body.find(f'<p><img src="{html.escape(name)}"')
        end = body.find("</p>", start) + 4
        if start < 0:
            others += _charts(figure, points)
        else:
            body = f"{body[:start]}{_charts(figure, points)}{body[end:]}"
    body += f"<h2>Further charts</h2>{others}" if others else ""
    # neighbours fill the rows of one grid
    body = re.sub(r'</div>\s*<div class="charts">', "", body)
    title = html.escape(markdown.splitlines()[0].removeprefix("# "))
    head = f'<meta charset="utf-8"><title>{title}</title>'
    head += '<meta name="viewport" content="width=device-width, initial-scale=1">'
    head += f"<style>{STYLE}</style><script>{get_plotlyjs()}</script>"
    return f"<!doctype html><html lang='en'><head>{head}</head><body>{body}</body></html>\n"


def _charts(figure: Figure, points: int) -> str:
    from plotly.graph_objects import Figure as Chart

    options = {"displaylogo": False, "responsive": True}
    height = max(330, min(720, round(62 * figure.get_figheight())))
    charts = [
        Chart({"data": [*_traces(axes, points)], "layout": _layout(axes, height)}).to_html(
            full_html=False, include_plotlyjs=False, config=options
        )
        for axes in figure.axes
        if axes.get_label() != "<colorbar>"
    ]
    # a trace is a scatter unless it says otherwise
    text = re.sub(r"\s{2,}", " ", "".join(charts)).replace(',"type":"scatter"', "")
    return f'<div class="charts">{text}</div>'


def _traces(axes: Axes, points: int) -> Iterator[dict[str, Any]]:
    """Heat maps, bands and curves of a panel; a line across all of it is a shape.

    ``points``: as many of a curve at most.
    """
    from matplotlib.collections import PolyCollection, QuadMesh
    from matplotlib.colors import to_hex

    for mesh in axes.collections:
        if isinstance(mesh, QuadMesh):
            yield _heat_map(axes, mesh, points)
        elif isinstance(mesh, PolyCollection):
            colour = to_hex(np.asarray(mesh.get_facecolor())[0].tolist())
            fill = {"fill": "toself", "fillcolor": colour, "opacity": 0.15, "line": {"width": 0}}
            for path in mesh.get_paths():
                outline = np.asarray(path.vertices)
                x, y = outline[:: -(-len(outline) // (2 * points))].T
                yield {"type": "scatter", "mode": "lines", **_numbers(x=x, y=y), **fill} | {
                    "hoverinfo": "skip",
                    "showlegend": False,
                }
    named: set[str] = set()
    for line in axes.lines:
        x, y = (np.asarray(part, dtype=np.float64) for part in line.get_data())
        if _is_rule(axes, line) or not len(x):
            continue
        thin = np.unique(np.linspace(0, len(x) - 1, min(points, len(x))).round().astype(int))
        dash, marker = DASHES[str(line.get_linestyle())], str(line.get_marker())
        label = str(line.get_label()).removeprefix("_") if line.get_label() else ""
        label = "" if label.startswith("child") else label
        trace = {"type": "scatter", "name": label, **_numbers(x=x[thin], y=y[thin])}
        trace |= {"showlegend": bool(label) and label not in named}
        colour, opacity = to_hex(line.get_color()), line.get_alpha()
        if dash is None or len(x) == 1:
            symbol = SYMBOLS.get(marker, "circle")
            trace |= {"mode": "markers", "marker": {"color": colour, "symbol": symbol, "size": 7}}
        else:
            width = round(line.get_linewidth(), 1)
            trace |= {"mode": "lines", "line": {"color": colour, "dash": dash, "width": width}}
        yield trace | ({} if opacity is None else {"opacity": opacity})
        named.add(label)


def _rows(part: Any) -> int:
    """How many curves a line, a band or a heat map (two numbers per cell) is worth."""
    values = part.get_array() if hasattr(part, "get_coordinates") else None
    if values is not None:
        return len(values)
    return 2 if hasattr(part, "get_paths") else 1


def _heat_map(axes: Axes, mesh: Any, points: int) -> dict[str, Any]:
    values = np.ma.filled(mesh.get_array(), np.nan)
    edges = mesh.get_coordinates()[0, :, 0]  # of the columns, one more than there are
    steps = edges[1:]
    every = -(-len(steps) // points)
    ticks = [tick.get_text() for tick in axes.get_yticklabels()]
    names = ticks if len(ticks) == len(values) else [str(i) for i in range(len(values))]
    shown = values[:, ::every]
    last = np.minimum(np.arange(1, shown.shape[1] + 1) * every, len(steps)) - 1
    ends = np.broadcast_to(steps[last], shown.shape)
    return {
        "type": "heatmap",
        "y": names,
        **_numbers(
            x=np.append(edges[:-1:every], edges[-1]),
            z=np.log10(shown),
            customdata=np.stack((shown, ends), -1),
        ),
        "colorscale": "Viridis",
        "colorbar": {"title": {"text": "log₁₀ of the<br>flip rate"}},
        "hovertemplate": "%{y}<br>step %{customdata[1]}<br>flip rate %{customdata[0]:.2e}"
        "<extra></extra>",
    }


def _layout(axes: Axes, height: int) -> dict[str, Any]:
    from matplotlib.ticker import FixedLocator

    rules = [line for line in axes.lines if _is_rule(axes, line)]
    shapes = []
    for line in rules:
        (x0, x1), (y0, y1) = (np.asarray(part, dtype=float).tolist() for part in line.get_data())
        across = line.get_transform() == axes.get_yaxis_transform(which="grid")
        refs = {"xref": "x domain" if across else "x", "yref": "y" if across else "y domain"}
        style = {"color": "#555", "width": 1, "dash": DASHES[str(line.get_linestyle())]}
        shapes.append(
            {"type": "line", "x0": x0, "x1": x1, "y0": y0, "y1": y1, "line": style, **refs}
        )
    # a label beside the axis collides with long ticks where the page is narrow
    title = axes.get_title("left") or axes.get_title()
    title = "\n".join(filter(None, (title, axes.get_ylabel().replace("\n", " "))))
    names = len({line.get_label() for line in axes.lines if line not in rules})
    height += 11 * max(0, names - 3)  # of the legend below
    layout: dict[str, Any] = {"template": "none", "height": height, "shapes": shapes}
    layout["hovermode"] = "closest"
    layout["margin"] = {"l": 48, "r": 16, "t": 28 + 18 * len(title.splitlines()), "b": 48}
    layout["title"] = {"text": title.replace("\n", "<br>"), "font": {"size": 14}, "x": 0.01}
    layout["title"] |= {"y": 1, "yanchor": "top", "pad": {"t": 12}}
    layout["legend"] = {"orientation": "h", "font": {"size": 12}, "x": 0, "xref": "container"}
    layout["legend"] |= {"y": 0, "yref": "container", "yanchor": "bottom"}
    for key, axis in (("xaxis", axes.xaxis), ("yaxis", axes.yaxis)):
        label = axis.get_label_text() if key == "xaxis" else ""
        about: dict[str, Any] = {"automargin": True, "zeroline": False, "gridcolor": "#e5e5e5"}
        about["title"] = {"text": label, "font": {"size": 12}, "standoff": 4}
        layout[key] = about
        low, high = axes.get_xlim() if key == "xaxis" else axes.get_ylim()
        if axes.collections and hasattr(axes.collections[0], "get_coordinates"):
            about |= {"autorange": "reversed"} if key == "yaxis" else {}
        elif axis.get_scale() == "log":
            about |= {"type": "log", "exponentformat": "power", "dtick": 1}
        else:
            about["range"] = [float(low), float(high)]
            if isinstance(axis.get_major_locator(), FixedLocator):
                layout["showlegend"] = layout.get("showlegend", True) and key == "xaxis"
                labels = axis.get_major_formatter().format_ticks(
                    ticks := [*map(float, axis.get_ticklocs())]
                )
                about |= {"tickvals": ticks, "ticktext": labels}
    return layout


def _is_rule(axes: Axes, line: Any) -> bool:
    """Whether a line crosses the whole panel: one of its coordinates is a share of it."""
    across = (axes.get_yaxis_transform(which="grid"), axes.get_xaxis_transform(which="grid"))
    return line.get_transform() in across


def _numbers(**arrays: np.ndarray) -> dict[str, Any]:
    """Arrays as plotly writes them in the fewest bytes."""
    return {key: np.asarray(value, dtype=np.float32) for key, value in arrays.items()}
