"""A process group of one rank."""

import pytest
import torch.distributed as dist


@pytest.fixture
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def mesh(group):
    return dist.device_mesh.init_device_mesh("cpu", (1,))
