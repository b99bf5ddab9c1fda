import contextlib
import hashlib
import itertools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from sparsepretrain import registry
from sparsepretrain.config import strict
from sparsepretrain.config.compose import compose
from sparsepretrain.data import preparation
from sparsepretrain.data.encoding import LONGEST_WORD, FileCodec, train_bpe, train_wordpiece
from sparsepretrain.data.order import windows
from sparsepretrain.data.preparation import load, prepare
from sparsepretrain.data.source import prepare_command
from sparsepretrain.data.sources import _files
from sparsepretrain.data.tokenizer import tokenizer
from sparsepretrain.errors import DataError, SparsePretrainError, SparsePretrainWarning
from sparsepretrain.files import cache_directory
from support import ROOT

PREPARE = """
import sys, time, yaml
from sparsepretrain import registry
from sparsepretrain.config import strict
from sparsepretrain.data.preparation import load, prepare
from sparsepretrain.data.sources import _files

def options(root, tokenizer):
    plain = yaml.safe_load(open(CONFIG)) | {"roots": [root], "tokenizer": tokenizer}
    if tokenizer == "bpe":
        plain["vocab_size"] = 400
    return strict.build(registry.get("source", "python_source").Options, plain, "data")
"""


def script(body: str, *args: object) -> subprocess.Popen[str]:
    config = ROOT / "configs" / "data" / "python_source.yaml"
    code = f"CONFIG = {str(config)!r}\n{PREPARE}\n" + textwrap.dedent(body)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, "-c", code, *map(str, args)], **pipes)


def left_over(cache: Path) -> list[str]:
    return sorted(p.name for p in cache.iterdir() if p.suffix != ".lock")


def test_standard_library_is_prepared_as_bytes(options, cache):
    seen = []
    data = load(options("python_source"), on_progress=seen.append)
    train, held_out = data.tokens["train"], data.tokens["validation"]
    assert train.dtype == np.uint8 and data.vocab_size == 256 and data.tokenizer_file is None
    assert len(train) > 5_000_000 and 0.03 < len(held_out) / (len(train) + len(held_out)) < 0.06
    assert left_over(cache) == [data.directory.name]
    last = [p for p in seen if p.phase == "tokenizing"][-1]
    assert last.done == last.total and last.tokens == len(train) + len(held_out)
    read = []
    again = load(options("python_source"), on_progress=read.append)
    assert not read, "nothing is read again"
    assert again.fingerprint == data.fingerprint and len(data.fingerprint) == 16
    batch = windows(data, "train", 128, 0).batch(0, range(4), 4)
    assert batch.shape == (4, 129) and batch.min() >= 0 and batch.max() < 256


def test_tokens_are_the_text_with_a_byte_between_files(options, corpus):
    data = load(options("python_source", roots=[str(corpus)], validation=0.0))
    texts = data.tokens["train"].tobytes().split(b"\0")
    assert sorted(texts) == sorted([p.read_bytes() for p in corpus.rglob("*.py")] + [b""])
    assert data.tokens["validation"].size == 0
    assert data.decode(data.tokens["train"][:4]) == "def "
    with pytest.raises(DataError, match=r"has no validation split.*eval.batches=0"):
        windows(data, "validation", 8, 0)


def test_a_change_of_options_or_files_is_a_new_preparation(options, corpus):
    def loaded(**changes):
        return load(options("python_source", roots=[str(corpus)], **changes))

    first, other = loaded(), loaded(seed=5)
    assert loaded(name="x").fingerprint == first.fingerprint
    assert other.directory != first.directory and other.fingerprint != first.fingerprint
    victim = corpus / "package0" / "module1.py"
    os.utime(victim, ns=(1, 1))  # touched, equal contents: prepared again, the same data
    touched = loaded()
    assert touched.directory != first.directory and touched.fingerprint == first.fingerprint
    victim.write_text(victim.read_text().upper())
    assert loaded().fingerprint != first.fingerprint


def test_bpe_round_trip_for_any_number_of_workers(options, corpus, monkeypatch):
    monkeypatch.setattr(_files, "SHARD_BYTES", 4000)
    # byte 233 alone is not UTF-8; the literal name of a special token is ordinary text
    (corpus / "latin.py").write_bytes(b"# caf\xe9 <|endoftext|>\n")
    changes = {"tokenizer": "bpe", "vocab_size": 300, "validation": 0.0}
    chosen = options("python_source", roots=[str(corpus)], **changes)
    data = prepare(chosen, workers=2)
    tokens = data.tokens["train"]
    assert tokens.dtype == np.uint16 and tokens.max() < 300 and data.end_of_text == 0
    pieces = np.split(tokens, np.flatnonzero(tokens == 0) + 1)
    texts = sorted(data.decode(piece[:-1]) for piece in pieces[:-1])
    assert texts == sorted(p.read_bytes().decode(errors="replace") for p in corpus.rglob("*.py"))
    assert FileCodec(data.tokenizer_file).vocab_size == 300
    shutil.rmtree(data.directory)
    assert prepare(chosen, workers=1).fingerprint == data.fingerprint


def test_long_words_are_split_for_training_only(tmp_path):
    for text in (train_bpe(["a" * 4096], 280), train_wordpiece(["a" * 4096], 90, lowercase=True)):
        assert max(map(len, json.loads(text)["model"]["vocab"])) <= LONGEST_WORD + len("##")
    (tmp_path / "t.json").write_text(train_bpe(["ab" * 4096], 280))
    assert len(FileCodec(tmp_path / "t.json").encode(["ab" * 2000])[0]) < 40


def test_tokenizer_file_is_used_and_checked(options, corpus, tmp_path, cache):
    file = tmp_path / "mine.json"
    file.write_text(train_bpe(["some text", b"more text"], 270))
    size = FileCodec(file).vocab_size
    chosen = {"roots": [str(corpus)], "tokenizer": str(file)}
    assert load(options("python_source", vocab_size=size, **chosen)).vocab_size == size
    shutil.rmtree(cache)
    with pytest.raises(DataError, match=f"set data.vocab_size={size}"):
        load(options("python_source", vocab_size=size - 1, **chosen))
    file.write_text("{}")
    with pytest.raises(DataError, match=r"is not a tokenizer\.json"):
        load(options("python_source", vocab_size=size, **chosen))
    file.unlink()
    with pytest.raises(DataError, match=r"cannot read .*mine\.json: .*No such file"):
        load(options("python_source", vocab_size=size, **chosen))


@pytest.mark.parametrize(
    "name", ["train.bin", "validation.bin", "train.bounds", "validation.bounds", "tokenizer.json"]
)
def test_damage_is_named_and_repaired(options, corpus, cache, monkeypatch, name):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0})
    chosen = options("python_source", roots=[str(corpus)], tokenizer="bpe", vocab_size=270)
    data = prepare(chosen)
    file, whole = data.directory / name, (data.directory / name).read_bytes()
    at = len(whole) // 2
    flipped = whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :]
    other, gone = "does not match its checksum", "cannot be read (No such file or directory)"
    for content, problem in [(whole[:-3], other), (None, gone), (flipped, other)]:
        file.unlink() if content is None else file.write_bytes(content)
        with monkeypatch.context() as patch, pytest.raises(DataError) as caught:
            patch.setattr(registry.get("source", "python_source"), "offline", False)
            load(chosen)
        assert str(caught.value).startswith(f"{file} {problem}: ")
        assert "`sparsepretrain prepare data=python_source`" in str(caught.value)
        with pytest.warns(SparsePretrainWarning, match=re.escape(problem)):
            assert load(chosen).fingerprint == data.fingerprint
        assert file.read_bytes() == whole and left_over(cache) == [data.directory.name]


def test_prepare_verifies_checksums_and_load_trusts_stamps(options, corpus, monkeypatch):
    chosen = options("python_source", roots=[str(corpus)])
    file = prepare(chosen).directory / "train.bin"
    stat, whole = file.stat(), file.read_bytes()
    with open(file, "r+b") as stream:  # as a failing disk does: no trace in the directory
        stream.write(bytes([whole[0] ^ 1]))
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    load(chosen)
    with pytest.warns(SparsePretrainWarning, match=r"train\.bin .*checksum"):
        prepare(chosen)
    assert file.read_bytes() == whole


def test_damaged_manifest_is_prepared_again(options, corpus):
    chosen = options("python_source", roots=[str(corpus)])
    data = load(chosen)
    file = data.directory / "manifest.json"
    odd = file.read_text().replace('"|u1"', '"O"')
    for content in ("", "[1]", "null", "[" * 9999, odd):
        file.write_text(content)
        with pytest.warns(SparsePretrainWarning, match=r"manifest\.json"):
            assert load(chosen).fingerprint == data.fingerprint


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe", "file"])
@pytest.mark.parametrize("piece", [8, 1 << 20])
def test_bounds_of_documents_are_prepared(options, corpus, tmp_path, monkeypatch, tokenizer, piece):
    monkeypatch.setattr(preparation, "PIECE", piece)
    monkeypatch.setattr(_files, "SHARD_BYTES", 4000)
    changes = {"roots": [str(corpus)], "tokenizer": tokenizer}
    if tokenizer == "bpe":
        changes["vocab_size"] = 270
    if tokenizer == "file":  # has no end-of-text token
        file = tmp_path / "mine.json"
        file.write_text(train_bpe(["x"], 270).replace("<|endoftext|>", "<|other|>"))
        changes |= {"tokenizer": str(file), "vocab_size": 270}
    data = prepare(options("python_source", **changes))
    counts = []
    for split, tokens in data.tokens.items():
        bounds = data.bounds[split]
        ends = [] if data.end_of_text is None else np.flatnonzero(tokens == data.end_of_text) + 1
        assert bounds.tolist() == np.unique([0, *ends, len(tokens)]).tolist()
        assert isinstance(bounds, np.memmap)
        counts.append(data.documents(split))
    assert sum(counts) == 40 if tokenizer != "file" else counts == [1, 1]


def test_opening_documents_reads_bounds_and_no_tokens(options, corpus):
    chosen = options("python_source", roots=[str(corpus)])
    data = load(chosen)

    class Unread:
        def __len__(self):
            return len(data.tokens["train"])

    opened = replace(data, tokens={"train": Unread()})
    assert windows(opened, "train", 8, 0, documents=True).count == data.documents("train") > 30


class Killed(BaseException):
    """Stands for kill -9: nothing in the package may catch it and tidy up."""


def test_killed_preparation_leaves_no_incomplete_data(
    options, corpus, cache, tmp_path, monkeypatch
):
    monkeypatch.setattr(_files, "SHARD_BYTES", 16000)
    file = tmp_path / "mine.json"
    file.write_text(train_bpe(["x"], 270))
    changes = {"roots": [str(corpus)], "tokenizer": str(file), "vocab_size": 270}
    chosen = options("python_source", **changes)
    expected = prepare(chosen, workers=1)
    contents = {f.name: f.read_bytes() for f in expected.directory.iterdir()}
    del contents["verified.json"]  # has times and inodes
    points = {name: getattr(os, name) for name in ("fsync", "replace", "rename")}
    stop, finished = 0, False
    while not finished:
        shutil.rmtree(cache)
        calls = iter(range(10**6))

        def until(function, calls=calls, stop=stop):
            def wrapped(*args, **kwargs):
                if next(calls) == stop:
                    raise Killed
                return function(*args, **kwargs)

            return wrapped

        with monkeypatch.context() as patch:
            for name, function in points.items():
                patch.setattr(os, name, until(function))
            try:
                prepare(chosen, workers=1)
                finished = True
            except Killed:
                stop += 1
        # only the last rename makes it appear, and what appears is complete
        ready = [name for name in left_over(cache) if not name.endswith(".partial")]
        assert ready in ([], [expected.directory.name])
        data = prepare(chosen, workers=1)
        assert {name: (data.directory / name).read_bytes() for name in contents} == contents
    assert stop > 15


def test_finished_shards_are_kept(options, corpus, monkeypatch):
    monkeypatch.setattr(_files, "SHARD_BYTES", 4000)
    chosen, source = (
        options("python_source", roots=[str(corpus)]),
        registry.get("source", "python_source"),
    )
    calls, original = itertools.count(), source.documents

    def documents(self, shard):
        if next(calls) >= 8:
            raise Killed
        return original(self, shard)

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(source, "documents", documents)
        prepare(chosen)
    seen = []
    data = prepare(chosen, on_progress=seen.append)
    phase = [p for p in seen if p.phase == "tokenizing"]
    assert phase[0].done > phase[0].total / 2 and phase[0].tokens == 0
    assert 0 < phase[-1].tokens < sum(len(t) for t in data.tokens.values()) / 2


def test_two_processes_at_once_give_one_result(options, corpus, cache):
    body = """
        if __name__ == "__main__":
            waits = []
            def slow(progress):
                waits.append(progress.phase)
                time.sleep(0.02)
            _files.SHARD_BYTES = 4000
            data = prepare(options(sys.argv[1], "bytes"), on_progress=slow)
            assert not {"torch", "transformers", "datasets", "tokenizers"} & set(sys.modules)
            print(data.fingerprint, len(data.tokens["train"]), "tokenizing" in waits)
    """
    processes = [script(body, corpus) for _ in range(2)]
    out = [p.communicate(timeout=240) for p in processes]
    assert [p.returncode for p in processes] == [0, 0], out
    results = [o.split() for o, _ in out]
    assert len({tuple(r[:2]) for r in results}) == 1
    assert [r[2] for r in results].count("True") == 1  # one worked, the others waited
    assert len(left_over(cache)) == 1


def test_where_locks_hold_on_one_machine_only_two_give_one_result(
    options, corpus, cache, monkeypatch
):
    """The second machine publishes while the first one is about to, and removes its parts."""
    chosen = options("python_source", roots=[str(corpus)])
    monkeypatch.setattr(preparation, "_exclusive", lambda *_: contextlib.nullcontext())
    publish, data = preparation._publish, []

    def slowly(final, directory):
        if not data:
            data.append(None)
            data[0] = prepare(chosen)
        publish(final, directory)

    monkeypatch.setattr(preparation, "_publish", slowly)
    assert prepare(chosen).fingerprint == data[0].fingerprint
    assert left_over(cache) == [data[0].directory.name]


def test_a_corpus_that_is_repaired_leaves_no_parts(options, tmp_path, cache):
    (tmp_path / "a.txt").write_text("sheep\n" * 99)
    (tmp_path / "b.txt").write_bytes(b"goats \xff\n" * 99)
    words = {"files": [f"{tmp_path}/*.txt"], "tokenizer": "bpe", "vocab_size": 300}
    for _ in range(2):
        with pytest.raises(DataError, match=r"b\.txt"):
            prepare(options("text_files", **words))
    (tmp_path / "b.txt").write_text("goats\n" * 99)
    assert left_over(cache) == []
    assert [prepare(options("text_files", **words)).directory.name] == left_over(cache)


def test_a_tokenizer_sees_a_part_of_a_large_shard(options, tmp_path, monkeypatch):
    rows = "".join(json.dumps({"text": f"{i} sheep " * 9}) + "\n" for i in range(400))
    (tmp_path / "rows.jsonl").write_text(rows)
    monkeypatch.setattr(preparation, "TRAINING_TEXT", 1000)
    files = {"path": "json", "data_files": [str(tmp_path / "rows.jsonl")]}
    chosen = options("document_files", tokenizer="bpe", **files)
    source = registry.get("source", chosen.source)(chosen)
    shards = [replace(shard, index=i) for i, shard in enumerate(source.shards())]
    texts = [*preparation._TrainingText(source, shards, lambda progress: None)]
    assert 1000 < sum(map(len, texts)) < 1200


def test_a_tokenizer_of_the_hub_is_cached_by_several_processes(tmp_path, monkeypatch):
    hub = tokenizer("owner/name")
    monkeypatch.setattr(type(hub), "read", lambda self: "{}")
    monkeypatch.setattr(type(hub), "declared_end", lambda self: "</s>")
    made = tmp_path / "cache" / "tokenizers"
    digest = hashlib.sha256(b"{}</s>").hexdigest()[:16]
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (made / digest / f"{name}.tmp").mkdir(parents=True)  # as if another one wrote it now
    assert hub.file() == made / digest / "tokenizer.json"
    assert hub.file().read_text() == "{}"
    monkeypatch.setenv("SPARSEPRETRAIN_CACHE_DIR", str(hub.file()))
    with pytest.raises(SparsePretrainError, match=r"^cannot write .*tokenizer.json: Not a dir"):
        hub.file()


@pytest.mark.parametrize(
    "words",
    [
        ("data=wikitext2",),
        ("data=wikitext2", "data.tokenizer=bytes"),
        ("data=c4_shard", "data.split='train[:5%]'", "data.tokenizer=openai-community/gpt2"),
        ("data=c4_shard", "data.data_files=['en/a b.gz']", "data.end_of_text='</s>'"),
        ("data=c4_shard", "data.data_files={train: [a.gz], test: ['it\\'s.gz']}", "data.seed=1"),
        ("data=wmt14_ende", "data.vocab_size=16384"),
        ("data=wmt14_ende", "data.tokenizer='/my dir/$t.json'", "data.vocab_size=99"),
        ("data=cifar10",),
    ],
)
def test_the_command_of_missing_data_prepares_this_data(words):
    def options_of(*words):
        plain = compose(words)["data"]
        return strict.build(registry.get("source", plain["source"]).Options, plain, "data")

    chosen = options_of(*words)
    program, verb, *typed = shlex.split(prepare_command(chosen).strip("`"))
    assert (program, verb) == ("sparsepretrain", "prepare")
    assert typed[0] == words[0] and (len(typed) > 1) is (len(words) > 1)
    assert options_of(*typed) == chosen


def test_data_of_a_file_that_is_not_shipped_is_named_with_its_options():
    plain = compose(["data=c4_shard", "data.name=mine"])["data"]
    chosen = strict.build(registry.get("source", plain["source"]).Options, plain, "data")
    expected = "`sparsepretrain prepare data=mine` (with the data options of this run)"
    assert prepare_command(chosen) == expected


def test_unwritable_cache_is_refused(options, corpus, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SPARSEPRETRAIN_CACHE_DIR", str(tmp_path / "file" / "cache"))
    with pytest.raises(DataError) as caught:
        load(options("python_source", roots=[str(corpus)]))
    assert "Not a directory" in str(caught.value) and "\n" not in str(caught.value)
    assert "SPARSEPRETRAIN_CACHE_DIR" in str(caught.value)


def test_cache_directory_follows_the_environment(monkeypatch, tmp_path):
    assert cache_directory() == tmp_path / "cache"
    monkeypatch.delenv("SPARSEPRETRAIN_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_directory() == tmp_path / "xdg" / "sparsepretrain"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_directory() == tmp_path / ".cache" / "sparsepretrain"


def test_the_file_of_a_tokenizer_may_be_in_the_home_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "mine.json").write_text("{}")
    found = tokenizer("~/mine.json")
    assert found.file() == tmp_path / "mine.json" and found.read() == "{}"
