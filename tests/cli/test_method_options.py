"""Every option of every method: wrong types and values out of range are one line and exit 2."""

import functools
import json
import subprocess
import sys
import typing
from pathlib import Path

import pytest
from torch import nn

import sparsepretrain as sp
from sparsepretrain import registry
from sparsepretrain.config import compose, validate
from sparsepretrain.config.freeze import flat
from sparsepretrain.errors import ConfigError

METHODS = [m for m in registry.names("method") if not m.startswith("mine")]

FRACTION, PROPER = ("-0.1", "1.5"), ("-0.1", "1.0")
OUT_OF_RANGE = {
    "adapters.rank": ("-1",),
    "adapters.start": ("-0.1", "1.0"),
    "n": ("0", "5", "-1"),
    "m": ("0", "-4"),
    "targets": ("[]", "''"),
    "window.start": ("-0.5", "1.0"),
    "window.stop": ("0.0", "1.5"),
    "decay": ("-1e-4",),
    "decay_ramp": FRACTION,
    "gamma": FRACTION,
    "until": FRACTION,
    "rate": ("-1.0",),
    "at": PROPER,
    "dense_tail": PROPER,
    "refresh": ("0", "-40"),
    "every": ("0",),
    "candidates": ("0",),
    "window_length": ("0",),
    "clipping": ("[-0.1,0.5]", "[0.1,1.5]", "[0.5,0.1]"),
    "epsilon": ("-1e-4",),
}
"""Key -> values of the right type that no method accepts; choices and switches have none."""

ONLY_24 = {"tsrste": [], "bimask": [], "dense": ["flip_rule=transposable"], "sste": ["mvue=weight"]}
"""Methods that are 2:4 with these options."""


@functools.cache
def plain(method: str) -> dict[str, typing.Any]:
    return compose([f"sparsity={method}"])


def keys(method: str) -> list[str]:
    """Dotted names of the options."""
    return [key for key in flat(plain(method)["sparsity"]) if key != "name"]


def has_range(method: str, key: str) -> bool:
    """Whether an option takes numbers, lists or text; a wrong choice is a wrong type."""
    hint: typing.Any = registry.get("method", method).Options
    for part in key.split("."):
        hint = typing.get_type_hints(hint)[part]
    return typing.get_origin(hint) is not typing.Literal and hint is not bool


def wrong_types() -> list[tuple[list[str], list[str]]]:
    return [
        ([f"sparsity={method}", f"sparsity.{key}={value}"], [f"sparsity.{key} must be"])
        for method in METHODS
        for key in keys(method)
        for value in (("{a:1}", "5") if key == "targets" else ("{a:1}", "wrong"))
    ]


def out_of_range() -> list[tuple[list[str], list[str]]]:
    return [
        ([f"sparsity={method}", f"sparsity.{key}={value}"], [f"sparsity.{key.split('.')[0]}", last])
        for method in METHODS
        for key in keys(method)
        for value in OUT_OF_RANGE.get(key, ())
        for last in [key.split(".")[-1]]
    ]


def other_patterns() -> list[tuple[list[str], list[str]]]:
    return [
        (
            [f"sparsity={method}", f"sparsity.n={n}", f"sparsity.m={m}", *more],
            [f"got {n}:{m}", "sparsity.mvue" if method == "sste" else f"sparsity.{key}"],
        )
        for method, needed in ONLY_24.items()
        for more in [[f"sparsity.{option}" for option in needed]]
        for n, m, key in ((1, 4, "n"), (2, 8, "m"), (4, 8, "m"))
    ]


CASES = [*wrong_types(), *out_of_range(), *other_patterns()]


@pytest.fixture(scope="module")
def results() -> list[dict[str, typing.Any]]:
    argvs = [["train", *overrides, "--cfg", "job"] for overrides, _ in CASES]
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("run_cases.py"))],
        input=json.dumps(argvs),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(done.stdout)


@pytest.mark.parametrize("number", range(len(CASES)), ids=[" ".join(case) for case, _ in CASES])
def test_one_line_names_the_key(results, number):
    result, words = results[number], CASES[number][1]
    assert result["code"] == 2 and not result["out"], result
    assert result["err"].count("\n") == 1, result
    assert all(word in result["err"] for word in words), result


@pytest.mark.parametrize("method", METHODS)
def test_no_option_is_forgotten(method):
    ranged = {key for key in keys(method) if has_range(method, key)}
    assert ranged <= set(OUT_OF_RANGE), "give the new option a value that is refused"


@pytest.mark.parametrize("method", METHODS)
def test_the_library_says_the_same(method):
    for key in set(keys(method)) & set(OUT_OF_RANGE) - {"targets", "n", "m"}:
        name, _, inner = key.partition(".")
        for text in OUT_OF_RANGE[key]:
            value = json.loads(text)
            given = {name: {inner: value} if inner else value}
            with pytest.raises(ConfigError, match=inner or name) as caught:
                sp.sparsify(nn.Sequential(), method, targets="*", total_steps=40, **given)
            assert len(caught.value.messages) == 1


@pytest.mark.parametrize("method", METHODS)
def test_every_choice_is_accepted(method):
    hints = typing.get_type_hints(registry.get("method", method).Options)
    for key, hint in hints.items():
        for value in typing.get_args(hint) if typing.get_origin(hint) is typing.Literal else ():
            run = validate({**plain(method), "sparsity": {**plain(method)["sparsity"], key: value}})
            assert getattr(run.sparsity, key) == value
