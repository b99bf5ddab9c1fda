"""Strict pass: build a dataclass from a plain mapping, or report every error.

OmegaConf's merge stops at the first error and misses ``+key``. Hydra composes, this module checks
plain Python values.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import types
import typing
from typing import Annotated, Any, TypeVar

from sparsepretrain.errors import ConfigError, Problems
from sparsepretrain.registry import suggestion

T = TypeVar("T")
_MISSING = object()
_type_hints = functools.cache(typing.get_type_hints)


def build(cls: type[T], data: dict[str, Any], path: str = "") -> T:
    """Build the dataclass ``cls`` from plain values, checking names, types and ranges.

    Ranges are declared with types: ``Annotated[int, "≥ 1"]``, ``"> 0"``, ``"[0, 1)"``,
    ``"(0, 10^9]"``; null is always inside, and every value of a list must be. For other rules a
    dataclass may define ``problems()``, which yields (key, message) once all types are right.

    Args:
        cls: dataclass with annotated fields.
        data: plain values.
        path: dotted prefix of the keys in messages.
    """
    errors: list[str] = []
    value = walk(cls, data, path, errors)
    if errors:
        raise ConfigError(errors)
    return value


def walk(cls: type, data: Any, path: str, errors: list[str]) -> Any:
    """Do the same as :func:`build`, but append problems to ``errors``; return None if any."""
    before = len(errors)
    if not isinstance(data, dict):
        errors.append(f"{path or 'config'} must be a mapping of keys, got {_show(data)}")
        return None
    hints = _type_hints(cls)
    fields = {f.name: f for f in dataclasses.fields(cls)}
    for key in data:
        if key not in fields:
            near = suggestion(str(key), fields, _join(path, ""))
            errors.append(f"unknown key {_join(path, key)!r}{near}")
    values = {}
    for name, field in fields.items():
        key = _join(path, name)
        if name in data:
            values[name] = _convert(hints[name], data[name], key, errors)
        elif field.default is field.default_factory is dataclasses.MISSING:
            errors.append(f"missing key {key!r}")
    if len(errors) > before:
        return None
    result = cls(**values)
    problems = [*out_of_range(result), *getattr(result, "problems", tuple)()]
    errors.extend(f"{_join(path, key)} {message}" for key, message in problems)
    return result if len(errors) == before else None


def out_of_range(options: Any) -> Problems:
    """Yield (key, message) of every number outside its declared range."""
    for key, (limit, nullable) in _ranges(options.__class__).items():
        if message := _outside(getattr(options, key), limit, nullable=nullable):
            yield key, message


def _outside(value: Any, limit: str, *, nullable: bool = False) -> str:
    """Return a message if ``value`` (a number, a list of numbers, or None) is out of range.

    None is always valid; with ``nullable`` the message mentions null.
    """
    several = isinstance(value, list | tuple)
    if all(v is None or _within(v, limit) for v in (value if several else [value])):
        return ""
    verb = "be" if limit[0] in ">≥" else "lie in"
    null = ""
    if nullable:
        null = " or null" if verb == "be" else " or be null"
    return f"must {verb} {limit}{null}, got {list(value) if several else value}"


def _within(value: float, limit: str) -> bool:
    low, high = (_number(end) for end in f"{limit.strip('>≥[]()')},inf".split(",")[:2])
    at_end = (value == low and limit[0] in "≥[") or (value == high and limit[-1] == "]")
    return low < value < high or at_end


def _number(text: str) -> float:
    base, power, exponent = text.partition("^")
    return int(base) ** int(exponent) if power else float(text)


@functools.cache
def _ranges(cls: Any) -> dict[str, tuple[str, bool]]:
    """Return key -> (range, True if null is allowed) of fields with a range."""
    hints = typing.get_type_hints(cls, include_extras=True)
    return {
        key: (hint.__metadata__[0], type(None) in typing.get_args(hint.__origin__))
        for key, hint in hints.items()
        if typing.get_origin(hint) is Annotated
    }


def _convert(hint: Any, value: Any, key: str, errors: list[str]) -> Any:
    converted = _match(hint, value, key, errors)
    if converted is _MISSING:
        remedy = _as_list(hint, value)
        if hint is str and isinstance(value, int | float):  # YAML reads 1:4 as the number 64
            remedy = ": write it in quotes"
        errors.append(f"{key} must be {_name(hint)}, got {_show(value)}{remedy}")
        return None
    return converted


def _match(hint: Any, value: Any, key: str, errors: list[str]) -> Any:
    """Return ``value`` as ``hint``, or _MISSING for a wrong type."""
    origin = typing.get_origin(hint)
    args = typing.get_args(hint)
    if hint is Any:
        return value
    if origin in (typing.Union, types.UnionType):
        blocks = [option for option in args if dataclasses.is_dataclass(option)]
        if isinstance(value, dict) and len(blocks) == 1:  # its own errors say more
            return _match(blocks[0], value, key, errors)
        for option in args:
            trial: list[str] = []
            converted = _match(option, value, key, trial)
            if converted is not _MISSING and not trial:
                return converted
        return _MISSING
    if hint is type(None):
        return None if value is None else _MISSING
    if origin is typing.Literal:
        return value if any(value == a and type(value) is type(a) for a in args) else _MISSING
    if origin in (list, tuple):
        if not isinstance(value, list | tuple):
            return _MISSING
        fixed = origin is tuple and args[-1] is not Ellipsis
        hints = args if fixed else args[:1] * len(value)
        if len(value) != len(hints):
            return _MISSING
        return origin(
            _convert(h, v, f"{key}[{i}]", errors)
            for i, (h, v) in enumerate(zip(hints, value, strict=True))
        )
    if origin is dict:
        if not isinstance(value, dict):
            return _MISSING
        pairs = [(str(k), v) for k, v in value.items()]
        return {
            _convert(args[0], k, key, errors): _convert(args[1], v, _join(key, k), errors)
            for k, v in pairs
        }
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return value if isinstance(value, hint) else walk(hint, value, key, errors)
    if hint is float:
        number = isinstance(value, int | float) and not isinstance(value, bool)
        return float(value) if number and math.isfinite(value) else _MISSING
    if hint is int:
        return value if isinstance(value, int) and not isinstance(value, bool) else _MISSING
    return value if isinstance(value, hint) else _MISSING


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def _show(value: Any) -> str:
    text = "null" if value is None else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


_NAMES = {
    int: "an integer",
    float: "a number",
    bool: "true or false",
    str: "a string",
    type(None): "null",
}


_PLURALS = {int: "integers", float: "numbers", str: "strings"}


def _as_list(hint: Any, value: Any) -> str:
    """Return the remedy for a single value where a list of such values belongs."""
    union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    for option in typing.get_args(hint) if union else (hint,):
        trial: list[str] = []
        if typing.get_origin(option) is list:
            converted = _match(option, [value], "", trial)
            if converted is not _MISSING and not trial:
                return f": write [{value}]"
    return ""


def _name(hint: Any) -> str:
    origin = typing.get_origin(hint)
    args = typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_name(a) for a in args)
    if origin is typing.Literal:
        return "one of " + ", ".join(str(a) for a in args)
    if origin is list:
        return f"a list of {_PLURALS.get(args[0], _name(args[0]))}"
    if origin is tuple:
        return f"a list of {len(args)} values ({', '.join(_name(a) for a in args)})"
    return _NAMES.get(hint, "a mapping of keys")
