"""A real Slurm of two virtual nodes on this host, with fake GPUs, in the namespaces of its script.

``scripts/test_slurm.sh`` starts the tests; without it there is no cluster.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

CONFIGURATION = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort=17017
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
# a requeued job waits until its old credential has expired: two minutes by default
AuthInfo=cred_expire=5
CredType=cred/munge
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool/%n
SlurmctldPidFile={root}/run/slurmctld.pid
SlurmdPidFile={root}/run/slurmd-%n.pid
SlurmctldLogFile={root}/log/slurmctld.log
SlurmdLogFile={root}/log/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
GresTypes=gpu
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=1,sched_interval=5,requeue_delay=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
MpiDefault=none
ReturnToService=2
MinJobAge=3600
KillWait=15
JobRequeue=1
PropagateResourceLimits=NONE
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port=17101 CPUs=2 CoresPerSocket=2 \
RealMemory=4000 Gres=gpu:2
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port=17102 CPUs=2 CoresPerSocket=2 \
RealMemory=4000 Gres=gpu:2
PartitionName=low Nodes=ALL Default=YES MaxTime=60 State=UP PriorityTier=1
PartitionName=high Nodes=ALL MaxTime=60 State=UP PriorityTier=10
"""


class Cluster:
    """Slurm's daemons, and questions to them."""

    def __init__(self, root: Path) -> None:
        self.root = root
        for name in ("state", "spool", "log", "run"):
            (root / name).mkdir()
        for number in range(2):  # null devices: Slurm counts them and sets CUDA_VISIBLE_DEVICES
            os.mknod(root / f"gpu{number}", 0o20666, os.makedev(1, 3))
        (root / "gres.conf").write_text(f"Name=gpu File={root}/gpu[0-1]\n")
        host = socket.gethostname().split(".")[0]
        (root / "slurm.conf").write_text(CONFIGURATION.format(root=root, host=host))
        os.environ["SLURM_CONF"] = str(root / "slurm.conf")

    def start(self) -> None:
        """Start munged, the controller and both nodes; wait until the nodes are idle."""
        Path("/etc/munge/munge.key").write_bytes(os.urandom(1024))
        os.chmod("/etc/munge/munge.key", 0o600)
        folders = ["/etc/munge", "/run/munge", "/var/log/munge", "/var/lib/munge"]
        subprocess.run(["chown", "-R", "munge:", *folders], check=True)
        for folder in folders:
            os.chmod(folder, 0o755 if folder == "/run/munge" else 0o700)
        drop = ["setpriv", "--reuid=munge", "--regid=munge", "--clear-groups"]
        subprocess.run([*drop, "munged", "--force"], check=True)
        subprocess.run(["slurmctld", "-f", os.environ["SLURM_CONF"]], check=True)
        for node in ("n1", "n2"):
            subprocess.run(["slurmd", "-f", os.environ["SLURM_CONF"], "-N", node], check=True)
        wait_for(lambda: ask("sinfo", "-h", "-N", "-p", "low", "-o", "%T").split() == ["idle"] * 2)

    def stop(self) -> None:
        """End the daemons by their pid files."""
        for file in [*(self.root / "run").glob("*.pid"), Path("/run/munge/munged.pid")]:
            if file.is_file():
                os.kill(int(file.read_text()), signal.SIGTERM)

    def clear(self) -> None:
        """Cancel all jobs and wait for their end."""
        ask("scancel", "--me")
        wait_for(lambda: not ask("squeue", "-h"))
        FORGOTTEN.update(jobs())


def ask(*command: str) -> str:
    """Return what a program of Slurm prints."""
    return subprocess.run(command, capture_output=True, text=True, timeout=60).stdout


FORGOTTEN = set[str]()
"""Jobs of earlier tests."""


def jobs() -> dict[str, str]:
    """Return job -> state of all jobs of this test."""
    shown = ask("squeue", "--me", "-h", "-r", "--states=all", "-o", "%i %T")
    lines = [line.split() for line in shown.splitlines()]
    return {job: state for job, state in lines if job not in FORGOTTEN}


def facts(job: str) -> dict[str, str]:
    """Return what ``scontrol show job`` says."""
    return dict(re.findall(r"(\w+)=(\S+)", ask("scontrol", "-o", "show", "job", job)))


def wait_for(condition: Callable[[], object], seconds: float = 120) -> None:
    """Wait until ``condition`` is true."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, (jobs(), ask("sinfo"))
        time.sleep(0.2)


def steps(root: Path) -> dict[Path, int]:
    """Return run directory -> lines of its record."""
    return {
        file.parent: file.read_bytes().count(b"\n")
        for file in sorted(root.rglob("metrics.jsonl"))
        if not file.parent.name.count(".old")
    }


class Command:
    """``sparsepretrain`` in a process group of its own, as from a terminal."""

    def __init__(self, words: Sequence[str], cwd: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "sparsepretrain", *words],
            cwd=cwd,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def signal(self, number: int) -> None:
        """Send a signal to the process group."""
        os.killpg(self.process.pid, number)

    def end(self, code: int | None = None, seconds: float = 240) -> str:
        """Wait for the end; return the output."""
        output, _ = self.process.communicate(timeout=seconds)
        assert code is None or self.process.returncode == code, (self.process.returncode, output)
        return output
