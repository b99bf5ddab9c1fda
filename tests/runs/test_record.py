import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsepretrain.errors import CheckpointError, ConfigError, DataError
from sparsepretrain.runs.record import Record, read

FILE = "metrics.jsonl"


def write(directory: Path, steps: range | list[int], resume_step: int | None = None) -> Record:
    record = Record(directory / FILE, resume_step=resume_step)
    for step in steps:
        record.write({"step": step, "loss": 1.0 / (step + 1)})
    return record


def test_one_strict_json_object_per_line(tmp_path):
    record = Record(tmp_path / FILE, resume_step=None)
    loss = np.float32(0.5)
    line = record.write({"step": np.int64(1), "loss": loss, "lr": math.nan, "a": math.inf})
    text = (tmp_path / FILE).read_text()  # flushed: the record is still open
    assert text.endswith("\n") and text.count("\n") == 1
    assert json.loads(text, parse_constant=pytest.fail) == line
    assert line is not None and list(line)[:2] == ["step", "time"]
    assert line["loss"] == 0.5 and line["lr"] is None and line["a"] is None


def test_a_step_is_never_there_twice(tmp_path):
    record = write(tmp_path, [1, 2])
    assert record.write({"step": 2, "loss": 9.0}) is None
    assert record.write({"step": 2, "split": "validation", "loss": 3.0}) is not None
    assert record.write({"step": 2, "split": "validation", "loss": 4.0}) is None
    assert [line["loss"] for line in read(tmp_path / FILE)] == [1 / 2, 1 / 3, 3.0]


def test_time_continues_over_a_resume(tmp_path):
    record = Record(tmp_path / FILE, resume_step=None)
    record.write({"step": 1, "time": 100.0})
    record.write({"step": 2, "time": 900.0})  # lost with the crash
    record.close()
    line = Record(tmp_path / FILE, resume_step=1).write({"step": 2})
    assert line is not None and 100.0 <= line["time"] < 200.0


@settings(deadline=None)
@given(cut=st.integers(0, 40), steps=st.integers(1, 5), resume=st.integers(0, 6))
def test_kill_anywhere_then_resume(tmp_path_factory, cut, steps, resume):
    """The record without later steps, whole (``cut=0``) or not, goes on, and has each step once."""
    directory = tmp_path_factory.mktemp("run")
    write(directory, range(1, steps + 1)).close()
    whole = (directory / FILE).read_bytes()
    (directory / FILE).write_bytes(whole[: len(whole) - cut])
    kept = [line["step"] for line in read(directory / FILE)]
    assert kept == list(range(1, len(kept) + 1))
    record = write(directory, range(resume + 1, 8), resume_step=resume)
    assert record.write({"step": 7}) is None
    record.close()
    after = [line["step"] for line in read(directory / FILE)]
    assert after == [s for s in kept if s <= resume] + list(range(resume + 1, 8))
    assert (directory / FILE).read_bytes().endswith(b"}\n")
    assert [file.name for file in directory.iterdir()] == [FILE]


def test_line_torn_inside_a_character_is_dropped(tmp_path):
    write(tmp_path, range(1, 5)).close()
    write(tmp_path, [1]).close()  # a new record clears the old one
    with (tmp_path / FILE).open("ab") as file:
        file.write('{"step": 2, "note": "β'.encode()[:-1])
    assert [line["step"] for line in read(tmp_path / FILE)] == [1]


def test_a_damaged_line_in_the_middle_is_named(tmp_path):
    (tmp_path / FILE).write_text('{"step": 1}\n{"st\n{"step": 3}\n')
    with pytest.raises(DataError, match=r"line 2 .*remove that line"):
        read(tmp_path / FILE)
    with pytest.raises(DataError, match="line 2"):
        Record(tmp_path / FILE, resume_step=1)


def test_missing_record_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"has no metrics\.jsonl"):
        read(tmp_path / FILE)


def test_unwritable_directory(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"not writable.*runs_dir"):
        Record(tmp_path / "file" / "run" / FILE, resume_step=None)


def test_full_disk_is_one_line(tmp_path):
    record = write(tmp_path, [1])
    full = Path("/dev/full")
    record._file = full.open("ab", buffering=0)
    with pytest.raises(CheckpointError, match=r"cannot write .*No space left") as caught:
        record.write({"step": 2})
    assert caught.value.exit_code == 4


def test_values_without_json_form_raise_type_error(tmp_path):
    with pytest.raises(TypeError, match="'loss' holds a list"):
        Record(tmp_path / FILE, resume_step=None).write({"step": 1, "loss": [1]})
