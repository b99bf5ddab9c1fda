"""The command ``train`` with several processes and a fault."""

import os
import subprocess
import sys

from support import SUPPORT
from support.ranks import variant

FAULT = SUPPORT / "fault.py"


def start(tiny, *words, fault="none:-1:0", launcher=()):
    """The command ``train`` in a process of its own; its plug-in is part of the run."""
    own = tiny.overrides(*variant("sste"), "steps=8", f"plugins=['{FAULT}']", *words)
    command = [sys.executable, *launcher, "-m", "sparsepretrain", "train", *own]
    env = {**os.environ, "FAULT": fault, "OMP_NUM_THREADS": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, env=env, **pipes)


def end(process):
    """Exit code, what was printed, and the error lines."""
    out, err = process.communicate(timeout=600)
    return process.returncode, out, [line for line in err.splitlines() if line.strip()]
