"""``checkpoint.background`` with two processes: equal files, and one outcome for all."""

import pytest

from sparsepretrain.runs.checkpoint import Checkpoint
from sparsepretrain.runs.directory import RunDirectory
from support.launches import FAULT, end, start
from support.ranks import Case, train_with, variant
from support.tiny_runs import assert_same_run

pytestmark = [pytest.mark.dist, pytest.mark.timeout(900)]

BACKGROUND = "checkpoint.background=true"
FULL_DISK = """\
import safetensors.torch

original, calls = safetensors.torch.save_file, []

def save_file(tensors, file, *header):
    calls.append(file)
    if len(calls) == 4:
        raise OSError(28, "No space left on device")
    original(tensors, file, *header)

safetensors.torch.save_file = save_file
"""


def test_the_files_are_those_of_a_save_that_is_waited_for(tiny):
    words = (*variant("tsrste"), "steps=8", "ema=0.9")
    cases = [
        Case(f"{name} {mode}", (*words, f"checkpoint.background={mode}"), parallel=parallel)
        for name, parallel in (("ddp", ("parallel=ddp",)), ("fsdp", ("parallel=fsdp",)))
        for mode in ("false", "true")
    ]
    found = train_with(tiny, 2, cases)
    for name in ("ddp", "fsdp"):
        now, later = (found[f"{name} {mode}"] for mode in ("false", "true"))
        assert_same_run(now, later)
        paths = sorted((now / "checkpoints").glob("step_*/*"))
        assert len({path.parent.name for path in paths}) == 2
        for path in paths:
            if path.name not in ("config.yaml", "manifest.json"):
                other = later / "checkpoints" / path.parent.name / path.name
                assert other.read_bytes() == path.read_bytes(), other


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_a_full_disk_stops_all_processes(tiny, parallel):
    """At the next step, though only the first process writes; then the run goes on."""
    plugin = tiny.root / "full_disk.py"
    plugin.write_text(FULL_DISK)
    words = (f"parallel={parallel}", "parallel.nproc=2", "parallel.timeout=120", BACKGROUND)
    words = (*words, "steps=60", "checkpoint.every=5", "eval.every=0")
    own = f"plugins=['{FAULT}','{plugin}']"
    code, out, errors = end(start(tiny, *words, own))
    assert (code, len(errors)) == (4, 1), (out, errors)
    assert errors[0].startswith("sparsepretrain: checkpoint error: cannot write checkpoint")
    assert "step_00000010: disk full" in errors[0]
    plugin.write_text("")  # before it is loaded here
    directory = RunDirectory(tiny.directory(*variant("sste"), "steps=8", *words, own))
    assert directory.status() == 4 and directory.record()[-1]["step"] < 60
    (left,) = directory.checkpoints.iterdir()
    assert left.name == "step_00000005" and Checkpoint(left).problem() is None
    code, out, errors = end(start(tiny, *words, own))
    assert (code, errors) == (0, []) and "(step 5)" in out
