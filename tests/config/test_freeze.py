"""Text, identity and differences of resolved configurations."""

import copy
import functools
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsepretrain.config import freeze, load, validate
from sparsepretrain.errors import ConfigError

RUN = load()
PLAIN = RUN.plain


def changed(key: str, value: object) -> dict:
    plain = copy.deepcopy(PLAIN)
    *parents, leaf = key.split(".")
    functools.reduce(dict.__getitem__, parents, plain)[leaf] = value
    return plain


def test_yaml_round_trip_gives_the_same_run(tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text(freeze.to_yaml(PLAIN))
    plain = freeze.from_yaml(file)
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
    file.write_text(freeze.to_yaml({"values": values}), encoding="utf-8")
    back = freeze.from_yaml(file)["values"]
    assert back == values and list(map(type, back)) == list(map(type, values))


@pytest.mark.parametrize(
    ("key", "value"),
    [("resume", "never"), ("runs_dir", "/x"), ("tracker.project", "p"), ("seed", 5),
     ("workers", 2), ("checkpoint.background", True), ("compile", "blocks"),
     ("parallel.name", "ddp"), ("parallel.reduction", "tree")],
)  # fmt: skip
def test_identity_ignores_keys_that_change_no_result(key, value):
    assert freeze.identity(changed(key, value)) == freeze.identity(PLAIN)


def test_batch_norm_over_all_ranks_is_another_experiment():
    ddp = {**PLAIN["parallel"], "name": "ddp", "nproc": 2}
    identities = {
        freeze.identity({**PLAIN, "parallel": ddp | {"sync_batchnorm": synchronized}})
        for synchronized in (False, True)
    }
    assert len(identities) == 2 and freeze.identity(PLAIN) in identities


def test_identity_depends_on_all_other_keys():
    excluded = {*freeze.NOT_IDENTITY, "parallel", "compile"}
    for key in freeze.flat(PLAIN):
        if not {key, key.split(".")[0]} & excluded or key == "parallel.device":
            assert freeze.identity(changed(key, "another")) != freeze.identity(PLAIN), key


def test_identity_ignores_order_and_spelling_of_numbers():
    other = dict(reversed(changed("clip", 1).items()))
    assert freeze.identity(other) == freeze.identity(PLAIN)
    assert freeze.identity(load(["optim.eps=0.00000001", "clip=1"]).plain) == freeze.identity(PLAIN)
    assert freeze.identity(RUN) == freeze.identity(PLAIN)
    assert freeze.identity(load(["data.vocab_size=256"]).plain) == freeze.identity(PLAIN), (
        "null means 256"
    )
    expected = Path("runs") / "gpt2_nano" / f"{freeze.identity(PLAIN)}-s0"
    assert freeze.run_directory(RUN) == freeze.run_directory(PLAIN) == expected


def test_diff_lists_changed_keys():
    other = load(["sparsity=srste", "optim.lr=1e-3", "clip=1"]).plain
    lines = freeze.diff(PLAIN, other)
    assert "optim.lr: 0.002 -> 0.001" in lines
    assert "sparsity.name: sste -> srste" in lines
    assert "sparsity.gamma: 0 -> absent" in lines
    assert "sparsity.decay: absent -> 0.0002" in lines
    assert not any(line.startswith("clip") for line in lines)
    assert freeze.diff(PLAIN, RUN) == []
    assert freeze.diff(PLAIN, changed("clip", None)) == ["clip: 1 -> null"]


@pytest.mark.parametrize("text", ["- 1\n", "a: [\n", "5\n"])
def test_unreadable_configuration_names_the_file(tmp_path, text):
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(ConfigError, match=r"config\.yaml"):
        freeze.from_yaml(tmp_path / "config.yaml")
    with pytest.raises(ConfigError, match=r"none\.yaml"):
        freeze.from_yaml(tmp_path / "none.yaml")
