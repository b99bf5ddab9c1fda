"""Peak memory of one training process: prints bytes above what it had before building.

python -m sparsepretrain.bench.memory sparsity=sste
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

STEPS = 4


def main() -> None:
    """Build the run given by the overrides on the command line and take a few steps."""
    from sparsepretrain.bench.cpu import training
    from sparsepretrain.training.loop import train_step

    warm = training(["sparsity=sste", "batch.size=1", "batch.micro=1"])
    train_step(warm)  # loads what is loaded on first use
    del warm
    before = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # resets the peak
    t = training(sys.argv[1:])
    for _ in range(STEPS):
        train_step(t)
    sys.stdout.write(f"{_status('VmHWM') - before}\n")


def _status(key: str) -> int:
    text = Path("/proc/self/status").read_text(encoding="ascii")
    found = re.search(rf"{key}:\s+(\d+) kB", text)
    assert found is not None
    return int(found[1]) * 1024


if __name__ == "__main__":
    main()
