"""Owner of a run directory on the file system of a cluster.

Machines are simulated: a process takes another name for its machine, locks of the kernel are
switched off, and every operation on the file system takes a moment.
"""

import contextlib
import dataclasses
import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
import warnings
from pathlib import Path

import pytest

import sparsepretrain
from sparsepretrain.errors import ConfigError, warn_once
from sparsepretrain.runs import ownership
from sparsepretrain.runs.directory import RunDirectory
from sparsepretrain.runs.ownership import Held, Lost, Owner, exclusive, own, read

ROOT = Path(sparsepretrain.__file__).parents[1]

# Processes of tests: {machine} is the name of a simulated machine, or nothing.
START = """
import fcntl, os, random, sys, time
from pathlib import Path
from sparsepretrain.runs import ownership

random.seed(os.getpid())
path, machine, delay, *words = sys.argv[1:]
if machine:
    ownership._machine = lambda: machine
    ownership.socket.gethostname = lambda: machine
    fcntl.flock = lambda *args: None  # holds on one machine only
ownership.BEAT_SECONDS, ownership.SILENCE_SECONDS, ownership.POLL_SECONDS = 0.1, 1.5, 0.05

def slow(function):
    def called(*args, **kwargs):
        time.sleep(random.random() * float(delay))
        return function(*args, **kwargs)
    return called

if float(delay):
    for name in ("link", "replace", "unlink", "open"):
        setattr(os, name, slow(getattr(os, name)))
    Path.read_bytes = slow(Path.read_bytes)
    Path.unlink = slow(Path.unlink)
"""
HOLD = """
from sparsepretrain.runs.directory import RunDirectory
with RunDirectory(Path(path)).claim() as owner:
    print("owns", flush=True)
    sys.stdin.read()
print("released", flush=True)
"""


@pytest.fixture
def start(tmp_path):
    """Return a function that starts a process of a machine; all are killed at the end."""
    processes = []

    def start(code, machine="", *words, delay=0.0, path=tmp_path / "run", env=()):
        command = [sys.executable, "-c", START + textwrap.dedent(code), path, machine, str(delay)]
        process = subprocess.Popen(
            [*map(str, command), *words],
            env=os.environ | {"PYTHONPATH": str(ROOT)} | dict(env),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        processes.append(process)
        return process

    yield start
    for process in processes:
        process.kill()
        process.communicate()


@pytest.fixture
def quick(monkeypatch):
    """Signs of life every 0.1 s; silence of 1.5 s is death."""
    monkeypatch.setattr(ownership, "BEAT_SECONDS", 0.1)
    monkeypatch.setattr(ownership, "SILENCE_SECONDS", 1.5)
    monkeypatch.setattr(ownership, "POLL_SECONDS", 0.05)
    warn_once.cache_clear()
    yield
    warn_once.cache_clear()


@pytest.fixture
def elsewhere(quick, monkeypatch):
    """This process is on another machine than those it starts, and locks of the kernel lie."""
    monkeypatch.setattr(ownership, "_machine", lambda: "elsewhere")
    monkeypatch.setattr(fcntl, "flock", lambda *args: None)


def holding(start, machine="", **options):
    process = start(HOLD, machine, **options)
    line = process.stdout.readline()
    assert line == "owns\n", process.stderr.read()
    return process


def taken(run: RunDirectory) -> Owner:
    """Own the directory for a moment and return who this process was."""
    with run.claim() as owner:
        assert read(run.owner_file).token == owner.owner.token
        return owner.owner


@pytest.fixture
def run(tmp_path):
    return RunDirectory(tmp_path / "run")


def test_a_clean_end_removes_the_file(run):
    with run.claim() as owner:
        found = read(run.owner_file)
        assert (found.pid, found.host) == (os.getpid(), owner.owner.host)
        assert [path.name for path in run.path.iterdir() if path.name != ".lock"] == [".owner"]
    assert [path.name for path in run.path.iterdir()] == [".lock"]


def test_a_second_start_says_who_owns_the_run(run, start):
    holder = holding(start, env={"SLURM_JOB_ID": "77", "SLURM_CLUSTER_NAME": "big"}.items())
    with pytest.raises(ConfigError, match="another process is training") as refused, run.claim():
        pass
    assert refused.value.exit_code == 2
    text = str(refused.value)
    owner = read(run.owner_file)
    for fact in (holder.pid, owner.host, "Slurm job 77 on big", owner.begun, "last sign of life"):
        assert str(fact) in text
    holder.communicate("")
    taken(run)


def test_a_killed_process_of_this_machine_is_followed_at_once(run, start):
    holder = holding(start)
    holder.send_signal(signal.SIGSTOP)  # alive, although it gives no sign of life
    with pytest.raises(ConfigError), run.claim():
        pass
    holder.kill()
    holder.wait()
    assert run.owner_file.exists()
    before = time.monotonic()
    taken(run)
    assert time.monotonic() - before < 1
    assert [path.name for path in run.path.iterdir()] == [".lock"]


def test_a_process_id_that_is_used_again_is_not_the_owner(run, monkeypatch):
    run.path.mkdir()
    for changes in ({"started": "1"}, {"pid": 2**22 + 1}):
        old = dataclasses.replace(Owner.here(), **changes)
        run.owner_file.write_bytes(ownership._encoded(old))
        taken(run)


def test_a_zombie_is_dead(run):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
    run.path.mkdir()
    started = ownership._started(child.pid)
    owner = dataclasses.replace(Owner.here(), pid=child.pid, started=started)
    run.owner_file.write_bytes(ownership._encoded(owner))
    with pytest.raises(ConfigError), run.claim():
        pass
    child.kill()
    deadline = time.monotonic() + 10
    while ownership._started(child.pid):  # not waited for: it stays in the table of processes
        assert time.monotonic() < deadline
    taken(run)
    child.wait()


def test_an_owner_elsewhere_is_alive_after_its_next_sign_of_life(run, start, elsewhere):
    holding(start, "node1")
    before = time.monotonic()
    with pytest.raises(ConfigError, match="node1"), run.claim():
        pass
    assert time.monotonic() - before < 1
    first = read(run.owner_file)
    time.sleep(0.3)
    assert read(run.owner_file).beats > first.beats


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_an_owner_elsewhere_is_dead_after_a_silence(run, start, elsewhere, number):
    holder = holding(start, "node1")
    holder.send_signal(number)
    time.sleep(0.2)
    before = time.monotonic()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with run.claim() as owner:
            assert 1.4 < time.monotonic() - before < 10
            assert any(
                "node1" in str(line.message) and "1.5 s" in str(line.message) for line in said
            )
            if number == signal.SIGSTOP:  # it goes on, and does not touch the file of its successor
                holder.send_signal(signal.SIGCONT)
                out, _ = holder.communicate("")
                assert out == "released\n"
            assert read(run.owner_file).token == owner.owner.token
            owner.require(now=True)


def test_clocks_are_not_compared(run, start, elsewhere):
    """The clock of the owner's machine is years behind."""
    code = "ownership._now = lambda: '2001-01-01 00:00:00'\n" + HOLD
    process = start(code, "node1")
    assert process.stdout.readline() == "owns\n"
    with pytest.raises(ConfigError, match="2001-01-01"), run.claim():
        pass


def test_an_outage_of_the_file_system_is_not_silence(run, elsewhere, monkeypatch):
    """While nothing can be read the owner cannot write: only looks that are answered count."""
    run.path.mkdir()
    owner = dataclasses.replace(Owner.here(), machine="node1")
    run.owner_file.write_bytes(ownership._encoded(owner))
    looks = 0
    original = ownership._read

    def hanging(file):
        nonlocal looks
        looks += 1
        if looks == 3:
            time.sleep(2)  # longer than the silence of death
            beat = dataclasses.replace(owner, beats=1)
            run.owner_file.write_bytes(ownership._encoded(beat)) if looks == 4 else None
        if looks == 5:
            run.owner_file.write_bytes(ownership._encoded(dataclasses.replace(owner, beats=1)))
        return original(file)

    monkeypatch.setattr(ownership, "_read", hanging)
    with pytest.raises(ConfigError, match="another process"), run.claim():
        pass


def test_an_owner_that_ends_while_it_is_watched_is_followed(run, start, elsewhere, monkeypatch):
    holder = holding(start, "node1")
    monkeypatch.setattr(ownership, "POLL_SECONDS", 0.5)
    original = time.sleep

    def sleep(seconds):
        holder.communicate("")
        original(0)

    monkeypatch.setattr(ownership.time, "sleep", sleep)
    taken(run)


def slurm(job="5", restarts=0, cluster="big"):
    return {
        "SLURM_JOB_ID": job,
        "SLURM_CLUSTER_NAME": cluster,
        "SLURM_RESTART_COUNT": str(restarts),
    }


@pytest.mark.parametrize(
    ("mine", "at_once"),
    [
        (slurm(restarts=1), True),
        (slurm(restarts=3), True),
        (slurm(restarts=0), False),  # two steps of one job
        (slurm("6", restarts=1), False),
        (slurm(restarts=1, cluster="small"), False),
        ({}, False),
    ],
)
def test_a_requeued_job_follows_its_former_run_at_once(run, elsewhere, monkeypatch, mine, at_once):
    with monkeypatch.context() as former:
        for key, value in slurm().items():
            former.setenv(key, value)
        if at_once:
            former.delenv("SLURM_RESTART_COUNT")  # Slurm sets it when it has restarted a job
        old = dataclasses.replace(Owner.here(), machine="node1", host="node1")
    run.path.mkdir()
    run.owner_file.write_bytes(ownership._encoded(old))
    for key, value in mine.items():
        monkeypatch.setenv(key, value)
    before = time.monotonic()
    taken(run)
    assert (time.monotonic() - before < 1) == at_once


def test_a_former_run_that_still_runs_here_is_not_followed(run, monkeypatch, start):
    holding(start, env=slurm().items())
    for key, value in slurm(restarts=1).items():
        monkeypatch.setenv(key, value)
    with pytest.raises(ConfigError), run.claim():
        pass


RACE = """
print("ready", flush=True)
sys.stdin.readline()
try:
    owner = ownership.own(Path(path) / ".owner")
except ownership.Held:
    print("refused", flush=True)
else:
    owner.require(now=True)
    print("owns", flush=True)
    sys.stdin.read()
    owner.require(now=True)
    owner.release()
"""


def race(processes):
    """Let the processes try at once; return their answers."""
    for process in processes:
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        process.stdin.write("go\n")
        process.stdin.flush()
    return [process.stdout.readline().strip() for process in processes]


RARE = [pytest.param(left, marks=pytest.mark.fault) for left in ("dead elsewhere", "torn")]


@pytest.mark.parametrize("left", ["nothing", "dead here", "half taken", *RARE])
def test_one_of_four_machines_wins(start, tmp_path, left):
    """Their locks do not see each other, and every operation takes up to 30 ms."""
    for attempt in range(3):
        path = tmp_path / str(attempt)
        path.mkdir()
        dead = dataclasses.replace(Owner.here(), pid=2**22 + 1)
        if left.startswith("dead"):
            machine = "node0" if left == "dead elsewhere" else "node1"
            dead = dataclasses.replace(dead, machine=machine)
            (path / ".owner").write_bytes(ownership._encoded(dead))
        elif left == "torn":
            (path / ".owner").write_bytes(b"")
        elif left == "half taken":  # a successor died before it replaced the file
            dead = dataclasses.replace(dead, machine="node1")
            (path / ".owner").write_bytes(ownership._encoded(dead))
            next_one = dataclasses.replace(dead, token="b" * 16)
            (path / f".owner.after-{dead.token}").write_bytes(ownership._encoded(next_one))
        machines = ["node1", "node2", "node3", "node1"]
        started = [start(RACE, name, delay=0.03, path=path) for name in machines]
        lines = race(started)
        winners = [process for process, line in zip(started, lines, strict=True) if line == "owns"]
        assert lines.count("refused") == 3 and len(winners) == 1, (lines, left)
        assert read(path / ".owner").pid == winners[0].pid
        _, errors = winners[0].communicate("")
        assert winners[0].returncode == 0 and "Traceback" not in errors, errors
        assert list(path.iterdir()) == []


def test_losers_on_file_systems_without_links_are_refused(start, tmp_path):
    code = """
    def link(*args):
        raise OSError(1, "Operation not permitted")
    os.link = link
    """
    path = tmp_path / "fat"
    path.mkdir()
    body = textwrap.dedent(code) + RACE
    started = [start(body, f"node{i}", delay=0.03, path=path) for i in range(4)]
    lines = race(started)
    assert sorted(lines) == ["owns", "refused", "refused", "refused"]
    winner = started[lines.index("owns")]
    before = read(path / ".owner")
    time.sleep(0.3)
    assert before.pid == winner.pid and read(path / ".owner").beats > before.beats
    winner.communicate("")
    assert list(path.iterdir()) == []


def test_locks_that_a_file_system_lacks_are_not_a_refusal(run, monkeypatch):
    def lacking(*args):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", lacking)
    taken(run)


def test_a_lock_of_another_machine_does_not_decide(run, quick, monkeypatch):
    """NFS may keep the lock of a machine that is gone for minutes."""

    def locked(*args):
        raise BlockingIOError(errno.EWOULDBLOCK, "Resource temporarily unavailable")

    monkeypatch.setattr(fcntl, "flock", locked)
    run.path.mkdir()
    with pytest.raises(ConfigError, match="another process is training"), run.claim():
        pass
    old = dataclasses.replace(Owner.here(), machine="node1")
    run.owner_file.write_bytes(ownership._encoded(old))
    taken(run)


def test_a_process_that_lost_the_directory_stops(run, tiny, quick, stop_after, monkeypatch):
    """It was suspended, another machine took over, and it goes on: nothing more is written."""
    from sparsepretrain.training import loop

    original = loop.train_step
    directory = tiny.directory("steps=6", "checkpoint.every=1")
    seen = {}

    def train_step(t):
        values = original(t)
        if t.step == 3:
            other = dataclasses.replace(Owner.here(), machine="node1", host="node1")
            temporary = directory / "other"
            temporary.write_bytes(ownership._encoded(other))
            os.replace(temporary, directory / ".owner")
            seen.update({p: p.read_bytes() for p in directory.rglob("*") if p.is_file()})
        return values

    monkeypatch.setattr(loop, "train_step", train_step)
    with pytest.raises(Lost, match="node1"):
        tiny.train("steps=6", "checkpoint.every=1")
    after = {p: p.read_bytes() for p in directory.rglob("*") if p.is_file()}
    changed = {p.name for p in seen | after if seen.get(p) != after.get(p)}
    assert changed <= {"metrics.jsonl"}, "one line may follow within the seconds of a sign of life"
    assert json.loads((directory / ".owner").read_bytes())["host"] == "node1"


def test_a_half_written_sign_of_life_is_read_again(run, monkeypatch):
    with run.claim() as owner:
        whole = run.owner_file.read_bytes()
        answers = [whole[:100], OSError(errno.ESTALE, "Stale file handle"), whole]

        def read_bytes(path):
            answer = answers.pop(0) if answers else whole
            if isinstance(answer, OSError):
                raise answer
            return answer

        with monkeypatch.context() as patch:
            patch.setattr(Path, "read_bytes", read_bytes)
            owner.require(now=True)
        assert not answers


def test_a_process_whose_file_was_removed_stops(run):
    with run.claim() as owner:
        run.owner_file.unlink()
        with pytest.raises(Lost, match="was removed"):
            owner.require(now=True)


def test_signs_of_life_go_on_during_a_long_compilation(run, quick):
    with run.claim():
        first = read(run.owner_file).beats
        compile("x = 1\n" * 400_000, "long", "exec")  # the interpreter itself is busy
        deadline = time.monotonic() + 5
        while read(run.owner_file).beats <= first + 1:
            assert time.monotonic() < deadline


def test_read_only_commands_need_no_ownership(run, tiny, capsys):
    from sparsepretrain import cli

    directory = RunDirectory(tiny.train().directory)
    with directory.claim():
        for words in (["eval"], ["report"], ["export"]):
            assert cli.main([*words, str(directory)]) == 0, capsys.readouterr().err


WRITERS = {
    "failures": """
        from sparsepretrain.runs.directory import RunDirectory
        for k in range(8):
            RunDirectory(Path(path)).note_failure(f"{machine}-{k}", 5, "diverged")
    """,
    "evaluations": """
        from sparsepretrain.training.evaluation import append
        for k in range(8):
            append({"step": k, "by": machine, "metrics": {}}, Path(path) / "eval.jsonl")
    """,
    "pages": """
        from sparsepretrain.reports.page import Page, write_page
        from matplotlib.figure import Figure
        for k in range(4):
            write_page(Path(path), Page([machine * 1000], {"plots/a.png": Figure()}), page=True)
    """,
    "status": """
        from sparsepretrain.runs.directory import RunDirectory
        for k in range(20):
            RunDirectory(Path(path)).leave_status(k)
    """,
}


@pytest.mark.parametrize(
    "what",
    ["failures", *(pytest.param(k, marks=pytest.mark.fault) for k in WRITERS if k != "failures")],
)
def test_two_machines_that_write_one_directory_lose_nothing(start, run, what):
    run.path.mkdir()
    started = [start(WRITERS[what], f"node{i}", delay=0.005) for i in range(2)]
    for process in started:
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors
    if what == "failures":
        assert len(run.failures()) == 16
    elif what == "evaluations":
        lines = run.evaluations_file.read_text().splitlines()
        assert len({(line["by"], line["step"]) for line in map(json.loads, lines)}) == 16
    elif what == "pages":
        assert run.report_file.read_text().strip() in {"node0" * 1000, "node1" * 1000}
        assert (run.path / "plots/a.png").read_bytes()[1:4] == b"PNG"
    else:
        assert run.status() == 19
    left = {path.name for path in run.path.rglob("*") if path.is_file()}
    assert left <= {"failed.json", "eval.jsonl", "report.md", "report.html", "a.png", "status.json"}


def test_a_killed_writer_does_not_block_the_others(run, start):
    code = """
    with ownership.exclusive(Path(path) / "failed.json"):
        print("owns", flush=True)
        sys.stdin.read()
    """
    run.path.mkdir()
    holder = start(code)
    assert holder.stdout.readline() == "owns\n"
    holder.kill()
    holder.wait()
    run.note_failure("train", 5, "diverged")
    assert run.failures()["train"]["exit_code"] == 5
    with exclusive(run.path / "x"), pytest.raises(Held):
        own(run.path / ".x.owner")


def test_an_unwritable_directory_is_named(run):
    run.path.mkdir()
    with contextlib.ExitStack() as stack:
        monkeypatch = stack.enter_context(pytest.MonkeyPatch.context())

        def full(*args):
            raise OSError(errno.EROFS, "Read-only file system")

        monkeypatch.setattr(os, "link", full)
        with (
            pytest.raises(ConfigError, match=r"not writable \(Read-only file system\)"),
            run.claim(),
        ):
            pass
    taken(run)
