"""WordPiece tokenizers, trained when the data is prepared."""

import json

import pytest

from sparsepretrain.data.encoding import WORDPIECE_SPECIAL, FileCodec, train_wordpiece
from sparsepretrain.data.preparation import load, prepare
from sparsepretrain.data.tokenizer import TOKENIZERS

WORDS = [f"The sheep {i} eats grass, the Goat {i * i} does not." for i in range(60)]


@pytest.fixture
def codec(tmp_path):
    def build(lowercase=True, size=90):
        file = tmp_path / f"{lowercase}.json"
        file.write_text(train_wordpiece(WORDS, size, lowercase=lowercase))
        return FileCodec(file)

    return build


@pytest.mark.parametrize("name", [n for n, known in TOKENIZERS.items() if known.training])
def test_trained_tokenizers_equal_their_record(name, tmp_path):
    (tmp_path / "t.json").write_text(TOKENIZERS[name].make(WORDS, 300))
    codec = FileCodec(tmp_path / "t.json")
    assert 20 < codec.vocab_size <= 300
    assert (codec.mask is not None) is TOKENIZERS[name].has_mask


def test_special_tokens_come_first_in_berts_order(codec):
    one = codec()
    assert WORDPIECE_SPECIAL == ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
    assert one.special == frozenset(range(5))
    assert (one.end_of_text, one.mask, one.vocab_size) == (3, 4, 90)
    assert one.decode([0, 4]) == "[PAD] [MASK]"


def test_lowercase_and_cased_tokenizers(codec):
    lower, cased = codec(), codec(lowercase=False)
    ids = lower.encode(["The SHEEP", b"the sheep", "Thé shéep"])
    assert [list(i) for i in ids] == [list(ids[0])] * 3
    assert lower.decode(ids[0]) == "the sheep"
    left, right = cased.encode(["The Goat", "the goat"])
    assert list(left) != list(right) and cased.decode(left) == "The Goat"


def test_training_is_repeatable_and_small_text_gives_fewer_tokens(tmp_path):
    assert train_wordpiece(WORDS, 90, lowercase=True) == train_wordpiece(WORDS, 90, lowercase=True)
    vocabulary = json.loads(train_wordpiece(["aa ab"], 500, lowercase=True))["model"]["vocab"]
    assert list(vocabulary) == [*WORDPIECE_SPECIAL, "a", "b", "##a", "##b", "aa", "ab"]


def test_merges_follow_frequency_and_tell_beginnings_from_continuations():
    texts = ["ab ab ab ab", "cab cab", "\ue000 b"]  # the last character is no text
    vocabulary = json.loads(train_wordpiece(texts, 40, lowercase=True))["model"]["vocab"]
    learned = [piece for piece in vocabulary if piece.strip("#") not in {"a", "b", "c"}][5:]
    # six times a-b, four times mark-ab, twice c-ab, twice mark-cab
    assert learned == ["##ab", "ab", "##cab", "cab"]


def test_rare_characters_are_unknown(tmp_path):
    (tmp_path / "t.json").write_text(train_wordpiece(["aab"] * 9 + ["z"], 9, lowercase=True))
    codec = FileCodec(tmp_path / "t.json")
    assert [list(ids) for ids in codec.encode(["z", "a"])] == [[1], [5]]


@pytest.mark.parametrize("name", ["wordpiece", "wordpiece_cased"])
def test_documents_end_with_sep(options, tmp_path, name):
    for i, text in enumerate(WORDS):
        (tmp_path / f"{i}.txt").write_text(text)
    chosen = options("text_files", files=[f"{tmp_path}/*.txt"], tokenizer=name, vocab_size=150)
    data = prepare(chosen, workers=1)
    assert data.end_of_text == 3 and data.vocab_size == 150
    assert sum(int((tokens == 3).sum()) for tokens in data.tokens.values()) == len(WORDS)
    assert data.tokens["train"][-1] == 3
    assert not any((tokens == 4).any() or (tokens < 3).any() for tokens in data.tokens.values())
    text = data.decode(data.tokens["train"])
    assert ("The" in text) == (name == "wordpiece_cased") and "[UNK]" not in text
    assert load(chosen).fingerprint == data.fingerprint
