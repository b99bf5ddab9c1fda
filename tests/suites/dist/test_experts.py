"""Models with experts in two processes give the answer of one: see docs/moe.md."""

import itertools
import json
import socket

import pytest

from support import SUPPORT
from support.ranks import start_ranks

pytestmark = [pytest.mark.dist, pytest.mark.timeout(1800)]

CASES = [
    *itertools.product(("mixtral", "qwen3_moe"), ("srste", "sste", "tsrste"), ("ddp", "fsdp")),
    ("gpt_oss", "sste", "ddp"),
    ("gpt_oss", "sste", "fsdp"),
]


def test_experts_of_two_processes():
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    started = start_ranks(2, SUPPORT / "experts.py", json.dumps(CASES), MASTER_PORT=str(port))
    outputs = [process.communicate(timeout=1500) for process in started]
    assert [process.returncode for process in started] == [0, 0], outputs
    for case, found in zip(CASES, json.loads(outputs[0][0]), strict=True):
        assert found["loss"] <= 1e-12 and found["state"] <= 1e-10, (case, found)
        assert found["masks"] and found["proof"], (case, found)
