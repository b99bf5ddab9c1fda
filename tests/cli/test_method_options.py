"""Options of methods: wrong types and values out of range are one message each."""

import copy
import functools
import typing

import pytest
from torch import nn

import sparsepretrain as sp
from sparsepretrain import registry
from sparsepretrain.config import compose, validate
from sparsepretrain.config.freeze import flat
from sparsepretrain.errors import ConfigError

METHODS = [m for m in registry.names("method") if not m.startswith("mine")]

FRACTION, PROPER = (-0.1, 1.5), (-0.1, 1.0)
OUT_OF_RANGE = {
    "adapters.rank": (-1,), "adapters.start": (-0.1, 1.0), "n": (0, 5, -1), "m": (0, -4),
    "targets": ([], ""), "window.start": (-0.5, 1.0), "window.stop": (0.0, 1.5),
    "decay": (-1e-4,), "decay_ramp": FRACTION, "gamma": FRACTION, "until": FRACTION,
    "rate": (-1.0,), "at": PROPER, "dense_tail": PROPER, "refresh": (0, -40), "every": (0,),
    "candidates": (0,), "window_length": (0,), "epsilon": (-1e-4,),
    "clipping": ([-0.1, 0.5], [0.1, 1.5], [0.5, 0.1]),
    "patterns": ({"a": "0:4"}, {"a": "5:4"}, {"a": "2"}, {"a": "none"}, {"a": ""}),
}  # fmt: skip
"""Key -> values of the right type that no method accepts."""


@functools.cache
def plain(method: str) -> dict[str, typing.Any]:
    return compose([f"sparsity={method}"])


def keys(method: str) -> list[str]:
    """Return the dotted names of the options."""
    return [key for key in flat(plain(method)["sparsity"]) if key != "name"]


def refusal(method: str, **changes: typing.Any) -> str:
    """Return the one message about a configuration with these options changed."""
    changed = copy.deepcopy(plain(method))
    for key, value in changes.items():
        *parents, leaf = key.split(".")
        functools.reduce(dict.__getitem__, parents, changed["sparsity"])[leaf] = value
    with pytest.raises(ConfigError) as caught:
        validate(changed)
    (message,) = caught.value.messages
    assert "\n" not in message
    return message


@pytest.mark.parametrize("method", METHODS)
def test_wrong_types_are_one_message_that_names_the_key(method):
    for key in keys(method):
        mapping = [1] if key == "patterns" else {"a": 1}
        for value in (mapping, 5 if key == "targets" else "wrong"):
            assert f"sparsity.{key} must be" in refusal(method, **{key: value}), (key, value)


@pytest.mark.parametrize("method", METHODS)
def test_values_out_of_range_are_one_message_that_names_the_key(method):
    for key in set(keys(method)) & set(OUT_OF_RANGE):
        for value in OUT_OF_RANGE[key]:
            message = refusal(method, **{key: value})
            parts = key.split(".")
            assert f"sparsity.{parts[0]}" in message and parts[-1] in message, (key, value)


@pytest.mark.parametrize(("n", "m"), [(1, 4), (2, 8), (4, 8)])
def test_samples_of_the_weight_refuse_other_patterns(n, m):
    message = refusal("sste", n=n, m=m, mvue="weight")
    assert message.startswith("sparsity.mvue") and f"2:4 only, got {n}:{m}" in message


@pytest.mark.parametrize("method", METHODS)
def test_sparsify_refuses_the_same_values(method):
    for key in set(keys(method)) & set(OUT_OF_RANGE) - {"targets", "n", "m"}:
        name, _, inner = key.partition(".")
        for value in OUT_OF_RANGE[key]:
            given = {name: {inner: value} if inner else value}
            with pytest.raises(ConfigError, match=inner or name) as caught:
                sp.sparsify(nn.Sequential(), method, targets="*", total_steps=40, **given)
            assert len(caught.value.messages) == 1
