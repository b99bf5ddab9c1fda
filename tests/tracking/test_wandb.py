"""The real wandb package, without account and network."""

import contextlib
import io
import json
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sparsepretrain.config.groups import Tracker
from sparsepretrain.console import Console
from sparsepretrain.errors import ConfigError
from sparsepretrain.runs.directory import RunDirectory
from sparsepretrain.studies.cells import grid
from sparsepretrain.tracking import stream as stream_module
from sparsepretrain.tracking import wandb as room
from sparsepretrain.tracking.stream import Stream
from sparsepretrain.training.trainer import train

wandb = pytest.importorskip("wandb")


def tracker(mode: Any) -> Tracker:
    return Tracker(name="wandb", mode=mode, project="p", entity=None, tensorboard=False)


@pytest.fixture(autouse=True)
def no_account(tmp_path, monkeypatch):
    for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "NETRC", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(stream_module, "CLOSING_SECONDS", 60.0)  # a busy machine
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "home" / "wandb"))
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")  # nothing listens there


def one_run(directory: Path, mode: str, resume_step: int | None = None) -> str:
    out = io.StringIO()
    plain = {"steps": 2, "sparsity": {"name": "sste"}}
    run: Any = SimpleNamespace(name="n", tracker=tracker(mode), plain=plain, seed=0)
    run.sparsity, run.init = SimpleNamespace(name="sste", n=2, m=4), SimpleNamespace(path=None)
    about: dict[str, Any] = {"resume_step": resume_step, "console": Console(out), "total": 2}
    stream = Stream(RunDirectory(directory), run, **about)
    first = (resume_step or 0) + 1
    for step in (first, first + 1):
        stream.log({"step": step, "loss": 1.0, "flip_rate/h.0": 0.1})
        stream.log({"step": step, "split": "validation", "loss": 1.0})
    stream.close(0, {"masks": "2:4"})
    # wandb's service may still write after finish()
    with contextlib.suppress(ConnectionError):  # the service may have crashed
        wandb.teardown()
    return out.getvalue()


def test_offline_needs_neither_account_nor_network(tmp_path, capfd):
    run = tmp_path / "run"
    assert "warning" not in one_run(run, "offline")
    (files,) = (run / "wandb").glob("offline-run-*/*.wandb")
    data = files.read_bytes()
    assert b"validation/loss" in data and b"layers/flip_rate/h.0" in data and b"sste" in data
    first = (run / "wandb" / "run_id").read_text()
    assert first.strip() in files.name

    one_run(run, "offline", resume_step=2)
    assert (run / "wandb" / "run_id").read_text() == first
    one_run(run, "offline")
    assert (run / "wandb" / "run_id").read_text() != first  # a fresh start is another W&B run
    captured = capfd.readouterr()
    assert captured.out == captured.err == ""


def test_online_without_a_server_records_offline(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    monkeypatch.setattr(room, "INIT_SECONDS", 1)
    run = tmp_path / "run"
    out = one_run(run, "online")
    assert out.count("warning") == 1
    assert "`wandb sync" in out
    assert list((run / "wandb").glob("offline-run-*/*.wandb"))
    captured = capfd.readouterr()
    assert captured.out == captured.err == ""


def test_login_is_checked_before_the_run(tmp_path, monkeypatch):
    wandb.teardown()  # drops the cached environment
    room.check_login(tracker("offline"))
    room.check_login(tracker("disabled"))
    with pytest.raises(ConfigError) as error:
        room.check_login(tracker("online"))
    assert "`wandb login`" in str(error.value) and "tracker.mode=offline" in str(error.value)
    netrc = tmp_path / "netrc"
    netrc.write_text("machine 127.0.0.1:9\n login user\n password " + "0" * 40 + "\n")
    netrc.chmod(0o600)
    monkeypatch.setenv("NETRC", str(netrc))
    room.check_login(tracker("online"))
    netrc.write_text("machine example.org\n login user\n password x\n")
    with pytest.raises(ConfigError):
        room.check_login(tracker("online"))
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    room.check_login(tracker("online"))


def records(file: Path) -> Iterator[Any]:
    """Records of an offline file, which is a log in the format of LevelDB."""
    from wandb.proto import wandb_internal_pb2

    data = file.read_bytes()
    at = 7  # behind the file's header
    whole = b""
    while at + 7 <= len(data):
        length, kind = struct.unpack("<HB", data[at + 4 : at + 7])
        if kind == 0:  # the rest of a block of 32 KiB
            at += -at % (1 << 15)
            continue
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        at += -at % (1 << 15) if -at % (1 << 15) < 7 else 0
        if kind in (1, 4):  # full, last
            record = wandb_internal_pb2.Record()
            record.ParseFromString(whole)
            whole = b""
            yield record


def values(items: Any) -> dict[str, Any]:
    """Values of the items of a record, by name."""
    return {i.key or ".".join(i.nested_key): json.loads(i.value_json) for i in items}


def history(file: Path) -> list[dict[str, Any]]:
    """Rows of an offline file."""
    found = [r for r in records(file) if r.WhichOneof("record_type") == "history"]
    return [values(record.history.item) for record in found]


def test_the_newest_offline_directory_holds_the_whole_run(tmp_path):
    """A process killed by SIGKILL leaves lines of the record in W&B's memory."""
    run = tmp_path / "run"
    one_run(run, "offline")
    (first,) = (run / "wandb").glob("offline-run-*")
    shutil.rmtree(first)  # as if nothing had been written
    one_run(run, "offline", resume_step=2)
    (file,) = (run / "wandb").glob("offline-run-*/*.wandb")
    rows = history(file)
    assert [row["_step"] for row in rows] == [1, 2, 3, 4]
    named = {"train/loss", "layers/flip_rate/h.0", "validation/loss"}
    assert all(named <= row.keys() for row in rows)


def test_a_cell_of_a_table_is_found_by_table_cell_and_seed(tiny):
    """A run of a study in the offline file: sections of metrics, axes, summary, group and tags."""
    words = tiny.overrides("tracker=wandb", "tracker.mode=offline", "tracker.tags=[mine]")
    words = [word for word in words if not word.startswith("seed=")]
    (cell,) = grid("table", {("S-STE", "2:4"): words}, [3])
    assert train(cell.run, Console.silent()) == 0
    wandb.teardown()
    (file,) = RunDirectory.of(cell.run).path.glob("wandb/offline-run-*/*.wandb")
    found: dict[str, list[Any]] = {}
    for record in records(file):
        kind = record.WhichOneof("record_type")
        found.setdefault(kind, []).append(getattr(record, kind))
    run = found["run"][0]
    assert (run.run_group, run.job_type) == ("table/S-STE--2_4", "train")
    assert [*run.tags] == ["mine", "table", "S-STE--2_4", "sste", "2:4", "seed 3"]
    assert run.display_name == f"S-STE--2_4/{RunDirectory.of(cell.run).path.name}"

    rows = [values(row.item) for row in found["history"]]
    sections = {key.partition("/")[0] for row in rows for key in row if "/" in key}
    assert sections == {"train", "validation", "sparsity", "layers", "speed"}
    for row in rows:
        assert row["step"] == row["_step"] and "tokens" in row
    axes = {m.name for m in found["metric"] if m.options.hidden}
    panels = [m for m in found["metric"] if not m.options.hidden]
    assert axes == {"step", "tokens", "time"} and all(m.step_metric == "step" for m in panels)
    summary = {}
    for part in found["summary"]:
        summary |= values(part.update)
    assert (summary["method"], summary["pattern"], summary["density"]) == ("sste", "2:4", 0.5)
    assert summary["proof"].startswith("2:4 in all")
    losses = [row["validation/loss"] for row in rows if "validation/loss" in row]
    assert len(losses) == 3
    shown = {"min": min(losses), "max": max(losses), "last": losses[-1]}
    assert summary["validation/loss"] == pytest.approx(shown)
    assert summary["train/loss"].keys() == {"min", "last"}


def test_names_that_wandb_refuses_are_mistakes_of_the_configuration(tiny):
    with pytest.raises(ConfigError) as error:
        tiny.load(f"tracker.group={'g' * 129}", f"tracker.tags=[{'t' * 65},ok]")
    assert error.value.messages == [
        "tracker.group must have 1 to 128 characters, got 129",
        "tracker.tags must have 1 to 64 characters, got 65",
    ]
