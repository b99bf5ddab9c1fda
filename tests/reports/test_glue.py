"""Each task of GLUE counts once."""

import json
from pathlib import Path

import pytest

from sparsepretrain.errors import DataError
from sparsepretrain.reports.runs import RunData, glue_scores, load


def run(root: Path, name: str, *scores: float) -> RunData:
    directory = root / f"{name}-{len(list(root.iterdir()))}"
    directory.mkdir()
    (directory / "config.yaml").write_text(f"data:\n  name: {name}\n")
    lines = [{"step": 0, "loss": 1.0}]
    lines += [
        {"step": i + 1, "split": "validation", "accuracy": 0.0, "accuracy_mm": 0.0, "score": s}
        for i, s in enumerate(scores)
    ]
    (directory / "metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    return load(directory)


def test_every_task_counts_once(tmp_path):
    runs = [
        run(tmp_path, "glue_mnli", 10.0, 80.0),  # the last evaluation counts
        run(tmp_path, "glue_cola", 40.0),
        run(tmp_path, "glue_cola", 50.0),  # another seed, not another task
        run(tmp_path, "squad", 99.0),
    ]
    assert glue_scores(runs) == {"cola": 45.0, "mnli": 80.0}
    with pytest.raises(DataError, match="has no evaluation"):
        glue_scores([run(tmp_path, "glue_rte")])
