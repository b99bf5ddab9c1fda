"""A checkpoint is whole or not there, whatever happens while it is written or afterwards."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from tiny_runs import assert_same_run, final_state, metrics

from sparsepretrain.errors import CheckpointError, ConfigError
from sparsepretrain.runs import checkpoint

STATE = {"step": 1, "weights": torch.arange(100.0)}


def save(directory, step, keep_last=3):
    return checkpoint.save(
        directory, step, {**STATE, "step": step}, config="a: 1\n", keep_last=keep_last
    )


def steps(directory):
    return sorted(int(p.name[5:]) for p in directory.glob("step_*"))


def newest(directory):
    warnings: list[str] = []
    return checkpoint.newest_valid(directory, warnings.append), warnings


class Killed(BaseException):
    """Stands for kill -9: nothing may catch it."""


class Failing:
    """Counts the file operations of checkpoint.py and fails at the chosen one."""

    POINTS = (
        (Path, "mkdir"), (torch, "save"), (Path, "write_text"), (os, "fsync"),
        (os, "replace"), (shutil, "rmtree"), (os, "open"),
    )  # fmt: skip

    def __init__(self, monkeypatch, at, error, *, late=False):
        self.count, self.at, self.error, self.late = 0, at, error, late
        for owner, name in self.POINTS:
            monkeypatch.setattr(owner, name, self.wrap(getattr(owner, name)))

    def wrap(self, function):
        def wrapped(*args, **kwargs):
            # cleaning up after an error may fail as well, but not on purpose
            self.count += 1
            now = self.count == self.at
            if now and not self.late:
                raise self.error
            result = function(*args, **kwargs)
            if now:
                raise self.error
            return result

        return wrapped


def operations(tmp_path, monkeypatch) -> int:
    with monkeypatch.context() as patch:
        failing = Failing(patch, None, None)
        save(tmp_path / "counted", 1)
    return failing.count


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("error", [Killed(), OSError(28, "No space left on device")], ids=str)
def test_a_save_that_fails_at_any_point(tmp_path, monkeypatch, error, late):
    total = operations(tmp_path, monkeypatch)
    assert total >= 10
    for at in range(1, total + 1):
        directory = tmp_path / f"{at}"
        save(directory, 1, keep_last=1)
        with monkeypatch.context() as patch:
            failing = Failing(patch, at, error, late=late)
            try:
                save(directory, 2, keep_last=1)
            except (Killed, CheckpointError) as caught:
                if isinstance(caught, CheckpointError):
                    assert "No space left" in str(caught) and "\n" not in str(caught)
        assert failing.count >= at
        found, warnings = newest(directory)
        assert found is not None and not warnings
        assert checkpoint.load(found)[0]["step"] in (1, 2)
        save(directory, 3, keep_last=1)  # the next one cleans up
        assert steps(directory) == [3]
        assert [p.name for p in directory.iterdir()] == ["step_00000003"]


def test_saving_a_step_again_never_removes_it(tmp_path, monkeypatch):
    path = save(tmp_path, 1, keep_last=1)
    before = {p: p.stat().st_mtime_ns for p in path.rglob("*")}
    failing = Failing(monkeypatch, 1, Killed())
    assert save(tmp_path, 1, keep_last=1) == path
    assert failing.count == 0
    assert {p: p.stat().st_mtime_ns for p in path.rglob("*")} == before


def test_a_damaged_checkpoint_of_the_same_step_is_replaced(tmp_path):
    path = save(tmp_path, 1)
    (path / "state.pt").write_bytes(b"")
    save(tmp_path, 1)
    assert checkpoint.verify(path) is None


def cut(part):
    def damage(path):
        data = path.read_bytes()
        path.write_bytes(data[: int(len(data) * part)])

    return damage


def flip(part):
    def damage(path):
        data = bytearray(path.read_bytes())
        data[min(int(len(data) * part), len(data) - 1)] ^= 1
        path.write_bytes(data)

    return damage


DAMAGES = {
    "empty": cut(0), "quarter": cut(0.25), "half": cut(0.5), "three quarters": cut(0.75),
    "first bit": flip(0), "middle bit": flip(0.5), "last bit": flip(1),
    "missing": lambda path: path.unlink(),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"x"),
    "directory": lambda path: (path.unlink(), path.mkdir()),
}  # fmt: skip


@pytest.mark.parametrize("file", ["state.pt", "manifest.json", "config.yaml"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_noticed_and_the_previous_one_used(tmp_path, file, damage):
    save(tmp_path, 1)
    path = save(tmp_path, 2)
    DAMAGES[damage](path / file)
    if file == "manifest.json" and damage == "last bit":  # a line feed became a vertical tab
        assert checkpoint.verify(path) is not None or json.loads((path / file).read_text())
        return
    found, warnings = newest(tmp_path)
    assert found is not None and found.name == "step_00000001"
    assert len(warnings) == 1 and str(path) in warnings[0] and "\n" not in warnings[0]
    with pytest.raises(CheckpointError, match="damaged"):
        checkpoint.load(path)


def test_every_single_bit_of_the_manifest(tmp_path):
    path = save(tmp_path, 12)
    file = path / "manifest.json"
    data = file.read_bytes()
    for position in range(len(data) * 8):
        changed = bytearray(data)
        changed[position // 8] ^= 1 << position % 8
        file.write_bytes(changed)
        if checkpoint.verify(path) is None:  # white space
            assert json.loads(file.read_bytes()) == json.loads(data), position
    for text in ("null", "[]", "1", '"a"', "{}", '{"format": 1, "step": 12, "sha256": null}'):
        file.write_text(text)
        assert checkpoint.verify(path) is not None, text


def test_retention_counts_only_whole_ones(tmp_path):
    for step in (1, 2, 3):
        save(tmp_path, step)
    for step in (2, 3):
        (tmp_path / f"step_{step:08d}" / "state.pt").write_bytes(b"")
    save(tmp_path, 4, keep_last=2)
    assert 1 in steps(tmp_path) and 4 in steps(tmp_path)
    save(tmp_path, 5, keep_last=1)
    assert steps(tmp_path) == [5]


def test_retention_keeps_the_only_valid_one(tmp_path, monkeypatch):
    save(tmp_path, 1, keep_last=1)
    monkeypatch.setattr(torch, "save", lambda state, file: None)
    monkeypatch.setattr(os, "replace", lambda a, b: (_ for _ in ()).throw(OSError(5, "I/O error")))
    with pytest.raises(CheckpointError, match="I/O error"):
        save(tmp_path, 2, keep_last=1)
    assert newest(tmp_path)[0] == tmp_path / "step_00000001"


def test_errors_without_a_message(tmp_path, monkeypatch):
    def fail(state, path):
        raise RuntimeError

    monkeypatch.setattr(torch, "save", fail)
    with pytest.raises(CheckpointError, match="RuntimeError"):
        save(tmp_path, 1)


@pytest.mark.parametrize("content", [os.getcwd, b"no archive"], ids=["code", "damaged"])
def test_a_payload_is_refused_and_never_run(tmp_path, monkeypatch, content):
    class Payload:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "made"),)

    monkeypatch.setitem(STATE, "weights", Payload())
    path = save(tmp_path, 1)
    if isinstance(content, bytes):
        (path / "state.pt").write_bytes(content)
        manifest = json.loads((path / "manifest.json").read_text())
        manifest["sha256"]["state.pt"] = hashlib.sha256(content).hexdigest()
        (path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match=r"state\.pt is refused: it is damaged, or") as caught:
        checkpoint.load(path)
    assert "\n" not in str(caught.value) and "weights_only" not in str(caught.value)
    assert not (tmp_path / "made").exists()


# whole runs


def damaged(tiny, stop_after, *which):
    stop_after(5)
    directory = tiny.train("checkpoint.keep_last=9").directory
    stop_after(-1)
    assert steps(directory / "checkpoints") == [2, 4, 5]
    for step in which:
        flip(0.5)(directory / "checkpoints" / f"step_{step:08d}" / "state.pt")
    return directory


def test_a_run_goes_on_from_the_one_before(tiny, stop_after):
    plain = tiny.train("checkpoint.keep_last=9", "runs_dir=" + str(tiny.root / "plain"))
    damaged(tiny, stop_after, 4, 5)
    outcome = tiny.train("checkpoint.keep_last=9")
    assert outcome.code == 0
    warnings = [line for line in outcome.output.splitlines() if line.startswith("warning")]
    assert len(warnings) == 2 and "step_00000005 is damaged" in warnings[0]
    assert "step 2" in outcome.output
    assert_same_run(plain.directory, outcome.directory)
    assert checkpoint.verify(outcome.directory / "checkpoints" / "step_00000004") is None


def test_no_whole_checkpoint(tiny, stop_after):
    directory = damaged(tiny, stop_after, 2, 4, 5)
    before = {p: p.read_bytes() for p in directory.rglob("*") if p.is_file()}
    with pytest.raises(
        CheckpointError, match=r"no checkpoint in .* is whole.*resume=never"
    ) as caught:
        tiny.train("checkpoint.keep_last=9")
    assert caught.value.exit_code == 4
    assert {p: p.read_bytes() for p in directory.rglob("*") if p.is_file()} == before


def test_a_damaged_final_checkpoint_is_not_a_finished_run(tiny):
    plain = tiny.train()
    expected = final_state(plain.directory), metrics(plain.directory)
    flip(0.5)(plain.directory / "checkpoints" / "step_00000006" / "state.pt")
    again = tiny.train()
    assert "damaged" in again.output and "train loss" in again.output
    assert final_state(again.directory)["step"] == 6
    assert metrics(again.directory) == expected[1]


def test_disk_full_in_a_run(tiny, monkeypatch):
    original, calls = torch.save, []

    def full(state, file):
        calls.append(file)
        if len(calls) == 2:
            file = open("/dev/full", "wb", buffering=0)  # noqa: SIM115
        original(state, file)

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(CheckpointError, match=r"cannot write .*step_00000004: disk full") as caught:
        tiny.train()
    assert caught.value.exit_code == 4
    directory = tiny.directory() / "checkpoints"
    assert [p.name for p in directory.iterdir()] == ["step_00000002"]
    assert tiny.train().code == 0


def test_a_file_in_place_of_the_directory(tiny):
    directory = tiny.directory()
    directory.mkdir(parents=True)
    (directory / "checkpoints").write_text("")
    with pytest.raises(CheckpointError, match="cannot write checkpoint"):
        tiny.train()


@pytest.mark.parametrize("file", ["config.yaml.tmp", "environment.json.tmp", "masks"])
def test_what_cannot_be_written_is_one_line(tiny, file):
    from sparsepretrain.errors import SparsePretrainError

    directory = tiny.directory("log.masks_every=2")
    (directory / file).parent.mkdir(parents=True)
    if file == "masks":
        (directory / file).write_text("")
    else:
        (directory / file).mkdir()
    with pytest.raises(SparsePretrainError, match="cannot write") as caught:
        tiny.train("log.masks_every=2")
    assert "\n" not in str(caught.value)


def test_unwritable_run_directory(tiny):
    (tiny.root / "runs").write_text("a file")
    with pytest.raises(ConfigError, match=r"not writable .*runs_dir=DIR"):
        tiny.train()
    with pytest.raises(ConfigError, match="not writable"):
        tiny.train("runs_dir=/proc/nowhere")
    with pytest.raises(ConfigError, match="not writable"):
        tiny.train("runs_dir=" + str(tiny.root / "free"), "name=" + "x" * 300)
    assert not (tiny.root / "free").exists()


def test_a_second_process_is_refused(tiny):
    directory = tiny.train().directory
    before = {p: p.stat().st_mtime_ns for p in directory.rglob("*") if p.name != ".lock"}
    with open(directory / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match="another process is training"):
            tiny.train("resume=never")
    assert {p: p.stat().st_mtime_ns for p in directory.rglob("*") if p.name != ".lock"} == before
    assert tiny.train("resume=never").code == 0


# resume=PATH


def source(tiny, *overrides):
    return tiny.train("name=source", "steps=4", *overrides).directory


def test_resume_from_a_path_with_another_learning_rate(tiny):
    path = source(tiny, "schedule=constant") / "checkpoints" / "step_00000004"
    outcome = tiny.train(
        f"resume='{path}'", "schedule=constant", "optim.lr=5e-3", "optim.weight_decay=0.2"
    )
    assert outcome.code == 0
    assert "continuing with another value of optim.lr: 0.002 -> 0.005" in outcome.output
    assert "steps: 4 -> 6" in outcome.output
    lines = [line for line in metrics(outcome.directory) if "split" not in line]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6], "with the record of the source"
    assert [line["lr"] for line in lines[4:]] == [5e-3, 5e-3]
    # the checkpoint holds the groups of the optimiser; the configuration decides
    group = final_state(outcome.directory)["optimizer_options"]["groups"][0]
    assert (group["lr"], group["weight_decay"]) == (5e-3, 0.2)


def test_resume_from_a_run_directory_takes_the_newest(tiny):
    path = source(tiny)
    outcome = tiny.train(f"resume='{path}'")
    assert "step_00000004 (step 4)" in outcome.output
    again = tiny.train(f"resume='{path}'")
    assert "finished" in again.output


def test_requeued_resume_from_a_path_goes_on_where_it_stopped(tiny, stop_after):
    path = source(tiny)
    stop_after(5)
    assert tiny.train(f"resume='{path}'").code == 143
    stop_after(-1)
    assert "step_00000005 (step 5)" in tiny.train(f"resume='{path}'").output


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("model.n_embd=64", "model.n_embd: 32 -> 64"),
        ("model.n_layer=2", "model.n_layer: 1 -> 2"),
        ("sparsity=ste", "sparsity.name: sste -> ste"),
        ("sparsity.gamma=0.5", "sparsity.gamma: 0 -> 0.5"),
        ("optim=sgd", "optim.name: adamw -> sgd"),
        ("data.validation=0.4", "data.validation: 0.3 -> 0.4"),
        ("seed=1", "seed: 0 -> 1"),
        ("batch.size=8", "batch.size: 4 -> 8"),
    ],
)
def test_resume_from_another_configuration(tiny, change, words):
    path = source(tiny)
    with pytest.raises(CheckpointError) as caught:
        tiny.train(f"resume='{path}'", change)
    assert words in str(caught.value) and "\n" not in str(caught.value)
    assert not tiny.directory(f"resume='{path}'", change).exists()


def test_resume_beyond_the_last_step(tiny):
    path = source(tiny)
    with pytest.raises(CheckpointError, match="has 4 steps, more than steps=3"):
        tiny.train(f"resume='{path}'", "steps=3")
    assert not tiny.directory("steps=3").exists()


def test_resume_on_other_data(tiny, stop_after):
    stop_after(3)
    tiny.train()
    stop_after(-1)
    from sparsepretrain.tasks.causal_lm import CausalLM

    original = CausalLM.open_data

    def changed(self, *args, **kwargs):
        original(self, *args, **kwargs)
        self.fingerprint = "0123456789abcdef"

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CausalLM, "open_data", changed)
        with pytest.raises(CheckpointError, match=r"other data \(fingerprint"):
            tiny.train()
    assert tiny.train().code == 0


@pytest.mark.parametrize("resume", ["nowhere", "Auto", "''", "/dev/null", "/proc"])
def test_resume_from_nothing(tiny, resume):
    with pytest.raises(CheckpointError, match="resume=") as caught:
        tiny.train(f"resume={resume}")
    assert "\n" not in str(caught.value) and not (tiny.root / "runs").exists()
