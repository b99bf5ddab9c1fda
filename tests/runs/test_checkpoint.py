"""A checkpoint is whole or not there, whatever happens while it is written or afterwards."""

import fcntl
import hashlib
import json
import math
import os
import shutil
from pathlib import Path
from unittest import mock

import pytest
import safetensors.torch
import torch

from sparsepretrain.errors import CheckpointError, ConfigError, DataError, SparsePretrainError
from sparsepretrain.runs import checkpoint
from sparsepretrain.runs.checkpoint import Checkpoint, Retention
from sparsepretrain.runs.directory import RunDirectory
from support.tiny_runs import assert_equal_bits, assert_same_run, final_state, metrics

MODEL = "shard-00000-model.safetensors"
FILES = {"config.yaml", "state.json", MODEL, "shard-00000-optimizer.safetensors", "manifest.json"}
PARTS = {
    "model": {"w": torch.arange(100.0)},
    "optimizer": {"w|exp_avg": torch.ones(100), "groups": [{"lr": 0.1, "betas": (0.9, 0.99)}]},
}


def save(directory, step, keep_last=3, **parts):
    state = {"step": step, **PARTS, **parts}
    return checkpoint.save(directory, step, state, config="a: 1\n", keep=Retention(keep_last))


def load(path):
    return Checkpoint(path).parts()


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
        (Path, "mkdir"), (safetensors.torch, "save_file"), (Path, "write_text"), (os, "fsync"),
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
def test_failed_save_keeps_a_valid_checkpoint(tmp_path, monkeypatch, error, late, record_property):
    total = operations(tmp_path, monkeypatch)
    record_property("injected", total)
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
        assert found.parts()["step"] in (1, 2)
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
    monkeypatch.undo()
    (path / MODEL).write_bytes(b"")
    save(tmp_path, 1)  # a damaged one is replaced
    assert Checkpoint(path).problem() is None


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


@pytest.mark.parametrize("file", sorted(FILES))
@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_noticed_and_the_previous_one_used(tmp_path, file, damage):
    save(tmp_path, 1)
    path = save(tmp_path, 2)
    DAMAGES[damage](path / file)
    if file == "manifest.json" and damage == "last bit":  # a line feed became a vertical tab
        assert Checkpoint(path).problem() is not None or json.loads((path / file).read_text())
        return
    found, warnings = newest(tmp_path)
    assert found is not None and found.path.name == "step_00000001"
    assert len(warnings) == 1 and str(path) in warnings[0] and "\n" not in warnings[0]
    with pytest.raises(CheckpointError, match="damaged"):
        load(path)


def test_every_bit_flip_of_the_manifest_is_noticed(tmp_path, record_property):
    path = save(tmp_path, 12)
    file = path / "manifest.json"
    data = file.read_bytes()
    record_property("injected", len(data) * 8)
    for position in range(len(data) * 8):
        changed = bytearray(data)
        changed[position // 8] ^= 1 << position % 8
        file.write_bytes(changed)
        if Checkpoint(path).problem() is None:  # white space
            assert json.loads(file.read_bytes()) == json.loads(data), position
    for text in ("null", "[]", "1", '"a"', "{}", '{"format": 1, "step": 12, "sha256": null}'):
        file.write_text(text)
        assert Checkpoint(path).problem() is not None, text


def test_retention_counts_only_whole_ones(tmp_path):
    for step in (1, 2, 3):
        save(tmp_path, step)
    for step in (2, 3):
        (tmp_path / f"step_{step:08d}" / MODEL).write_bytes(b"")
    save(tmp_path, 4, keep_last=2)
    assert 1 in steps(tmp_path) and 4 in steps(tmp_path)
    save(tmp_path, 5, keep_last=1)
    assert steps(tmp_path) == [5]


@pytest.mark.parametrize(
    "sums", [{}, None, [], "", {"state.json": ""}, {"state.json": None}], ids=str
)
def test_a_missing_or_empty_checksum_is_no_checksum(tmp_path, sums):
    path = save(tmp_path, 1)
    manifest = json.loads((path / "manifest.json").read_text())
    if isinstance(sums, dict) and sums:
        sums = manifest["sha256"] | sums
    (path / "manifest.json").write_text(json.dumps(manifest | {"sha256": sums}))
    assert Checkpoint(path).problem() is not None


@pytest.mark.parametrize("name", ["../elsewhere", "/dev/zero", "a/../../elsewhere"])
def test_a_manifest_names_its_own_files_only(tmp_path, name):
    path = save(tmp_path / "run", 1)
    (tmp_path / "elsewhere").write_text("")
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["sha256"][name] = hashlib.sha256(b"").hexdigest()
    (path / "manifest.json").write_text(json.dumps(manifest))
    assert Checkpoint(path).problem() == "manifest.json names a file elsewhere"


@pytest.mark.parametrize("gate", ["sums", "names", "all"])
def test_disabled_checks_let_damage_through(tmp_path, monkeypatch, gate):
    """Negative control: with a check switched off, damage goes through, as the tests above see."""
    save(tmp_path, 1)
    path = save(tmp_path, 2)
    if gate == "names":
        manifest = json.loads((path / "manifest.json").read_text())
        del manifest["sha256"]["state.json"]
        (path / "manifest.json").write_text(json.dumps(manifest))
    else:
        flip(0.5)(path / MODEL)
    assert newest(tmp_path)[0].step == 1
    if gate == "sums":
        monkeypatch.setattr(checkpoint, "_sum", lambda path: mock.ANY)
    elif gate == "names":
        monkeypatch.setattr(checkpoint, "STATE", "config.yaml")
    else:
        monkeypatch.setattr(Checkpoint, "problem", lambda self, parts=None: None)
    assert newest(tmp_path)[0].path == path


def kept(directory, keep):
    for step in range(1, 13):
        checkpoint.save(directory, step, {"step": step}, config="", keep=keep)
    return steps(directory)


def test_retention_of_milestones(tmp_path):
    assert kept(tmp_path, Retention(2, every=5)) == [5, 10, 11, 12]


def test_retention_of_the_best(tmp_path):
    losses = {step: abs(step - 4.2) for step in range(1, 13)}
    assert kept(tmp_path / "a", Retention(1, best=2, losses=losses)) == [4, 5, 12]
    some = {8: 1.0, 3: 1.0, 6: 0.5, 99: 0.1}  # the earlier one of equals; 99 is not there
    assert kept(tmp_path / "b", Retention(1, best=2, losses=some)) == [3, 6, 12]
    assert kept(tmp_path / "c", Retention(1, every=6, best=1, losses=some)) == [6, 12]


def test_a_damaged_one_is_not_the_best(tmp_path):
    losses = {1: 0.1, 2: 0.2, 3: 0.3}
    for step in (1, 2, 3):
        save(tmp_path, step)
    flip(0.5)(tmp_path / "step_00000001" / MODEL)
    keep = Retention(1, best=1, losses=losses)
    checkpoint.save(tmp_path, 4, {"step": 4}, config="", keep=keep)
    assert steps(tmp_path) == [2, 4]


def test_retention_keeps_the_only_valid_one(tmp_path, monkeypatch):
    save(tmp_path, 1, keep_last=1)
    monkeypatch.setattr(os, "replace", lambda a, b: (_ for _ in ()).throw(OSError(5, "I/O error")))
    with pytest.raises(CheckpointError, match="I/O error"):
        save(tmp_path, 2, keep_last=1)
    assert newest(tmp_path)[0].path == tmp_path / "step_00000001"


def damage_is_one_line(path):
    with pytest.raises(CheckpointError, match=r"cannot be read|is damaged") as caught:
        load(path)
    return "\n" not in str(caught.value)


DEEP = b"[" * 100_000
ITEMS = [b'{"model": {"$items": 5}}', b'{"model": {"$items": [[[], 1]]}}']
NONSENSE = [("state.json", content) for content in (b"", b"torn", b"\xff" * 40, DEEP, *ITEMS)]
NONSENSE += [(MODEL, content) for content in (b"", b"torn", b"{}", b"\xff" * 40)]


@pytest.mark.parametrize(("file", "content"), NONSENSE, ids=lambda value: str(value[:20]))
def test_nonsense_with_right_sums_is_one_line(tmp_path, file, content):
    path = save(tmp_path, 1)
    (path / file).write_bytes(content)
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["sha256"][file] = hashlib.sha256(content).hexdigest()
    (path / "manifest.json").write_text(json.dumps(manifest))
    assert damage_is_one_line(path)


def test_a_deep_manifest_or_a_pipe_is_one_line(tmp_path):
    path = save(tmp_path, 1)
    (path / "manifest.json").write_bytes(DEEP)
    assert damage_is_one_line(path)
    for file in ("state.json", "config.yaml"):
        path = save(tmp_path / file, 1)
        (path / file).unlink()
        os.mkfifo(path / file)
        assert damage_is_one_line(path)


def test_a_part_is_read_and_checked_alone(tmp_path):
    path = save(tmp_path, 1)
    assert {p.name for p in path.iterdir()} == FILES
    with safetensors.safe_open(path / MODEL, "pt") as file:
        assert list(file.keys()) == ["model.w"]
    flip(0.5)(path / "shard-00000-optimizer.safetensors")
    found = Checkpoint(path)
    assert found.problem(("model", "ema")) is None
    assert_equal_bits(found.part("model"), PARTS["model"])
    with pytest.raises(CheckpointError, match="damaged"):
        found.part("optimizer")
    assert newest(tmp_path)[0] is None
    assert checkpoint.newest_valid(tmp_path, pytest.fail, ("model",)).path == path


def test_state_survives_a_round_trip(tmp_path):
    flat = torch.arange(24.0)
    odd = torch.tensor([math.nan, math.inf, -math.inf, -0.0, 1e-45])
    tensors = {
        "whole": flat, "overlapping": flat[2:10], "also overlapping": flat[4:12],
        "other shape": flat.view(4, 6), "transposed": flat.view(4, 6).t(), "every other": flat[::2],
        "expanded": flat[3].expand(2, 3), "scalar": torch.tensor(3.5), "empty": torch.empty(0, 3),
        "also empty": torch.empty(0, 3), "bool": torch.tensor([True, False]), "odd": odd,
        "parameter": torch.nn.Parameter(flat[:3].clone()),
        "channels last": torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
        **{str(t): torch.arange(-3, 5).to(t) for t in (torch.int8, torch.int16, torch.int32,
           torch.int64, torch.float16, torch.bfloat16, torch.float64)},
        **{str(t): torch.arange(5).to(t) for t in (torch.uint8, torch.uint16, torch.uint32)},
        **{str(t): odd.to(t) for t in (torch.float8_e4m3fn, torch.float8_e5m2)},
    }  # fmt: skip
    values = {
        "numbers": [0.1, 1e308, 5e-324, -0.0, 2**80, -1, True, False, None, "β", ""],
        "not finite": (math.inf, -math.inf, (1, [2, (3,)])),
        "keys": {1: "a", (2, 3): "b", "$float": 0.5, "c": {"": 1}, "a.b": {}},
        "nested": [{"deep": ({"tensor": flat},)}],
    }
    parts = {"model": tensors, "values": values, "none": None, "number": 3, "tensor": flat}
    path = checkpoint.save(tmp_path, 7, parts, config="", keep=Retention(1))
    got = load(path)
    assert list(got) == list(parts)
    tensors["parameter"] = tensors["parameter"].detach()
    assert_equal_bits(parts, got)
    nan = checkpoint.save(tmp_path, 8, {"a": [math.nan]}, config="", keep=Retention(2))
    assert math.isnan(load(nan)["a"][0])
    json.loads((path / "state.json").read_text(), parse_constant=pytest.fail)


def test_tied_tensors_are_stored_once_and_stay_tied(tmp_path):
    weight = torch.randn(64, 64)
    path = save(tmp_path, 1, model={"in": weight, "out": weight.detach()})
    assert (path / MODEL).stat().st_size < 2 * weight.nbytes
    model = load(path)["model"]
    assert model["in"] is model["out"] and torch.equal(model["in"], weight)


def test_unsupported_values_are_refused(tmp_path):
    names = {"a.b": torch.ones(1), "a": {"b": torch.ones(1)}}
    for part, words in (({"a": {1, 2}}, r"model\.a is a set"), (names, "two")):
        with pytest.raises(CheckpointError, match=rf"cannot write checkpoint .*{words}"):
            save(tmp_path, 1, model=part)
    assert not list(tmp_path.iterdir())


def test_loaded_tensors_do_not_depend_on_the_file(tmp_path):
    path = save(tmp_path, 1)
    tensor = load(path)["model"]["w"]
    (path / MODEL).write_bytes(b"\xff" * 500)
    shutil.rmtree(path)
    assert torch.equal(tensor, PARTS["model"]["w"])


def test_each_file_is_checked_once_per_process(tmp_path, monkeypatch):
    sums, original = [], checkpoint._sum
    monkeypatch.setattr(checkpoint, "_sum", lambda path: sums.append(path.name) or original(path))
    for step in range(1, 6):
        save(tmp_path, step, keep_last=5)
        assert sorted(sums) == sorted(FILES - {"manifest.json"}), step
        sums.clear()
    found, _ = newest(tmp_path)
    found.parts(), found.part("model"), found.config(), found.require()
    assert sorted(sums) == sorted(FILES - {"manifest.json"})
    monkeypatch.setattr(checkpoint, "_whole", {})  # as in another process
    sums.clear()
    save(tmp_path, 6, keep_last=5)
    assert sums.count(MODEL) == 5, "its own, and four of the first process"
    sums.clear()
    save(tmp_path, 7, keep_last=5)
    assert sums.count(MODEL) == 1


def damaged(tiny, stop_after, *which):
    stop_after(5)
    directory = tiny.train("checkpoint.keep_last=9").directory
    stop_after(-1)
    assert steps(directory / "checkpoints") == [2, 4, 5]
    for step in which:
        flip(0.5)(directory / "checkpoints" / f"step_{step:08d}" / MODEL)
    return directory


def test_damaged_checkpoint_resumes_from_the_one_before(tiny, stop_after):
    plain = tiny.train("checkpoint.keep_last=9", "runs_dir=" + str(tiny.root / "plain"))
    damaged(tiny, stop_after, 4, 5)
    outcome = tiny.train("checkpoint.keep_last=9")
    assert outcome.code == 0
    warnings = [line for line in outcome.output.splitlines() if line.startswith("warning")]
    assert len(warnings) == 2 and "step_00000005 is damaged" in warnings[0]
    assert "step 2" in outcome.output
    assert_same_run(plain.directory, outcome.directory)
    assert Checkpoint(outcome.directory / "checkpoints" / "step_00000004").problem() is None


def test_best_checkpoints_are_kept(tiny, stop_after):
    keep = ("keep_best=2", "keep_last=1", "keep_every=4", "every=1")
    words = (*(f"checkpoint.{word}" for word in keep), "steps=9", "eval.every=1", "optim.lr=10")
    stop_after(6)
    tiny.train(*words)
    stop_after(-1)
    directory = tiny.train(*words).directory
    losses = {line["step"]: line["loss"] for line in metrics(directory) if "split" in line}
    best = sorted(range(1, 10), key=lambda step: losses[step])[:2]
    assert not {4, 8, 9}.issuperset(best), losses
    assert steps(directory / "checkpoints") == sorted({*best, 4, 8, 9})


def test_run_without_a_valid_checkpoint_is_refused(tiny, stop_after):
    directory = damaged(tiny, stop_after, 2, 4, 5)
    before = {p: p.read_bytes() for p in directory.rglob("*") if p.is_file()}
    with pytest.raises(CheckpointError, match=r"resume=never") as caught:
        tiny.train("checkpoint.keep_last=9")
    assert caught.value.exit_code == 4
    assert {p: p.read_bytes() for p in directory.rglob("*") if p.is_file()} == before


def test_a_damaged_final_checkpoint_is_not_a_finished_run(tiny):
    plain = tiny.train()
    expected = final_state(plain.directory), metrics(plain.directory)
    flip(0.5)(plain.directory / "checkpoints" / "step_00000006" / MODEL)
    again = tiny.train()
    assert "damaged" in again.output and "train loss" in again.output
    assert final_state(again.directory)["step"] == 6
    assert metrics(again.directory) == expected[1]


def test_disk_full_in_a_run(tiny, monkeypatch):
    original, calls = safetensors.torch.save_file, []

    def full(tensors, file, *header):
        calls.append(file)
        if len(calls) == 4:  # two tensor files a save
            raise safetensors.SafetensorError("I/O error: No space left on device (os error 28)")
        original(tensors, file, *header)

    monkeypatch.setattr(safetensors.torch, "save_file", full)
    with pytest.raises(CheckpointError, match=r"cannot write .*step_00000004: disk full") as caught:
        tiny.train()
    assert caught.value.exit_code == 4
    directory = tiny.directory() / "checkpoints"
    assert [p.name for p in directory.iterdir()] == ["step_00000002"]
    assert tiny.train().code == 0


@pytest.mark.parametrize(
    "file", ["config.yaml.tmp", "environment.json.tmp", "masks", "checkpoints"]
)
def test_what_cannot_be_written_is_one_line(tiny, file):
    directory = tiny.directory("log.masks_every=2")
    directory.mkdir(parents=True)
    (directory / file).mkdir() if "." in file else (directory / file).write_text("")
    with pytest.raises(SparsePretrainError, match="cannot write") as caught:
        tiny.train("log.masks_every=2")
    assert "\n" not in str(caught.value)


def test_unwritable_run_directory(tiny):
    (tiny.root / "runs").write_text("a file")
    with pytest.raises(ConfigError, match=r"not writable .*runs_dir=DIR"):
        tiny.train()
    with pytest.raises(ConfigError, match="not writable"):
        tiny.train("runs_dir=/proc/nowhere")
    with pytest.raises(ConfigError, match="at most 200 bytes, got 'xxx"):
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


def source(tiny, *overrides):
    return tiny.train("name=source", "steps=4", *overrides).directory


def test_resume_from_a_path_with_another_learning_rate(tiny):
    path = source(tiny, "schedule=constant") / "checkpoints" / "step_00000004"
    changes = ("schedule=constant", "optim.lr=5e-3", "optim.weight_decay=0.2")
    outcome = tiny.train(f"resume='{path}'", *changes)
    assert outcome.code == 0
    assert "optim.lr: 0.002 -> 0.005" in outcome.output
    assert "steps: 4 -> 6" in outcome.output
    lines = [line for line in metrics(outcome.directory) if "split" not in line]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6], "with the record of the source"
    assert [line["lr"] for line in lines[4:]] == [5e-3, 5e-3]
    # the checkpoint holds the groups of the optimizer; the configuration decides
    group = final_state(outcome.directory)["optimizer_options"]["groups"][0]
    assert (group["lr"], group["weight_decay"]) == (5e-3, 0.2)


def test_requeued_resume_from_a_path_goes_on_where_it_stopped(tiny, stop_after):
    path = source(tiny)
    stop_after(5)
    stopped = tiny.train(f"resume='{path}'")
    assert stopped.code == 143 and "step_00000004 (step 4)" in stopped.output
    stop_after(-1)
    assert "step_00000005 (step 5)" in tiny.train(f"resume='{path}'").output
    assert "finished" in tiny.train(f"resume='{path}'").output


def test_resume_from_another_configuration(tiny):
    path = source(tiny)
    for change, words in (
        ("model.n_embd=64", "model.n_embd: 32 -> 64"),
        ("sparsity=ste", "sparsity.name: sste -> ste"),
        ("optim=sgd", "optim.name: adamw -> sgd"),
        ("data.validation=0.4", "data.validation: 0.3 -> 0.4"),
        ("seed=1", "seed: 0 -> 1"),
        ("steps=3", "steps=3"),  # beyond the last step
    ):
        with pytest.raises(CheckpointError) as caught:
            tiny.train(f"resume='{path}'", change)
        assert words in str(caught.value) and "\n" not in str(caught.value)
        assert not tiny.directory(f"resume='{path}'", change).exists()


@pytest.mark.parametrize("resume", ["nowhere", "Auto", "''", "/dev/null", "/proc"])
def test_resume_from_a_missing_path_is_refused(tiny, resume):
    with pytest.raises(CheckpointError, match="resume=") as caught:
        tiny.train(f"resume={resume}")
    assert "\n" not in str(caught.value) and not (tiny.root / "runs").exists()


def test_crafted_records_are_one_line(tiny):
    directory = RunDirectory(tiny.train("steps=2").directory)
    directory.environment_file.write_text("[]")
    with pytest.raises(ConfigError, match="got list"):
        directory.environment()
    lines = directory.record_file.read_text()
    for line in ("[" * 100_000, json.dumps({"step": 2**70}), json.dumps({"step": -1})):
        directory.record_file.write_text(f"{line}\n{lines}")
        with pytest.raises(DataError, match="line 1"):
            directory.record()


def test_copies_by_the_user_are_no_newest_checkpoint(tmp_path):
    for step in (1, 2, 100_000_000):
        save(tmp_path, step)
        shutil.copytree(
            tmp_path / checkpoint.step_name(1), tmp_path / "step_best", dirs_exist_ok=True
        )
        found, warnings = newest(tmp_path)
        assert found.step == step and not warnings
    for path in checkpoint.saved(tmp_path).values():
        shutil.rmtree(path)
    assert newest(tmp_path) == (None, [])
    assert Checkpoint(tmp_path / "step_best").problem() is None, "it can be named"
