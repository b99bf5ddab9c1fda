"""Plain loops of several processes, compared with one."""

import json
import socket

from support import SUPPORT
from support.ranks import start_ranks

SHARDS = SUPPORT / "shards.py"


def compared(size, cases):
    """What ``shards.py`` found in ``size`` processes."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    started = start_ranks(size, SHARDS, json.dumps(cases), MASTER_PORT=str(port))
    outputs = [process.communicate(timeout=1500) for process in started]
    assert [process.returncode for process in started] == [0] * size, outputs
    return json.loads(outputs[0][0])
