"""On a machine without a CUDA GPU these tests are skipped, all of them and nothing else.

``SPARSEPRETRAIN_TEST_DEVICE=cpu TRITON_INTERPRET=1`` rehearses those that need no CUDA graph: the
kernels are interpreted, in a process of their own.
"""

import os

import pytest
import torch

REHEARSAL = os.environ.get("SPARSEPRETRAIN_TEST_DEVICE") == "cpu"
if REHEARSAL and os.environ.get("TRITON_INTERPRET") != "1":
    raise RuntimeError("a rehearsal needs TRITON_INTERPRET=1")


def pytest_collection_modifyitems(items):
    here = os.path.dirname(__file__)
    for item in items:
        if not str(item.path).startswith(here) or torch.cuda.is_available():
            continue
        if not REHEARSAL or item.get_closest_marker("cuda"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))


@pytest.fixture
def device():
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
