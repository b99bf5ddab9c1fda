"""Strict pass: types, ranges, suggestions."""

import re
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparsepretrain.config import compose, load, validate
from sparsepretrain.config.freeze import flat
from sparsepretrain.config.strict import build
from sparsepretrain.errors import ConfigError
from sparsepretrain.registry import suggestion

KEYS = sorted({key.rpartition(".")[2] for key in flat(compose())})


def problems(*overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(overrides)
    return caught.value.messages


@given(st.data())
def test_two_wrong_letters_still_get_a_suggestion(data):
    word = data.draw(st.sampled_from([key for key in KEYS if len(key) >= 4]))
    typo = list(word)
    for _ in range(data.draw(st.integers(1, 2))):
        place = data.draw(st.integers(0, len(typo) - 1))
        kind = data.draw(st.sampled_from(["replace", "insert", "drop"]))
        if kind == "drop":
            del typo[place]
        elif kind == "insert":
            typo.insert(place, "q")
        else:
            typo[place] = "q"
    assert "did you mean" in suggestion("".join(typo), KEYS)


def test_a_key_without_a_similar_one_is_answered_with_all_keys():
    (message,) = problems("optim.mommentum=0")
    assert message.startswith("unknown key 'optim.mommentum' (choose from name, lr, betas, eps")


def test_all_wrong_keys_are_reported_together():
    wrong = {
        "seed": "x", "batch.micro": 3, "optim.lr": -1, "sparsity.gamma": 2, "sparsity.n": 5,
        "schedule.name": "cosin", "foo": 1, "data.validation": 2, "task.sequence_length": "a",
        "precision.name": "fp4", "tracker.mode": "on",
    }  # fmt: skip
    found = problems("clip=0", *(f"{key}={value}" for key, value in wrong.items()))
    assert len(found) == len(wrong), "root rules like clip wait for root types"
    for key in wrong:
        assert sum(re.search(rf"(^|'){key}\b", message) is not None for message in found) == 1, key


@pytest.mark.parametrize("group", ["model", "data", "sparsity", "task", "optim", "schedule"])
def test_missing_or_scalar_group_is_one_error(group):
    plain = compose()
    with pytest.raises(ConfigError) as caught:
        validate({**plain, group: 5})
    assert len(caught.value.messages) == 1 and caught.value.messages[0].startswith(f"{group} ")
    del plain[group]
    with pytest.raises(ConfigError) as caught:
        validate(plain)
    assert caught.value.messages == [f"missing key {group!r}"]


@dataclass(slots=True, kw_only=True)
class Small:
    a: int
    b: list[float]
    c: tuple[int, int] | None = None


@pytest.mark.parametrize("value", [True, 1.5, "1", None, [1], float("nan")])
def test_only_integers_are_integers(value):
    with pytest.raises(ConfigError, match="a must be an integer"):
        build(Small, {"a": value, "b": []})


@pytest.mark.parametrize("value", [True, "1", None, float("nan"), float("inf")])
def test_elements_are_checked(value):
    with pytest.raises(ConfigError, match=r"b\[1\] must be a number"):
        build(Small, {"a": 1, "b": [0.5, value]})


@pytest.mark.parametrize(
    ("word", "remedy"),
    [
        ("data.files=x.txt", "data.files must be a list of strings, got 'x.txt': write [x.txt]"),
        ("plugins=mine.py", "plugins must be a list of strings, got 'mine.py': write [mine.py]"),
        ("optim.betas=0.9", "optim.betas must be a list of 2 values"),
        ("sparsity.targets=3", "sparsity.targets must be a string or a list of strings, got 3"),
    ],
)
def test_a_single_value_where_a_list_belongs_names_the_brackets(word, remedy):
    (message,) = problems("data=text_files", *(["data.files=[a]"] * ("files" not in word)), word)
    assert message.startswith(remedy) and (message == remedy or "write [" not in message)


@pytest.mark.parametrize(
    ("word", "quoted"),
    [
        ("data.files=[data [v2]/*.txt]", "'data.files=[\"…\"]'"),
        ("name=a{b", "'name=\"…\"'"),
    ],
)
def test_the_hint_for_special_characters_can_be_read(word, quoted):
    (message,) = problems("data=text_files", "data.files=[a]", word)
    assert message.endswith(quoted)
    filled = quoted.strip("'").replace("…", word.partition("=")[2].strip("[]"))
    assert load(["data=text_files", "data.files=[a]", filled])
