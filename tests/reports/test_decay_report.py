"""The figure of a decay search shows the numbers that were found."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sparsepretrain.errors import ConfigError
from sparsepretrain.reports.decay import PICTURE, decay_figure, decay_report


def make_search(root: Path, chosen: float | None = 1e-4) -> dict[str, Any]:
    rows = []
    for name, height in (("dense", 1.0), ("weak", 1.2), ("strong", 0.8)):
        (root / name).mkdir()
        lines = [{"step": s, "loss": 3.0, "flip_rate": height / s} for s in range(10, 60, 10)]
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (root / name / "metrics.jsonl").write_text(text)
        rows.append({"directory": str(root / name), "flip_rate": height / 40, "loss": 3.0})
    runs = [
        {**rows[1], "decay": 1e-5, "mu": 1.2, "verdict": "too small"},
        {**rows[2], "decay": 1e-4, "mu": 0.8, "verdict": "feasible"},
    ]
    return {
        "method": "tsrste", "steps": 40, "refresh": 10, "interval": [0.6, 0.95], "dense": rows[0],
        "runs": runs, "chosen": chosen, "config": {"name": "nano", "seed": 3},
    }  # fmt: skip


@pytest.mark.parametrize("chosen", [1e-4, None])
def test_the_figure_shows_what_was_found(tmp_path, chosen):
    left, right = decay_figure(make_search(tmp_path, chosen)).axes
    assert left.get_xscale() == "log" and right.get_yscale() == "log"
    ratios = left.lines[0]
    np.testing.assert_allclose(ratios.get_xdata(), [1e-5, 1e-4])
    np.testing.assert_allclose(ratios.get_ydata(), [1.2, 0.8])
    band = left.patches[0].get_bbox()
    assert (band.y0, band.y1) == (0.6, 0.95)
    labels = [text.get_text() for text in left.get_legend().get_texts()]
    assert ("chosen: λ = 0.0001" in labels) == (chosen is not None)
    names = [line.get_label() for line in right.lines]
    assert names == ["dense", "λ = 1e-05", "λ = 0.0001"]
    for line, height in zip(right.lines, (1.0, 1.2, 0.8), strict=True):
        np.testing.assert_array_equal(line.get_xdata(), [10, 20, 30, 40], "the segment only")
        np.testing.assert_allclose(line.get_ydata(), height / np.array([10, 20, 30, 40]))
    assert "every 10 steps" in right.get_ylabel()


def test_a_search_is_drawn_unless_a_run_is_gone(tmp_path):
    result = make_search(tmp_path)
    with pytest.raises(ConfigError, match="cannot draw the search in"):
        decay_report(result, tmp_path / "nowhere")
    assert decay_report(result, tmp_path) == tmp_path / PICTURE
    assert (tmp_path / PICTURE).read_bytes().startswith(b"\x89PNG")
    (tmp_path / "weak" / "metrics.jsonl").unlink()
    with pytest.raises(ConfigError, match=r"weak has no metrics\.jsonl"):
        decay_report(result, tmp_path)
