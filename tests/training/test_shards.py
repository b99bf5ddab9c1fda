"""What ``parallel=fsdp`` does before anything is sent; the rest is in tests/suites/dist."""

from pathlib import Path

import torch
from torch import nn

from sparsepretrain.training.shards import _materialize


def resident():
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_materialized_model_keeps_ties_and_allocates_no_memory():
    with torch.device("meta"):
        model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 9), nn.BatchNorm1d(9))
        model[1].weight = model[0].weight
        model[1].bias.requires_grad_(False)
        model.append(nn.Linear(8192, 8192))
    before = resident()
    _materialize(model)
    assert resident() - before < 8192 * 8192
    assert model[1].weight is model[0].weight
    assert not model[1].bias.requires_grad and model[2].running_mean.shape == (9,)
    tensors = [*model.parameters(), *model.buffers()]
    assert all(tensor.device.type == "cpu" for tensor in tensors)
