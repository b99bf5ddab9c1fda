import io
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from sparsepretrain.config.groups import Tracker
from sparsepretrain.config.strict import build
from sparsepretrain.console import Console
from sparsepretrain.runs.directory import RunDirectory
from sparsepretrain.runs.record import read
from sparsepretrain.tracking import stream as stream_module
from sparsepretrain.tracking.stream import Stream, mirrored
from support import ROOT

CONFIGS = ROOT / "configs" / "tracker"


def tracker(**changes: Any) -> Tracker:
    values: dict[str, Any] = yaml.safe_load((CONFIGS / "jsonl.yaml").read_text())
    return build(Tracker, {**values, **changes})


class Fake:
    name = "Fake"

    def __init__(self, fail_in: str = "", hang: threading.Event | None = None) -> None:
        self.fail_in, self.hang = fail_in, hang
        self.calls: list[Any] = []
        self.threads: set[threading.Thread] = set()

    def _call(self, name: str, *what: Any) -> None:
        self.threads.add(threading.current_thread())
        if self.hang is not None:
            self.hang.wait(60)
        if name == self.fail_in:
            raise RuntimeError("server says no\nand more")
        self.calls.append((name, *what))

    def open(self) -> str | None:
        self._call("open")
        return None

    def log(self, step: int, values: dict[str, float]) -> None:
        self._call("log", step, values)

    def close(self, exit_code: int, summary: dict[str, Any]) -> None:
        self._call("close", exit_code, summary)


def test_every_key_of_the_record_has_a_section():
    line = {"step": 1, "time": 0.5, "tokens": 8, "loss": 2.0, "kl": 1.0, "flip_rate": 0.1}
    line |= {"mask_decay": 0.5, "tokens_per_second": 9.0, "l1_gap/h.0": 0.2, "sparse": True}
    assert mirrored(line).keys() == {
        *("time", "tokens", "train/loss", "train/kl", "sparsity/flip_rate", "sparsity/mask_decay"),
        *("speed/tokens_per_second", "layers/l1_gap/h.0", "sparsity/sparse"),
    }


def open_stream(
    directory: Path, *mirrors: Any, out: Any = None, resume_step: int | None = None, **changes: Any
) -> Stream:
    run: Any = SimpleNamespace(name="r", tracker=tracker(**changes), plain={"steps": 10}, seed=0)
    run.sparsity, run.init = SimpleNamespace(name="sste", n=2, m=4), SimpleNamespace(path=None)
    about: dict[str, Any] = {"console": Console(out or io.StringIO()), "total": 10}
    about |= {"mirrors": list(mirrors) or None, "resume_step": resume_step}
    return Stream(RunDirectory(directory), run, **about)


def test_mirrors_get_numbers_in_another_thread(tmp_path):
    mirror = Fake()
    stream = open_stream(tmp_path, mirror)
    stream.log({"step": 1, "time": 0.5, "tokens": 8, "loss": 2.0, "lr": float("nan")})
    stream.log({"step": 1, "split": "validation", "time": 0.5, "tokens": 8, "loss": 3.0})
    stream.log({"step": 1, "loss": 9.0})  # recorded before
    stream.close(3, {"masks": "2:4"})
    assert mirror.calls == [
        ("open",),
        ("log", 1, {"time": 0.5, "tokens": 8, "train/loss": 2.0}),
        ("log", 1, {"tokens": 8, "validation/loss": 3.0}),
        ("close", 3, {"masks": "2:4"}),
    ]
    assert threading.current_thread() not in mirror.threads


@pytest.mark.parametrize("where", ["open", "log", "close"])
def test_failing_mirror_is_one_warning(tmp_path, where):
    out = io.StringIO()
    good = Fake()
    stream = open_stream(tmp_path, Fake(fail_in=where), good, out=out)
    for step in range(1, 20):
        stream.log({"step": step, "loss": 1.0})
    stream.close(0)
    stream.close(0)
    (warning,) = [text for text in out.getvalue().splitlines() if text.startswith("warning")]
    assert "Fake failed (RuntimeError: server says no)" in warning
    assert len(read(tmp_path / "metrics.jsonl")) == 19
    assert len(good.calls) == 21


def test_hanging_mirror_delays_neither_log_nor_close(tmp_path, monkeypatch):
    monkeypatch.setattr(stream_module, "CLOSING_SECONDS", 0.2)
    out, release = io.StringIO(), threading.Event()
    mirror = Fake(hang=release)
    stream = open_stream(tmp_path, mirror, out=out)
    for step in range(1, 50):
        stream.log({"step": step, "loss": 1.0})
    assert mirror.calls == []  # log() returned while the mirror hangs
    stream.close(0)
    assert len(read(tmp_path / "metrics.jsonl")) == 49
    assert "Fake did not finish" in out.getvalue()
    release.set()


def test_missing_package_is_one_warning(tmp_path, monkeypatch):
    for name in ("tensorboard", "wandb"):
        monkeypatch.setitem(sys.modules, name, None)
    out = io.StringIO()
    stream = open_stream(tmp_path, tensorboard=True, mode="offline", out=out)
    stream.log({"step": 1, "loss": 1.0})
    stream.close(0)
    assert "TensorBoard needs the package tensorboard, which is not installed" in out.getvalue()
    assert "W&B needs the package wandb, which is not installed" in out.getvalue()
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_tensorboard_writes_events(tmp_path, monkeypatch):
    pytest.importorskip("tensorboard")
    monkeypatch.setattr(stream_module, "CLOSING_SECONDS", 60.0)  # importing torch takes a while
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    out = io.StringIO()
    stream = open_stream(tmp_path, tensorboard=True, out=out)
    for step in (1, 2):
        stream.log({"step": step, "loss": 2.0 / step, "flip_rate/h.0.mlp": 0.5})
    stream.close(0, {"masks": "2:4"})
    assert "warning" not in out.getvalue()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(e.step, e.value) for e in events.Scalars("train/loss")] == [(1, 2.0), (2, 1.0)]
    assert "layers/flip_rate/h.0.mlp" in events.Tags()["scalars"]
    stream = open_stream(tmp_path, tensorboard=True, out=out, resume_step=1)
    stream.log({"step": 2, "loss": 5.0})
    stream.close(0)
    files = sorted(
        (tmp_path / "tensorboard").glob("events*"), key=lambda file: file.stat().st_mtime
    )
    last = EventAccumulator(str(files[-1])).Reload()
    assert [(e.step, e.value) for e in last.Scalars("train/loss")] == [(1, 2.0), (2, 5.0)]
