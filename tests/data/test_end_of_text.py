"""The token after each document: named, declared beside the tokenizer, guessed or unknown.

The kind: a tokenizer.json of someone else, whose end-of-text token has any name. Members: a usual
name, several usual names, none, a name in tokenizer_config.json or special_tokens_map.json (text,
or a token with properties, or one that the vocabulary lacks), a name in ``data.end_of_text`` (in
the vocabulary or not, with a tokenizer that ends documents by itself), each for running text and
for pairs, and in what a run hands on: its tokenizer, fine-tuning and export.
"""

import json
import warnings

import pytest
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from sparsepretrain.cli import main
from sparsepretrain.data.encoding import FileCodec
from sparsepretrain.data.preparation import load, prepare
from sparsepretrain.errors import ConfigError, DataError, SparsePretrainWarning
from sparsepretrain.runs import weights
from sparsepretrain.training.derive import tokenizer_file

TEXT = "The sheep eats the grass and the goat eats the thistle.\n"


@pytest.fixture
def tokenizer(tmp_path):
    """Return a function that writes tokenizer.json with special tokens, and files beside it."""

    def write(*special, **beside):
        directory = tmp_path / "tokenizer"
        directory.mkdir(exist_ok=True)
        made = Tokenizer(models.BPE())
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        made.decoder = decoders.ByteLevel()
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        made.train_from_iterator(
            [TEXT],
            trainers.BpeTrainer(
                vocab_size=300,
                special_tokens=list(special),
                initial_alphabet=alphabet,
                show_progress=False,
            ),
        )
        made.save(str(directory / "tokenizer.json"))
        for name, content in beside.items():
            text = content if isinstance(content, str) else json.dumps(content)
            (directory / f"{name}.json").write_text(text)
        return directory / "tokenizer.json"

    return write


@pytest.fixture
def prepared(options, tmp_path):
    """Return a function that prepares three documents with a tokenizer."""
    for i in range(3):
        (tmp_path / f"{i}.txt").write_text(TEXT * (i + 1))

    def prepare_files(file, end=None):
        size = FileCodec(file).vocab_size
        chosen = options(
            "text_files",
            files=[f"{tmp_path}/*.txt"],
            validation=0.0,
            tokenizer=str(file),
            vocab_size=size,
            end_of_text=end,
        )
        return prepare(chosen, workers=1)

    return prepare_files


def ending(data):
    """Name of the token that ends the documents, which all have it."""
    if data.end_of_text is None:
        assert data.documents("train") == 1
        return None
    assert data.documents("train") == 3 and data.tokens["train"][-1] == data.end_of_text
    return data.decode([data.end_of_text])


@pytest.mark.parametrize("name", ["<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]"])
def test_usual_names_are_found(name, tokenizer, prepared):
    assert ending(prepared(tokenizer("<pad>", name))) == name


def test_unknown_names_are_one_warning(tokenizer, prepared):
    file = tokenizer("<PAD>", "<EOT>")
    with pytest.warns(SparsePretrainWarning) as caught:
        assert ending(prepared(file)) is None
    (warning,) = caught
    told = str(warning.message)
    assert "data.end_of_text; special tokens: <PAD>, <EOT>" in told and "\n" not in told


def test_several_names_are_one_warning(tokenizer, prepared):
    with pytest.warns(SparsePretrainWarning, match=r"</s>, <eos>: </s> ends each") as caught:
        assert ending(prepared(tokenizer("<eos>", "</s>"))) == "</s>"
    assert len(caught) == 1


@pytest.mark.parametrize("special", [("<PAD>", "<EOT>"), ("</s>", "<EOT>"), ("<eos>", "</s>")])
def test_the_key_decides(special, tokenizer, prepared):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        data = prepared(tokenizer(*special), end=special[-1])
    assert ending(data) == special[-1]
    codec = FileCodec(data.tokenizer_file)  # what tasks and export open
    assert codec.end_of_text == data.end_of_text and codec.template().middle == (data.end_of_text,)


@pytest.mark.parametrize("name", ["tokenizer_config", "special_tokens_map"])
@pytest.mark.parametrize("value", ["<EOT>", {"content": "<EOT>", "lstrip": False}])
def test_files_beside_the_tokenizer_name_it(name, value, tokenizer, prepared):
    file = tokenizer("</s>", "<EOT>", **{name: {"eos_token": value}})
    data = prepared(file)
    assert ending(data) == "<EOT>"
    assert ending(prepared(file, end="</s>")) == "</s>"  # the key is stronger
    # a declared name is part of the identity of prepared data
    file.with_name(f"{name}.json").write_text(json.dumps({"eos_token": "</s>"}))
    assert ending(prepared(file)) == "</s>" and prepared(file).directory != data.directory


@pytest.mark.parametrize(
    ("special", "end"),
    [
        (("<|endoftext|>",), "<|endoftext|> ends each document"),
        (("<eos>", "</s>"), "</s> ends each document"),
        (("<PAD>",), "documents follow each other"),
    ],
)
@pytest.mark.parametrize("name", ["tokenizer_config", "special_tokens_map"])
def test_a_declared_token_that_the_tokenizer_lacks_is_one_warning(
    special, end, name, tokenizer, prepared
):
    file = tokenizer(*special, **{name: {"eos_token": "<|im_end|>"}})
    with pytest.warns(SparsePretrainWarning) as caught:
        data = prepared(file)
    (warning,) = caught
    words = str(warning.message)
    assert "has no token '<|im_end|>', the eos_token" in words and "data.end_of_text" in words
    assert end in words and "\n" not in words
    used = ending(data)
    assert (used or "documents follow") in end
    # runs and export take the token that ends the documents, not the missing one
    codec = FileCodec(data.tokenizer_file)
    assert codec.declared == used and codec.end_of_text == data.end_of_text
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert prepared(file).directory == data.directory
        assert ending(prepared(tokenizer(*special), end=special[0])) == special[0]


@pytest.mark.filterwarnings("ignore:tokenizer .* has no token '<unheard-of>'")
@pytest.mark.parametrize("eos", [None, "", "<unheard-of>"])
def test_files_that_name_no_token_leave_the_usual_names(eos, tokenizer, prepared):
    assert ending(prepared(tokenizer("</s>", tokenizer_config={"eos_token": eos}))) == "</s>"


@pytest.mark.parametrize("text", ["[]", "{", "7"])
def test_damaged_files_beside_the_tokenizer_are_named(text, tokenizer, prepared):
    with pytest.raises(DataError, match=r"tokenizer_config\.json is no JSON object"):
        prepared(tokenizer("</s>", tokenizer_config=text))


def test_names_that_the_tokenizer_lacks_are_refused(tokenizer, prepared, tmp_path):
    with pytest.raises(DataError, match=r"has no token '<EOT>'; its special tokens: </s>"):
        prepared(tokenizer("</s>"), end="<EOT>")
    assert not list(tmp_path.rglob("train.bin"))


@pytest.mark.parametrize("name", ["bytes", "bpe", "gpt2_size_bpe", "wordpiece"])
def test_tokenizers_with_an_end_of_their_own_take_no_key(name, options):
    with pytest.raises(ConfigError, match=rf"^data\.end_of_text must be null .* {name}, which has"):
        options("text_files", tokenizer=name, end_of_text="<EOT>")


def test_damage_to_the_settings_of_prepared_data_is_noticed(tokenizer, prepared):
    file = tokenizer("<EOT>")
    data = prepared(file, end="<EOT>")
    (data.directory / "tokenizer_config.json").unlink()
    with pytest.warns(SparsePretrainWarning, match=r"tokenizer_config\.json cannot be read"):
        again = prepared(file, end="<EOT>")
    assert ending(again) == "<EOT>"


def test_pairs_end_with_the_named_token(options, tokenizer, tmp_path):
    for side in ("en", "de"):
        (tmp_path / f"train.{side}").write_text(TEXT * 3)
        (tmp_path / f"dev.{side}").write_text(TEXT)
    file = tokenizer("<PAD>", "<EOT>")
    chosen = options(
        "parallel_files",
        train=[f"{tmp_path}/train.en", f"{tmp_path}/train.de"],
        validation=[f"{tmp_path}/dev.en", f"{tmp_path}/dev.de"],
        tokenizer=str(file),
        vocab_size=FileCodec(file).vocab_size,
        end_of_text="<EOT>",
    )
    data = prepare(chosen, workers=1)
    assert data.decode([data.end_of_text]) == "<EOT>" and data.documents("train") == 6
    assert load(chosen).end_of_text == data.end_of_text


def test_runs_fine_tuning_and_export_carry_it(tokenizer, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text(TEXT * 200)
    file = tokenizer("<PAD>", "<EOT>")
    small = ["model=gpt2_nano", "model.n_layer=1", "model.n_embd=16", "model.n_head=2"]
    small += ["task.sequence_length=16", "batch.size=2", "batch.micro=2", "steps=2"]
    small += ["eval.batches=0", "tracker=jsonl", "runs_dir=runs"]
    size = FileCodec(file).vocab_size
    text = ["data=text_files", f"data.files=[{tmp_path}/a.txt]", "data.validation=0"]
    words = [f"data.tokenizer={file}", f"data.vocab_size={size}", f"model.vocab_size={size}"]
    assert main(["train", *small, *text, *words, "data.end_of_text='<EOT>'"]) == 0
    (run,) = tmp_path.glob("runs/*/*")
    assert main(["export", str(run)]) == 0
    exported = transformers.AutoTokenizer.from_pretrained(run / "export/hf")
    assert exported.eos_token == "<EOT>"
    for place in (run, run / "export/hf"):
        file.unlink(missing_ok=True)  # the run and its export have the tokenizer
        tuning = ["batch.size=2", "batch.micro=2", "steps=2", "eval.batches=0"]
        out = tmp_path / f"tuned_{place.name}"
        tuning += ["task.sequence_length=16", "tracker=jsonl", f"runs_dir={out}"]
        assert main(["finetune", str(place), "task=wikitext2", *text, *tuning]) == 0
        (tuned,) = out.glob("*/*")
        assert FileCodec(tuned / "tokenizer.json").ends == ["<EOT>"]


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_nul_characters_in_rows_are_no_end_of_text(options, tmp_path, kind):
    file = tmp_path / f"a.{kind}"
    rows = ["one", "two\0three"]
    if kind == "jsonl":
        file.write_text("".join(json.dumps({"text": text}) + "\n" for text in rows))
    else:
        pyarrow = pytest.importorskip("pyarrow")
        parquet = pytest.importorskip("pyarrow.parquet")
        parquet.write_table(pyarrow.table({"text": rows}), file)
    settings = {"path": "json" if kind == "jsonl" else kind, "data_files": [str(file)]}
    chosen = options("document_files", **settings, tokenizer="bytes", validation=0.0)
    with pytest.raises(DataError, match=r"begins with 'two\\x00three' has a NUL character"):
        prepare(chosen, workers=1)


def test_a_snapshot_of_links_keeps_the_settings_of_its_tokenizer(tokenizer, tmp_path):
    """As the cache of the Hugging Face hub is laid out."""
    file = tokenizer("</s>", "<EOT>", tokenizer_config={"eos_token": "<EOT>"})
    snapshot, blobs = tmp_path / "snapshots/1", tmp_path / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        file.with_name(name).rename(blobs / name[::-1])
        (snapshot / name).symlink_to(blobs / name[::-1])
    config = transformers.GPT2Config(vocab_size=300, n_embd=16, n_layer=1, n_head=2)
    transformers.GPT2LMHeadModel(config).save_pretrained(snapshot)
    found = tokenizer_file(weights.find(snapshot, print))
    assert FileCodec(found).ends == ["<EOT>"]
