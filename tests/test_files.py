"""Whole files or none."""

import os
from typing import Any

import pytest

from sparsepretrain.files import read_json, write_atomic


def test_text_and_bytes_are_written_as_they_are(tmp_path):
    (tmp_path / "file.tmp").write_text("left by a killed process")
    for content, wanted in (("ä\r\n", "ä\r\n".encode()), (b"\x00\xff", b"\x00\xff"), ("", b"")):
        write_atomic(tmp_path / "file", content)
        assert (tmp_path / "file").read_bytes() == wanted
    write_atomic(tmp_path / "file", memoryview(bytearray(b"abcd"))[1:3], tag=".7")
    assert (tmp_path / "file").read_bytes() == b"bc"
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize("name", ["fsync", "replace"])
def test_a_failure_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch, name):
    write_atomic(tmp_path / "file", "old")

    def fail(*args: Any) -> None:
        assert (tmp_path / "file.tag.tmp").exists()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, name, fail)
    with pytest.raises(OSError, match="No space left"):  # unchanged
        write_atomic(tmp_path / "file", "new", tag=".tag")
    assert (tmp_path / "file").read_text() == "old"
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("[" * 100_000, "nested too deeply"),
        ("[1]", "expected a JSON object, got list"),
        ("{", "Expecting property name"),
        ("1" * 5000, "digits"),
        (b"\xff\xfe", "utf-8"),
    ],
)
def test_bad_json_is_a_value_error(tmp_path, content, told):
    file = tmp_path / "a.json"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=told):
        read_json(file)


def test_pipe_is_refused_without_waiting(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="not a regular file"):
        read_json(tmp_path / "pipe")
