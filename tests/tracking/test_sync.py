"""W&B runs rebuilt from records, with the real package, without account and network."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sparsepretrain import cli
from sparsepretrain.runs.directory import RunDirectory
from sparsepretrain.tracking import sync as room

wandb = pytest.importorskip("wandb")

PAGE = "# a / b\n\n| run | loss |\n| --- | --- |\n| a\\|b | 1.5 |\n\n## What differs\n\nNothing.\n"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDirectory:
    for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "NETRC", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "home" / "wandb"))
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")  # nothing listens there
    wandb.teardown()  # what it read from the environment before
    made = RunDirectory(tmp_path / "nano" / "0123abcd-s0")
    made.path.mkdir(parents=True)
    tracker = "{name: wandb, mode: disabled, project: p, entity: null, tensorboard: false}"
    made.config_file.write_text(f"name: nano\nsteps: 3\ntracker: {tracker}\n")
    write(made, 2)
    return made


def write(run: RunDirectory, steps: int) -> None:
    lines: list[dict[str, Any]] = [{"step": 0, "split": "validation", "loss": 5.0, "tokens": 0}]
    for step in range(1, steps + 1):
        lines.append({"step": step, "loss": 1.0 / step, "flip_rate": 0.1})
    run.record_file.write_text("".join(json.dumps(line) + "\n" for line in lines))


def history(run: RunDirectory) -> list[dict[str, Any]]:
    """The rows in the only offline run, as `wandb sync` would send them."""
    from wandb.proto import wandb_internal_pb2

    wandb.teardown()  # wandb's service may still write for a moment after finish()
    (file,) = (run.path / "wandb").glob("offline-run-*/*.wandb")
    rows = []
    for data in records(file.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.HasField("history"):
            items = record.history.item
            rows.append({i.key or ".".join(i.nested_key): json.loads(i.value_json) for i in items})
    return rows


def records(data: bytes) -> Iterator[bytes]:
    """The records of a LevelDB log: blocks of 32 KiB, in them parts with seven bytes before."""
    place, record = 7, b""
    while place + 7 <= len(data):
        if 32768 - place % 32768 < 7:  # no room for another part in this block
            place += 32768 - place % 32768
            continue
        size, kind = struct.unpack_from("<HB", data, place + 4)
        record += data[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):  # whole, or the last part
            yield record
            record = b""


def test_a_record_becomes_one_run_however_often(run: RunDirectory, tmp_path: Path, capsys) -> None:
    assert room.sync(run)
    rows = history(run)
    assert [row["_step"] for row in rows] == [0, 1, 2]
    assert rows[0]["validation/loss"] == 5.0 and rows[2]["loss"] == 0.5
    assert rows[1]["flip_rate"] == 0.1
    (first,) = (run.path / "wandb").glob("offline-run-*")
    run_id = (run.path / "wandb" / "run_id").read_text().strip()
    assert first.name.endswith(f"-{run_id}")

    assert not room.sync(run)  # nothing new
    assert list((run.path / "wandb").glob("offline-run-*")) == [first]

    write(run, 3)
    assert cli.main(["sync", str(run)]) == 0
    assert [row["_step"] for row in history(run)] == [0, 1, 2, 3]
    assert (run.path / "wandb" / "run_id").read_text().strip() == run_id
    assert "wandb sync" in capsys.readouterr().out

    copy = RunDirectory(tmp_path / "moved" / run.path.name)
    copy.path.mkdir(parents=True)
    for file in (run.config_file, run.record_file):
        (copy.path / file.name).write_bytes(file.read_bytes())
    assert room.sync(copy)
    assert (copy.path / "wandb" / "run_id").read_text().strip() == run_id


def test_plots_and_tables_of_a_report(run: RunDirectory, tmp_path: Path) -> None:
    from PIL import Image

    report = tmp_path / "report"
    report.mkdir()
    (report / "report.md").write_text(PAGE)
    (report / "page.html").write_text("<p>page</p>")
    Image.new("RGB", (2, 2)).save(report / "overlay.png")
    assert room.sync(run, report=report)
    last = history(run)[-1]
    kinds = {k.removesuffix("._type"): v for k, v in last.items() if k.endswith("._type")}
    assert kinds == {
        "report/a / b": "table-file",
        "report/page": "html-file",
        "report/overlay": "image-file",
    }
    assert not room.sync(run, report=report)


def test_tables_of_a_page() -> None:
    assert room.tables(PAGE) == {"a / b": [["run", "loss"], ["a|b", "1.5"]]}


def test_online_sends_what_w_and_b_lacks(run: RunDirectory, monkeypatch) -> None:
    sent = []

    class Server:
        first_step, directory = 2, Path("run-x")

        def __init__(self, *args: Any, **options: Any) -> None:
            assert args[1].mode == "online" and args[1].project == "q"

        def open(self) -> None:
            pass

        def log(self, step: int, values: dict[str, float]) -> None:
            sent.append((step, values))

        def show(self, media: dict[str, Any]) -> None:
            assert media == {}

        def close(self, *args: Any) -> None:
            pass

    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    monkeypatch.setattr(room, "WeightsAndBiases", Server)
    assert room.sync(run, mode="online", project="q")
    assert sent == [(2, {"loss": 0.5, "flip_rate": 0.1})]
    assert not room.sync(run, mode="online", project="q")


def test_mistakes_are_one_line(run: RunDirectory, tmp_path: Path, capsys) -> None:
    wandb.teardown()
    assert cli.main(["sync", str(run), "--mode", "online"]) == 2
    assert cli.main(["sync", str(run), "--report", str(tmp_path / "none")]) == 2
    assert cli.main(["sync", str(tmp_path / "nothing")]) == 2
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 3
    assert "needs a W&B login" in told[0] and "has no report" in told[1]
