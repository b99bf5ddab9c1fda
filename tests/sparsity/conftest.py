"""A process group of one rank, and a device that has sparse matmuls."""

import pytest
import torch.distributed as dist

from sparsepretrain.sparsity import coverage
from sparsepretrain.sparsity.matmuls import policy


@pytest.fixture
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def mesh(group):
    return dist.device_mesh.init_device_mesh("cpu", (1,))


@pytest.fixture
def semi_structured_device(monkeypatch):
    """A device whose sparse matmuls are correct, with the reference in place of its library."""
    monkeypatch.setattr(policy, "unsupported", lambda device, *_: None)
    monkeypatch.setattr(coverage, "version", lambda: "0.8.1")
