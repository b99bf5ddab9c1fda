"""A picture of a GPU suite: horizontal bars, goals as ticks; readable in grey."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

SHADES = {"triton": "0.25", "compiled reference": "0.6", "reference": "0.8"}
OTHER = "0.9"


def bars(rows: list[dict[str, Any]], result: dict[str, Any], path: Path) -> None:
    """Draw the fraction of a device copy of every row; does nothing without matplotlib.

    Args:
        rows: cases of the JSON with ``frac_of_copy`` and ``us``.
        result: the whole JSON, for the caption.
        path: PNG to write.
    """
    with contextlib.suppress(ImportError):
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot

        figure, axes = pyplot.subplots(figsize=(9, 1 + 0.22 * len(rows)))
        for place, row in enumerate(rows):
            value, us = row["frac_of_copy"], row["us"]
            shade = SHADES.get(row["impl"], OTHER)
            axes.barh(place, value, color=shade, edgecolor="black", linewidth=0.4)
            ends = [value * us["p50"] / us[p] for p in ("p90", "p10")]
            axes.plot(ends, [place, place], color="black", linewidth=0.8)
            if row["goal"] is not None:
                axes.plot([row["goal"]] * 2, [place - 0.45, place + 0.45], color="red")
        shape = ["×".join(map(str, row["shape"])) for row in rows]
        labels = [f"{r['case']}, {s}: {r['impl']}" for r, s in zip(rows, shape, strict=True)]
        axes.set_yticks(range(len(rows)), labels, fontsize=6)
        axes.invert_yaxis()
        axes.axvline(1.0, color="black", linewidth=0.8)
        axes.set_xlabel(
            "ideal bytes ÷ time ÷ bandwidth of a device copy (line: p10–p90; tick: goal)"
        )
        environment = result["environment"]
        device = environment["hardware"]["device"]
        torch_version = environment["packages"].get("torch")
        axes.set_title(f"{device}, torch {torch_version}, {environment['commit']}", fontsize=8)
        figure.tight_layout()
        figure.savefig(path, dpi=150)
        pyplot.close(figure)
