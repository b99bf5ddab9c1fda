"""Text of named wheels: downloaded by pip once, checked, never run."""

import hashlib
import re
import zipfile

import pytest

from sparsepretrain.data.preparation import load, prepare
from sparsepretrain.data.sources import python_wheels
from sparsepretrain.errors import ConfigError, DataError


@pytest.fixture
def index(tmp_path, monkeypatch):
    """``index(name, {file: text})``: a line for a wheel that pip finds without a network."""
    directory = tmp_path / "index"
    directory.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(directory))

    def build(name, files, *, body=None):
        wheel = directory / f"{name}-1.0-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            about = f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n"
            archive.writestr(f"{name}-1.0.dist-info/METADATA", about)
            archive.writestr(f"{name}-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\n")
            archive.writestr(f"{name}-1.0.dist-info/RECORD", "")
            for file, text in files.items():
                archive.writestr(file, text)
        if body is not None:
            wheel.write_bytes(body)
        digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
        return f"{name}==1.0 --hash=sha256:{digest}"

    return build


def texts(data):
    documents = "".join(data.decode(data.tokens[split]) for split in ("train", "validation"))
    return sorted(re.findall(r"mark\d+", documents))


def small(index, count=8):
    files = {f"small/m{i}.py": f"mark{i} = {i}\n" * 50 for i in range(count)}
    return index("small", {**files, "small/data.txt": "no Python"})


def test_all_python_files_of_all_wheels_are_read(options, index, monkeypatch):
    lines = [small(index), index("other", {"other/__init__.py": "mark90 = 1\n" * 30})]
    asked = options("python_wheels", wheels=lines, validation=0.2)
    with pytest.raises(DataError, match=r"is not prepared: run .*downloads 2 wheels with pip"):
        load(asked)
    data = prepare(asked)
    assert {*texts(data)} == {*(f"mark{i}" for i in range(8)), "mark90"}
    monkeypatch.setattr(python_wheels, "_download", lambda *args: pytest.fail("downloaded twice"))
    assert {*texts(load(asked))} == {*texts(data)}
    again = options("python_wheels", wheels=lines, validation=0.3)
    assert {*texts(load(again))} == {*texts(data)}  # the wheels are there, so it prepares alone


def test_the_bytes_follow_from_the_digests_alone(options, index, tmp_path, monkeypatch):
    asked = options("python_wheels", wheels=[small(index)])
    first = prepare(asked)
    monkeypatch.setenv("SPARSEPRETRAIN_CACHE_DIR", str(tmp_path / "another"))
    second = prepare(asked)
    assert first.tokens["train"].tobytes() == second.tokens["train"].tobytes()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda line: line[:-4] + "0000", "THESE PACKAGES DO NOT MATCH THE HASHES|ERROR"),
        (lambda line: line.replace("small==1.0", "small==2.0"), "No matching distribution"),
    ],
)
def test_another_file_than_the_named_one_is_refused(options, index, cache, change, message):
    line = change(small(index))
    with pytest.raises(DataError, match=message) as caught:
        prepare(options("python_wheels", wheels=[line]))
    assert f"data.wheels: {line}: " in str(caught.value) and "\n" not in str(caught.value)
    assert not [*cache.glob("wheels/*")]


def test_a_wheel_without_python_files_is_refused(options, index):
    with pytest.raises(DataError, match=r"the wheel has no \.py file"):
        prepare(options("python_wheels", wheels=[index("empty", {})]))


def test_a_download_that_hangs_ends(options, index, monkeypatch):
    monkeypatch.setattr(python_wheels, "WAIT_S", 0.01)
    with pytest.raises(DataError, match="pip has not ended after"):
        prepare(options("python_wheels", wheels=[small(index)]))


@pytest.mark.parametrize(
    "lines",
    [[], ["small"], ["small==1.0"], ["small==1.0 --hash=sha256:12"], ["--index-url=x small==1.0"]],
)
def test_lines_that_name_no_single_file_are_refused(options, lines):
    with pytest.raises(ConfigError, match=r"data\.wheels"):
        options("python_wheels", wheels=lines)
