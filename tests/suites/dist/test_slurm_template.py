"""The Slurm template, with programs in place of Slurm's: when a job is requeued, and when not."""

import os
import subprocess
import sys

import pytest

from sparsepretrain.runs.directory import RunDirectory
from support import ROOT

pytestmark = pytest.mark.dist

TEMPLATE = ROOT / "scripts" / "slurm" / "train.sbatch"
SRUN = """#!/bin/sh
echo "cpus=$SRUN_CPUS_PER_TASK $@" >> "{calls}"
trap 'echo "{{\\"exit_code\\": {left}}}" > "{file}"; exit 1' TERM
kill -TERM $PPID
while :; do sleep 0.1; done
"""
SCONTROL = """#!/bin/sh
echo "$@" >> "{calls}"
[ "$1" != show ] || echo first
"""


@pytest.mark.parametrize(("left", "requeued"), [(143, True), (4, False)])
def test_a_preempted_job_is_requeued(tiny, left, requeued):
    words = tiny.overrides()
    place = RunDirectory(tiny.directory())
    place.path.mkdir(parents=True)
    bin, calls = tiny.root / "bin", tiny.root / "calls"
    bin.mkdir()
    scripts = {
        "srun": SRUN.format(left=left, file=place.status_file, calls=calls),
        "scontrol": SCONTROL.format(calls=calls),
        "python": f'#!/bin/sh\nexec {sys.executable} "$@"\n',
    }
    for name, text in scripts.items():
        (bin / name).write_text(text)
        (bin / name).chmod(0o755)
    slurm = {"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_ID": "15007"}
    slurm |= {"SLURM_CPUS_PER_TASK": "48", "PATH": f"{bin}:{os.environ['PATH']}"}
    process = subprocess.run(["bash", str(TEMPLATE), *words], env=os.environ | slurm, timeout=120)
    assert process.returncode == left
    assert ("requeue 15007" in calls.read_text()) == requeued
    (srun,) = [line for line in calls.read_text().splitlines() if line.startswith("cpus=")]
    assert srun.startswith("cpus=48 ") and "--rdzv-endpoint=first:15007 " in srun
