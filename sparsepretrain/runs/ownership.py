"""Owner of a run directory, also across the machines of a cluster.

A lock of the kernel (``flock``) may hold on one machine only: NFS, Lustre and FUSE differ in that.
The owner of a directory therefore writes a file, and renews a sign of life in it. A file system
needs two properties: creating a name fails if the name exists, and opening a file shows what other
machines wrote before. NFS has both.

Successors are decided by names, too. A process that finds a dead owner with token ``T`` creates
``.owner.after-T``, which only one process can. If that process dies before it has replaced
``.owner``, its own token continues the chain.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from sparsepretrain.errors import ConfigError, warn_once
from sparsepretrain.files import sync

BEAT_SECONDS = 10.0
"""Seconds between two signs of life."""

SILENCE_SECONDS = 120.0
"""Seconds without a sign of life, while another machine watches, after which an owner is dead.

Twelve missed signs: NFS clients may show attributes of a file that are a minute old.
"""

POLL_SECONDS = 1.0
"""Seconds between two looks at the sign of life of an owner on another machine."""

WAIT_SECONDS = 0.02
"""Least seconds between two attempts to own a file that is held for moments."""

READS = 5
"""Attempts to read a file that another machine is changing."""

WIDTH = 1024
"""Bytes of the file. A sign of life overwrites all of them in place: a process that lost its
directory while it was suspended then writes into a file that has no name any more."""

JOBS: Mapping[str, str] = {
    "SLURM_JOB_ID": "Slurm",
    "PBS_JOBID": "PBS",
    "LSB_JOBID": "LSF",
    "FLUX_JOB_ID": "Flux",
    "OAR_JOB_ID": "OAR",
}
"""Environment variable with the id of a job -> scheduler."""

NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK)
"""Errors of file systems without hard links."""

Verdict = Literal["alive", "dead", "unknown"]


@dataclass(frozen=True, slots=True)
class Owner:
    """Process that owns a directory."""

    token: str
    """Random; no two owners have the same."""
    host: str
    machine: str
    """Boot of a machine and its process namespace, in which process ids are unique."""
    pid: int
    started: str
    """Start of the process in clock ticks since boot: a process id may be used again."""
    job: str
    """Scheduler and job, or empty."""
    restarts: int
    """Times that Slurm has requeued the job."""
    begun: str
    """Date and time of the owner's clock, UTC."""
    alive: str
    """Date and time of the last sign of life, on the owner's clock."""
    beats: int = 0
    """Number of the sign of life."""

    @classmethod
    def here(cls) -> Owner:
        """Return this process as an owner with a new token."""
        now = _now()
        job, restarts = job_of(os.environ)
        return cls(
            secrets.token_hex(8),
            socket.gethostname(),
            _machine(),
            os.getpid(),
            _started(os.getpid()),
            job,
            restarts,
            begun=now,
            alive=now,
        )

    def __str__(self) -> str:
        if self == UNREADABLE:
            return "a process that left no record of itself"
        job = f" ({self.job})" if self.job else ""
        signs = f"since {self.begun} UTC, last sign of life {self.alive} UTC"
        return f"process {self.pid} on {self.host}{job}, {signs}"

    @property
    def is_near(self) -> bool:
        """True if the owner's processes can be seen from this one."""
        return bool(self.machine) and self.machine == _machine()

    def verdict(self, mine: Owner) -> Verdict:
        """Return what process ``mine`` knows of this owner without watching its signs of life."""
        if self.machine and self.machine == mine.machine:
            return "alive" if _started(self.pid) == self.started else "dead"
        # Slurm starts a requeued job after all processes of its former run ended
        if self.job and self.job == mine.job and mine.restarts > self.restarts:
            return "dead"
        return "unknown"


UNREADABLE = Owner("unreadable", "an unknown machine", "", 0, "", "", 0, "?", "?")
"""Owner in a file without a record, such as one that is being written or was torn by a crash."""


class Held(ConfigError):
    """A directory belongs to another process: exit code 2."""

    def __init__(self, owner: Owner) -> None:
        self.owner = owner
        super().__init__(str(owner))


class Lost(ConfigError):
    """Another process took a directory over: exit code 2, and nothing more may be written."""


class Ownership:
    """A file that says which process owns a directory; create one with :func:`own`."""

    def __init__(self, file: Path, owner: Owner, descriptor: int) -> None:
        self.file = file
        self.owner = owner
        self._descriptor = descriptor
        self._verified = time.monotonic()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="sign of life", daemon=True)
        self._thread.start()

    def require(self, *, now: bool = False) -> None:
        """Check that no other process took the directory over.

        That happens to a process that was suspended, or cut off from the file system.

        Args:
            now: read the file even if it was read within the last seconds.

        Raises:
            Lost: the file is gone, or has another owner.
        """
        if not now and time.monotonic() - self._verified < BEAT_SECONDS:
            return
        try:
            found = _read(self.file)[0]
            for _ in range(READS):  # half a sign of life, if it was read while it was written
                if found == UNREADABLE:
                    time.sleep(WAIT_SECONDS)
                    found = _read(self.file)[0]
        except OSError:
            return  # the file system does not answer; nothing can be written either
        if found is None:
            raise Lost(f"{self.file} was removed: this process stops without saving")
        if found.token != self.owner.token:
            raise Lost(
                f"another process took over {self.file.parent}: {found}. This one gave no sign of "
                f"life for {SILENCE_SECONDS:g} s and stops without saving"
            )
        self._verified = time.monotonic()

    def release(self) -> None:
        """Stop the signs of life and remove the file, unless another process has replaced it."""
        self._ended.set()
        self._thread.join()
        os.close(self._descriptor)  # before the removal: NFS keeps open files under another name
        with contextlib.suppress(OSError):
            found = _read(self.file)[0]
            if found is not None and found.token == self.owner.token:
                self.file.unlink()

    def _renew(self) -> None:
        while not self._ended.wait(BEAT_SECONDS):
            self.owner = replace(self.owner, alive=_now(), beats=self.owner.beats + 1)
            with contextlib.suppress(OSError):  # a file system that fails may recover
                os.pwrite(self._descriptor, _encoded(self.owner), 0)
                os.fsync(self._descriptor)


@contextlib.contextmanager
def exclusive(file: Path) -> Iterator[Ownership]:
    """Be the only process of all machines that changes ``file``, after waiting for the others.

    Raises:
        OSError: the directory is not writable.
    """
    ownership = own(file.with_name(f".{file.name}.owner"), wait=True)
    try:
        yield ownership
    finally:
        ownership.release()


def own(file: Path, *, wait: bool = False) -> Ownership:
    """Write this process into ``file`` as the owner of its directory.

    An owner on this machine is alive if its process is. A requeued Slurm job takes over from its
    former run at once. Every other owner is watched: it is alive after the next sign of life, and
    dead after ``SILENCE_SECONDS`` without one. The clocks of two machines are never compared.

    Args:
        file: path of the file, in an existing directory.
        wait: wait until the file is free, for files that are held for moments.

    Raises:
        Held: another process is the owner.
        OSError: the directory is not writable.
    """
    mine = Owner.here()
    temporary = file.with_name(f"{file.name}.{mine.token}")
    descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        os.pwrite(descriptor, _encoded(mine), 0)
        os.fsync(descriptor)
        while not _try_or_wait(file, mine, temporary, wait=wait):
            pass
    except BaseException:
        os.close(descriptor)
        raise
    finally:
        temporary.unlink(missing_ok=True)
    _remove_leftovers(file, mine)
    return Ownership(file, mine, descriptor)


def _try_or_wait(file: Path, mine: Owner, temporary: Path, *, wait: bool) -> bool:
    try:
        return _try(file, mine, temporary)
    except Held:
        if not wait:
            raise
        time.sleep(WAIT_SECONDS * (1 + secrets.randbelow(100) / 100))
        return False


def _try(file: Path, mine: Owner, temporary: Path) -> bool:
    """Try once to become the owner; False if the file changed meanwhile.

    Raises:
        Held: another process is the owner, or takes over from a dead one.
    """
    found, content = _read(file)
    if found is None:
        if not _link(temporary, file):
            return False
        os.replace(temporary, file)  # nothing happens to two names of one file
        return True
    dead: list[Owner] = []
    name, owner = file, found
    while _is_dead(name, owner, content, mine):
        dead.append(owner)
        name = file.with_name(f"{file.name}.after-{owner.token}")
        if _link(temporary, name):
            return _succeed(file, mine, temporary, dead)
        rival, content = _read(name)
        if rival is None:
            return False
        owner = rival
    return False


def _succeed(file: Path, mine: Owner, temporary: Path, dead: list[Owner]) -> bool:
    """Replace the first of the dead owners; False if another process did so before.

    The names after ``dead`` are removed only when ``file`` has the token of their successor. This
    process is therefore the successor if ``file`` still has the first token.
    """
    names = [file.with_name(f"{file.name}.after-{owner.token}") for owner in dead]
    current = _read(file)[0]
    if current is None or current.token != dead[0].token:
        names[-1].unlink(missing_ok=True)  # this process created the last one
        return False
    os.replace(temporary, file)
    sync(file.parent)
    for name in names:
        name.unlink(missing_ok=True)
    return True


def _is_dead(file: Path, owner: Owner, content: bytes, mine: Owner) -> bool:
    """Return True if an owner is dead, False if it ended or was replaced while it was watched.

    Raises:
        Held: the owner is alive.
    """
    verdict = owner.verdict(mine)
    if verdict == "unknown":
        seen, after = _watched(file, owner, content)
        if after == content:
            return True
        if seen is None or seen.token != owner.token:
            return False
        owner = seen
    if verdict == "dead":
        return True
    raise Held(owner)


def _watched(file: Path, owner: Owner, content: bytes) -> tuple[Owner | None, bytes]:
    """Read a file until it changes, or did not for ``SILENCE_SECONDS``; return it as it is then."""
    silent = 0.0
    before = time.monotonic()
    found: tuple[Owner | None, bytes] = owner, content
    while found[1] == content and silent < SILENCE_SECONDS:
        time.sleep(POLL_SECONDS)
        found = _read(file)
        now = time.monotonic()
        # a file system that did not answer for minutes kept the owner from writing, too
        silent += min(now - before, 2 * POLL_SECONDS)
        before = now
        if silent > BEAT_SECONDS + POLL_SECONDS:  # an owner that is alive has answered by now
            warn_once(
                f"{file.parent} belongs to {owner}: it counts as dead after "
                f"{SILENCE_SECONDS:g} s without a sign of life"
            )
    return found


def _link(source: Path, target: Path) -> bool:
    """Give a file a second name; return False if the name exists."""
    try:
        os.link(source, target)
    except FileExistsError:
        # the answer to a successful request may be lost on a network, and the request sent again
        return os.stat(source).st_nlink > 1 and os.path.samefile(source, target)
    except OSError as error:
        if error.errno not in NO_LINKS:
            raise
        return _copy(source, target)
    return True


def _copy(source: Path, target: Path) -> bool:
    """Create ``target`` with the same content; return False if the name exists."""
    try:
        descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    except FileExistsError:
        return False
    try:
        os.write(descriptor, source.read_bytes())
    finally:
        os.close(descriptor)
    return True


def read(file: Path) -> Owner | None:
    """Return the owner in a file, or None if there is no file."""
    return _read(file)[0]


def _read(file: Path) -> tuple[Owner | None, bytes]:
    """Return the owner in a file (None if there is no file) and its bytes."""
    for attempt in range(READS):
        try:
            content = file.read_bytes()
            break
        except FileNotFoundError:
            return None, b""
        except OSError as error:  # NFS: another machine replaced the file while it was opened
            if error.errno != errno.ESTALE or attempt == READS - 1:
                raise
    try:
        values = json.loads(content)
        return Owner(**{f.name: values[f.name] for f in fields(Owner)}), content
    except (ValueError, KeyError, TypeError):
        return UNREADABLE, content


def _encoded(owner: Owner) -> bytes:
    return json.dumps(asdict(owner)).encode().ljust(WIDTH - 1) + b"\n"


def _remove_leftovers(file: Path, mine: Owner) -> None:
    """Remove files of processes of this machine that were killed while they became owners."""
    for other in file.parent.glob(f"{file.name}.*"):
        with contextlib.suppress(OSError):
            owner = _read(other)[0]
            if owner is not None and owner.verdict(mine) == "dead":
                other.unlink()


def job_of(environment: Mapping[str, str]) -> tuple[str, int]:
    """Return the scheduler's name of the job in an environment, and how often it was requeued."""
    for variable, scheduler in JOBS.items():
        if job := environment.get(variable):
            cluster = environment.get("SLURM_CLUSTER_NAME", "") if scheduler == "Slurm" else ""
            restarts = environment.get("SLURM_RESTART_COUNT", "") if scheduler == "Slurm" else ""
            where = f" on {cluster}" if cluster else ""
            return f"{scheduler} job {job}{where}", int(restarts) if restarts.isdigit() else 0
    return "", 0


def _machine() -> str:
    """Return the boot and the process namespace, or an empty text where neither is known."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return ""


def _started(pid: int) -> str:
    """Return the start of a process in clock ticks since boot; empty if it does not run."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    state, *values = text.rpartition(")")[2].split()  # the name before may contain anything
    return "" if state in "ZX" else values[18]


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S")
