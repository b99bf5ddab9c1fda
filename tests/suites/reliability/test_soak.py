"""Many steps and resumes: nothing grows, nothing is lost, nothing is there twice."""

import gc
import os
import threading
from pathlib import Path

import pytest

from sparsepretrain.config import freeze
from sparsepretrain.console import Console
from sparsepretrain.training.trainer import train
from support.tiny_runs import final_state, metrics

STEPS = int(os.environ.get("SPARSEPRETRAIN_TEST_SOAK_STEPS", 20_000))
PARTS = 11
"""Of a run that is resumed ten times."""


def resident() -> float:
    """Megabytes of this process in memory."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_twenty_thousand_steps_and_ten_resumes(tiny, record_property):
    run = tiny.load(
        f"steps={STEPS}", "checkpoint.every=250", "eval.every=500", "log.every=10",
        "log.layers_every=0", "model.dropout=0.1",
    )  # fmt: skip
    memory, handles, threads = [], [], []
    with open(os.devnull, "w") as nowhere:
        for part in range(1, PARTS + 1):
            assert train(run, Console(nowhere), stop_after=STEPS * part // PARTS) == 0
            memory.append(resident())
            handles.append(len(os.listdir("/proc/self/fd")))
            threads.append(threading.active_count())
    directory = freeze.run_directory(run)
    lines = metrics(directory)
    ends = {STEPS * part // PARTS for part in range(1, PARTS + 1)}
    expected = sorted({1, *range(10, STEPS + 1, 10), *ends})
    assert [line["step"] for line in lines if "split" not in line] == expected
    evaluated = [line["step"] for line in lines if "split" in line]
    assert evaluated == sorted(set(evaluated)) and evaluated[-1] == STEPS
    assert final_state(directory)["step"] == STEPS
    # threads of earlier tests may end meanwhile
    assert len(set(handles)) == 1 and max(threads) == threads[0], (handles, threads)
    # the first part loads libraries and compiles loops
    assert max(memory[2:]) < 1.02 * memory[1], memory
    record_property("injected", STEPS)
    record_property("reported", f"{memory[1]:.1f} to {max(memory[2:]):.1f} MB")
