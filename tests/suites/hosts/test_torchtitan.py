"""torchtitan's Trainer with FSDP2 in one process: steps, resume, options, its export."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from sparsepretrain.kernels import nm_mask

pytestmark = pytest.mark.hosts
pytest.importorskip("torchtitan")
SCRIPT = Path(__file__).parents[2] / "support/titan_run.py"


def train(folder, method, steps=4, hf=False, **options):
    """What a run came to, its weights of evaluation and its masks."""
    words = [str(folder), str(steps), method, json.dumps(options), *["hf"] * hf]
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *words], capture_output=True, text=True, env=os.environ
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    dense, masks = torch.load(folder / "found.pt")
    return found, dense, masks


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("sste", {}),
        ("srste", {"decay": 0.1, "decay_on": "weight"}),
        ("tsrste", {"refresh": 2, "dense_tail": 0.0}),
    ],
)
def test_a_run_is_sparse_and_resumes_bit_exactly(tmp_path, method, options):
    found, dense, masks = train(tmp_path / "whole", method, **options)
    assert found["steps"] == found["total"] == 4 and found["holds"]
    assert 0 < found["metrics"]["flip_rate"] < 0.5 and found["metrics"]["density"] == 0.5
    assert len(masks) == 6
    part = tmp_path / "part/checkpoint"
    part.mkdir(parents=True)
    shutil.copytree(tmp_path / "whole/checkpoint/step-2", part / "step-2")
    again, its_dense, its_masks = train(tmp_path / "part", method, **options)
    assert again == found
    for mine, theirs in ((dense, its_dense), (masks, its_masks)):
        assert all(torch.equal(theirs[key], value) for key, value in mine.items())


def test_its_export_to_hugging_face_is_sparse(tmp_path):
    _, dense, _ = train(tmp_path, "sste", hf=True)
    (file,) = (tmp_path / "checkpoint/step-4").glob("*.safetensors")
    exported = load_file(file)
    assert not any("sparsity" in key for key in exported)
    for ours, theirs in (("w1", "gate_proj"), ("w2", "down_proj"), ("w3", "up_proj")):
        for block in range(2):
            weight = exported[f"model.layers.{block}.mlp.{theirs}.weight"]
            assert torch.equal(weight, dense[f"layers.{block}.feed_forward.{ours}.weight"])
            assert torch.equal(weight, weight * nm_mask(weight))
