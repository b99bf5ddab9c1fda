"""Host time of kernel calls: what is timed calls the kernels, and does all but their launch."""

from __future__ import annotations

from unittest.mock import patch

import pytest

from sparsepretrain.bench import host


def test_every_call_is_one_launch_whose_geometry_is_remembered():
    jit = pytest.importorskip("triton.runtime.jit")
    from sparsepretrain.kernels.triton import KERNELS, launch

    launches = []
    with patch.object(jit.JITFunction, "run", lambda kernel, *_, **__: launches.append(kernel)):
        calls = host._calls(KERNELS)
        del calls["torch.mul"]
        for call in calls.values():
            call()
        first = launch._tiling.cache_info()
        assert len(launches) == len(set(launches)) == len(calls)
        for call in calls.values():
            call()
    again = launch._tiling.cache_info()
    assert again.misses == first.misses and again.hits > first.hits
