"""Data files that are pipes, devices or sockets: named, and never opened."""

import os
import signal
import socket
import tempfile
from pathlib import Path

import pytest
from PIL import Image

from sparsepretrain.data.encoding import FileCodec
from sparsepretrain.data.formats import Images
from sparsepretrain.data.preparation import prepare
from sparsepretrain.errors import DataError


@pytest.fixture(autouse=True)
def _no_hanging():
    """End a test that waits for a pipe."""

    def stop(*_):
        raise TimeoutError("a pipe was opened")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture
def special():
    """``special("pipe", "a.txt")``: path of a new file of that kind."""
    with tempfile.TemporaryDirectory() as root:  # a socket's path must be short

        def make(kind, name):
            path = Path(root) / name
            if kind == "pipe":
                os.mkfifo(path)
            elif kind == "device":
                path.symlink_to("/dev/null")
            else:
                with socket.socket(socket.AF_UNIX) as server:
                    server.bind(str(path))
            return path

        yield make


KINDS = ("pipe", "device", "socket")


def changes(config, path):
    """Settings that name a file."""
    plain = {"tokenizer": "bytes", "vocab_size": None}
    return {
        "text_files": plain | {"files": [path]},
        "text_files test": plain | {"files": [__file__], "test": [path]},
        "document_files": plain | {"data_files": [path]},
        "parallel_files": plain | {"train": [__file__, path], "validation": None},
        "squad": {"train": [path], "validation": []},
        "wmt14_ende": plain | {"train": path, "validation": None, "test": None},
    }[config]


NAMED = {
    "text_files": "files",
    "text_files test": "test",
    "document_files": "data_files",
    "parallel_files": "train",
    "squad": "train",
    "wmt14_ende": "train",
}
"""Configuration, and the key that names files."""
BY_PATTERN = [(*item, True) for item in NAMED.items() if item[0] != "parallel_files"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("config", "key", "pattern"), [*((*item, False) for item in NAMED.items()), *BY_PATTERN]
)
def test_files_that_are_not_regular_are_named(options, special, cache, kind, config, key, pattern):
    path = special(kind, "a.jsonl" if config[0] in "dsw" else "a.txt")
    entry = str(path.parent / "*") + path.suffix if pattern else str(path)
    words = rf"data\.{key}: {path} is no regular file but a {kind}: write its content to a file"
    with pytest.raises(DataError, match=words):
        prepare(options(config.split()[0], **changes(config, entry)), workers=1)
    assert not list(cache.glob("*/manifest.json"))


def test_a_pipe_with_a_wildcard_in_its_name_is_named(options, special):
    path = special("pipe", "a[1].txt")
    with pytest.raises(DataError, match=r"a\[1\]\.txt is no regular file but a pipe"):
        prepare(options("text_files", **changes("text_files", str(path))), workers=1)


@pytest.mark.parametrize("kind", KINDS)
def test_a_tokenizer_that_is_not_regular_is_named(options, special, tmp_path, kind):
    path = special(kind, "tokenizer.json")
    (tmp_path / "a.txt").write_text("sheep")
    files = {"files": [f"{tmp_path}/a.txt"], "tokenizer": str(path), "vocab_size": 300}
    with pytest.raises(DataError, match=r"data\.tokenizer: cannot read .*not a regular file"):
        prepare(options("text_files", **files), workers=1)
    with pytest.raises(DataError, match=r"is not a tokenizer\.json: .*not a regular file"):
        FileCodec(path)


def test_a_pipe_among_images_is_named(options, tmp_path):
    for split in ("train", "val"):
        (tmp_path / split / "cat").mkdir(parents=True)
        Image.new("RGB", (4, 4)).save(tmp_path / split / "cat/b.png")
    os.mkfifo(tmp_path / "train/cat/a.png")
    chosen = options("image_folder", root=str(tmp_path))
    images = Images(chosen, prepare(chosen, workers=1), "train", 1)
    with pytest.raises(DataError, match=r"a\.png.* cannot be read: .*not a regular file"):
        images.image(0)
    assert images.image(1).size == (4, 4)


def test_a_directory_is_named(options, tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").write_text("sheep")
    sides = {"train": [str(tmp_path / "b"), str(tmp_path / "a")], "validation": None}
    plain = {"tokenizer": "bytes", "vocab_size": None}
    with pytest.raises(DataError, match=r"data\.train: cannot read .*/a: Is a directory"):
        prepare(options("parallel_files", **plain | sides), workers=1)
