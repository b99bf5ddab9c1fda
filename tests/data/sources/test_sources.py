import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsepretrain import registry
from sparsepretrain.data.preparation import load
from sparsepretrain.data.sources import _files
from sparsepretrain.errors import DataError


def source(options):
    return registry.get("source", options.source)(options)


def text_of(source, split):
    shards = [s for s in source.shards() if s.split == split]
    return b"".join(t + b"\0" * last for s in shards for t, last in source.documents(s))


def paths(source, split):
    return {p.path for s in source.shards() if s.split == split for p in s.items}


def test_split_is_by_file_close_to_the_fraction_and_seeded(options, corpus):
    src = source(options("python_source", roots=[str(corpus)], validation=0.2))
    train, held_out = paths(src, "train"), paths(src, "validation")
    assert train | held_out == {str(p) for p in corpus.rglob("*.py")} and not train & held_out
    sizes = {split: len(text_of(src, split)) for split in ("train", "validation")}
    assert 0.1 < sizes["validation"] / sum(sizes.values()) <= 0.21
    other = source(options("python_source", roots=[str(corpus)], validation=0.2, seed=1))
    assert paths(other, "validation") != held_out


def test_split_follows_the_relative_path_not_the_place(options, corpus, tmp_path):
    moved = tmp_path / "elsewhere"
    before = source(options("python_source", roots=[str(corpus)]))
    names = {os.path.relpath(p, corpus) for p in paths(before, "validation")}
    text = text_of(before, "train")
    corpus.rename(moved)
    after = source(options("python_source", roots=[str(moved)]))
    assert {os.path.relpath(p, moved) for p in paths(after, "validation")} == names
    assert text_of(after, "train") == text


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 5000), min_size=2, max_size=30),
    fraction=st.floats(0.001, 0.6),
    seed=st.integers(0, 9),
)
def test_two_or_more_files_give_disjoint_splits(sizes, fraction, seed):
    class Fake(_files.FileSource):
        def find(self):
            return [_files.TextFile(f"{i}", f"/{i}", n, 0) for i, n in enumerate(sizes)]

    options = registry.get("source", "text_files").Options(
        name="x", source="text_files", files=["x"], tokenizer="bytes", vocab_size=None,
        end_of_text=None,
        validation=fraction, test=None, seed=seed,
    )  # fmt: skip
    split = {name: {p.path for p in pieces} for name, pieces in Fake(options)._split().items()}
    assert split["validation"] and split["train"]
    assert not split["validation"] & split["train"]
    assert len(split["validation"]) + len(split["train"]) == len(sizes)
    held_out = sum(sizes[int(p[1:])] for p in split["validation"])
    assert held_out <= max(fraction * sum(sizes), min(sizes))


def test_single_file_is_split_at_a_line_end(options, tmp_path):
    file = tmp_path / "input.txt"
    file.write_text("".join(f"line {i}\n" for i in range(1000)))
    src = source(options("text_files", files=[str(file)], validation=0.1))
    train, held_out = text_of(src, "train"), text_of(src, "validation")
    assert train[:-1] + held_out[:-1] == file.read_bytes()
    assert train.endswith(b"\n\0") and 0.08 < len(held_out) / len(train + held_out) < 0.11
    file.write_text("x" * 1000)  # no line end at all
    src = source(options("text_files", files=[str(file)], validation=0.1))
    assert (len(text_of(src, "train")), len(text_of(src, "validation"))) == (901, 101)


def test_large_files_are_cut_in_pieces_that_add_up(options, tmp_path, monkeypatch):
    monkeypatch.setattr(_files, "SHARD_BYTES", 100)
    whole = "".join(f"line {i}\n" for i in range(300)).encode()
    (tmp_path / "a.txt").write_bytes(whole)
    (tmp_path / "b.txt").write_bytes(b"y" * 450)
    os.symlink(tmp_path / "a.txt", tmp_path / "link.txt")  # found twice, read once
    files = [f"{tmp_path}/*.txt", str(tmp_path / "b.txt")]
    src = source(options("text_files", files=files, validation=0.0))
    assert len(src.shards()) > 20 and not paths(src, "validation")
    assert sorted(text_of(src, "train").split(b"\0")) == sorted([whole, b"y" * 450, b""])
    assert sum(s.size for s in src.shards()) == len(whole) + 450


def test_hidden_installed_and_broken_files_are_skipped(options, tmp_path):
    for name in ("a.py", ".venv/b.py", "site-packages/c.py", "d/e.py", "notes.txt", "empty.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("" if name == "empty.py" else "x = 1\n")
    os.symlink(tmp_path / "nowhere.py", tmp_path / "broken.py")
    src = source(options("python_source", roots=[str(tmp_path)]))
    assert sorted(f.name for f in src.files) == ["a.py", "d/e.py"]


@pytest.mark.parametrize(
    ("config", "key", "name", "expected"),
    [
        ("python_source", "roots", "absent", "absent is not a directory"),
        ("python_source", "roots", "empty", "empty holds no .py file"),
        ("python_source", "roots", "no_text", "all files are empty"),
        ("text_files", "files", "*.txt", "no file matches"),
        ("text_files", "files", "empty", "a directory: use"),
    ],
)
def test_missing_text_is_a_one_line_error(options, tmp_path, cache, config, key, name, expected):
    (tmp_path / "empty").mkdir()
    (tmp_path / "no_text").mkdir()
    (tmp_path / "no_text" / "a.py").write_text("")
    with pytest.raises(DataError) as caught:
        load(options(config, **{key: [str(tmp_path / name)]}))
    assert expected in str(caught.value) and "\n" not in str(caught.value)
    assert not cache.exists()


def test_an_unreadable_file_is_named(options, corpus, monkeypatch):
    src = source(options("python_source", roots=[str(corpus)]))
    shards, victim = src.shards(), corpus / "package1" / "module3.py"
    victim.write_bytes(victim.read_bytes()[:-1])
    with pytest.raises(DataError, match=r"module3\.py changed"):
        [list(src.documents(s)) for s in shards]
    victim.unlink()
    with pytest.raises(DataError, match=r"cannot read .*module3\.py: No such file"):
        [list(src.documents(s)) for s in shards]

    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(DataError, match=r"cannot read .*corpus: Permission denied"):
        load(options("python_source", roots=[str(corpus)]))
