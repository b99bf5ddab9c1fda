"""Text, identity and differences of resolved configurations."""

import copy
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsepretrain.config import load, validate
from sparsepretrain.config.freeze import (
    NOT_IDENTITY,
    diff,
    flat,
    from_yaml,
    identity,
    run_directory,
    to_yaml,
)
from sparsepretrain.errors import ConfigError

RUN = load()
PLAIN = RUN.plain


def changed(key: str, value: object) -> dict:
    plain = copy.deepcopy(PLAIN)
    *parents, leaf = key.split(".")
    part = plain
    for parent in parents:
        part = part[parent]
    part[leaf] = value
    return plain


def test_yaml_round_trip_gives_the_same_run(tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text(to_yaml(PLAIN))
    plain = from_yaml(file)
    assert plain == PLAIN and list(plain) == list(PLAIN)
    assert validate(plain) == RUN and validate(plain).plain == PLAIN


VALUES = st.one_of(
    st.text("aeZ19 -.:#'\"[]{}é%&*!|>@", max_size=8),
    st.sampled_from(["1e-4", "null", "yes", "0x10", "~", "1_000", "2020-01-01", ".inf"]),
    st.floats(allow_nan=False),
    st.integers(),
    st.booleans(),
    st.none(),
)


@settings(max_examples=40)
@given(st.lists(VALUES, max_size=5))
def test_any_value_survives_yaml(tmp_path_factory, values):
    file = tmp_path_factory.mktemp("text") / "config.yaml"
    file.write_text(to_yaml({"values": values}), encoding="utf-8")
    back = from_yaml(file)["values"]
    assert back == values and list(map(type, back)) == list(map(type, values))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("resume", "never"),
        ("runs_dir", "/x"),
        ("tracker.project", "p"),
        ("seed", 5),
        ("workers", 2),
        ("checkpoint.background", True),
        ("compile", "blocks"),
        ("parallel.name", "ddp"),
        ("parallel.reduction", "tree"),
    ],
)
def test_identity_ignores_keys_that_change_no_result(key, value):
    assert identity(changed(key, value)) == identity(PLAIN)


def test_identity_depends_on_all_other_keys():
    excluded = {*NOT_IDENTITY, "parallel", "compile"}
    for key in flat(PLAIN):
        if not {key, key.split(".")[0]} & excluded or key == "parallel.device":
            assert identity(changed(key, "another")) != identity(PLAIN), key


def test_identity_ignores_order_and_spelling_of_numbers():
    other = dict(reversed(changed("clip", 1).items()))
    assert identity(other) == identity(PLAIN)
    assert identity(load(["optim.eps=0.00000001", "clip=1"]).plain) == identity(PLAIN)
    assert identity(RUN) == identity(PLAIN)
    assert identity(load(["data.vocab_size=256"]).plain) == identity(PLAIN), "null means 256"
    expected = Path("runs") / "gpt2_nano" / f"{identity(PLAIN)}-s0"
    assert run_directory(RUN) == run_directory(PLAIN) == expected


def test_diff_lists_changed_keys():
    other = load(["sparsity=srste", "optim.lr=1e-3", "clip=1"]).plain
    lines = diff(PLAIN, other)
    assert "optim.lr: 0.002 -> 0.001" in lines
    assert "sparsity.name: sste -> srste" in lines
    assert "sparsity.gamma: 0 -> absent" in lines
    assert "sparsity.decay: absent -> 0.0002" in lines
    assert not any(line.startswith("clip") for line in lines)
    assert diff(PLAIN, RUN) == []
    assert diff(PLAIN, changed("clip", None)) == ["clip: 1 -> null"]


@pytest.mark.parametrize("text", ["- 1\n", "a: [\n", "5\n"])
def test_unreadable_configuration_names_the_file(tmp_path, text):
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(ConfigError, match=r"config\.yaml"):
        from_yaml(tmp_path / "config.yaml")
    with pytest.raises(ConfigError, match=r"none\.yaml"):
        from_yaml(tmp_path / "none.yaml")
