"""What ``prepare`` says that it made, for every kind of data, whatever the model is."""

import json

import pytest

from sparsepretrain import registry
from sparsepretrain.cli import main

PLUGIN = """
import json
from dataclasses import dataclass

from sparsepretrain.data.source import Shard, Source, SourceOptions
from sparsepretrain.registry import register


@dataclass(slots=True, kw_only=True)
class Options(SourceOptions):
    size: int


class Made(Source):
    Options = Options
    offline = True
    unit = "files"

    def state(self):
        return []

    def shards(self):
        return [Shard("train", 0, 1, ("a",)), Shard("test", 0, 1, ("b",))]

    def documents(self, shard):
        size = self.options.size if shard.split == "train" else 3
        for i in range(size):
            yield from self.document(i)


@register("source", "made_pairs")
class Pairs(Made):
    kind = "pairs"

    def document(self, i):
        yield f"good day {i}", True
        yield f"guten Tag {i}", True


@register("source", "made_records")
class Records(Made):
    kind = "records"

    def document(self, i):
        yield json.dumps({"text": f"a {i}", "label": i % 2}), True


@register("source", "made_images")
class Images(Made):
    kind = "images"
    shape = (2, 3, 1)

    def document(self, i):
        yield bytes([i % 10, 0, *range(6)]), False
"""


@pytest.fixture
def prepare(tmp_path, monkeypatch, capsys):
    for kind in registry.PACKAGES:  # a built-in first imported below would register there alone
        for name in registry.names(kind):
            registry.get(kind, name)
    monkeypatch.setattr(
        registry, "_registered", {k: dict(v) for k, v in registry._registered.items()}
    )
    monkeypatch.setenv("SPARSEPRETRAIN_CACHE_DIR", str(tmp_path / "cache"))
    plugin = tmp_path / "made.py"
    plugin.write_text(PLUGIN)
    for kind in ("pairs", "records", "images"):
        file = tmp_path / "configs" / "data" / f"made_{kind}.yaml"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"name: made_{kind}\nsource: made_{kind}\nsize: 40\n")

    def start(*words):
        given = [*words, f"plugins=['{plugin}']", "--config-dir", str(tmp_path / "configs")]
        code = main(["prepare", *given, "--workers", "1"])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return start


@pytest.mark.parametrize(
    ("kind", "said"), [("pairs", "43 pairs"), ("records", "43 examples"), ("images", "43 images")]
)
def test_prepare_counts_items_of_every_kind(prepare, kind, said):
    code, out, err = prepare(f"data=made_{kind}")
    assert code == 0 and f"{said} (train 40, validation 0, test 3)" in out, out + err
    assert f"{said.split()[1]}/s" in out


def test_options_of_the_data_are_checked(prepare):
    code, _, err = prepare("data=made_pairs", "data.size=many", "data.szie=3", "sed=1")
    assert code == 2
    assert "data.size" in err and "'data.szie'" in err and "'sed'" in err


def test_prepare_ignores_the_vocabulary_of_the_model(prepare, tmp_path):
    (tmp_path / "a.txt").write_text("words and more words " * 50)
    (tmp_path / "b.txt").write_text("other words and fewer " * 50)
    files = (f"data.files=['{tmp_path}/*.txt']", "data.tokenizer=bpe", "data.vocab_size=300")
    code, out, _ = prepare("data=text_files", *files)
    assert code == 0 and " tokens (train " in out
    manifests = [json.loads(f.read_text()) for f in (tmp_path / "cache").glob("*/manifest.json")]
    assert manifests[0]["vocab_size"] == 300
