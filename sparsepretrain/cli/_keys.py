"""Keys of a configuration and the values that their types list, for completion.

A shell asks for completions on every press of Tab. Composing with Hydra takes most of a second, and
the types of options lie in modules that import torch. Option files are therefore merged here, with
the precedence of ``configs/train.yaml``, and types are read from the source text.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import sparsepretrain
from sparsepretrain import registry
from sparsepretrain.config.compose import PAIRS, PRIMARY
from sparsepretrain.config.groups import GROUPS, REGISTERED, key_of
from sparsepretrain.config.schema import Run

RECIPES = ("experiment", "finetune", "model")
"""Groups whose files choose options of other groups; the first one that chooses wins."""


@dataclass(slots=True)
class Merge:
    """Option files merged into one configuration; interpolations stay text.

    Args:
        path: directories of YAML files, see ``places.search_path``.
        choices: group -> option of the command line.
    """

    path: Sequence[Path]
    choices: dict[str, str]
    plain: dict[str, Any] = field(default_factory=dict)

    def run(self) -> dict[str, Any]:
        """Return the merged configuration."""
        defaults = [item for item in _load(self.path, PRIMARY)["defaults"] if item != "_self_"]
        chosen = {
            group: option
            for item in defaults
            for group, option in item.items()
            if not group.startswith(("optional ", "override "))
        }
        choices = dict(self.choices)
        for group in RECIPES:
            if option := choices.get(group, chosen.get(group)):
                self._collect(f"{group}/{option}", choices)
        choices = chosen | choices
        # values of the primary file come after the defaults of groups and before recipes
        groups = [group for group in choices if group not in RECIPES]
        for group in groups:
            self._add(f"{group}/{choices[group]}")
        _update(self.plain, _without_defaults(_load(self.path, PRIMARY)))
        self._add(f"model/{choices.get('model')}")
        self._add(f"{PAIRS}/_{choices.get('model')}_{choices.get('sparsity')}")
        for group in ("finetune", "experiment"):
            if choices.get(group):
                self._add(f"{group}/{choices[group]}")
        return self.plain

    def _collect(self, name: str, choices: dict[str, str]) -> None:
        """Add the choices of ``override /group: option`` in a file and those that it includes."""
        items = [*_defaults(name, _load(self.path, name))]
        for _, group, option in (item for item in items if item[0] == "override"):
            choices.setdefault(group, option)
        for _, other, _ in (item for item in items if item[0] == "include"):
            self._collect(other, choices)

    def _add(self, name: str) -> None:
        """Merge a file after the files that it includes."""
        content = _load(self.path, name)
        for kind, other, _ in _defaults(name, content):
            if kind == "include":
                self._add(other)
        values = _without_defaults(content)
        group = name.split("/")[0]
        is_global = group in (*RECIPES, PAIRS)  # `# @package _global_`; a test looks at all files
        _update(self.plain, values if is_global else {group: values})


def _load(path: Sequence[Path], name: str) -> dict[str, Any]:
    """Return the content of the first file called ``name``; empty if there is none."""
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    for directory in path:
        if (file := directory / f"{name}.yaml").is_file():
            content = yaml.load(file.read_text(encoding="utf-8"), loader)
            return content if isinstance(content, dict) else {}
    return {}


def _defaults(name: str, content: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Yield ("include", file, "") and ("override", group, option) of a defaults list."""
    for item in content.get("defaults") or ():
        if isinstance(item, dict):
            for key, option in item.items():
                words = key.split()
                if words[0] == "override" and option:
                    yield "override", words[-1].lstrip("/"), str(option)
        elif item != "_self_":
            group = name.rpartition("/")[0]
            yield "include", item.lstrip("/") if item.startswith("/") else f"{group}/{item}", ""


def _without_defaults(content: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in content.items() if key != "defaults"}


def _update(target: dict[str, Any], values: Mapping[str, Any]) -> None:
    for key, value in values.items():
        if isinstance(value, dict) and isinstance(target.get(key), dict):
            _update(target[key], value)
        else:
            target[key] = dict(value) if isinstance(value, dict) else value


@dataclass(frozen=True, slots=True)
class Values:
    """Values that a key takes."""

    listed: tuple[str, ...] = ()
    """Values of an enumeration; empty: any."""
    is_list: bool = False
    """True if the key takes a list of these values."""


def values_of(key: str, plain: Mapping[str, Any]) -> Values:
    """Return the values of a dotted key of the configuration ``plain``."""
    group, *rest = key.split(".")
    options = plain.get(group)
    if rest and isinstance(options, dict) and group != "tracker":
        declared = _declared_in_group(group, rest, options)
    else:
        declared = declared_values(Run, [group, *rest])
    for name in rest:
        options = options.get(name) if isinstance(options, dict) else None
    if not declared.listed and isinstance(options, bool):  # of a plug-in, whose source is not read
        return Values(("true", "false"))
    return declared


def declared_values(cls: type, path: Sequence[str]) -> Values:
    """Return the values of a field of the dataclass ``cls``, or of a dataclass in that field."""
    node = _find(cls.__module__, cls.__name__)
    return _values(node, path)


def _declared_in_group(group: str, rest: list[str], options: Mapping[str, Any]) -> Values:
    name = str(options.get(key_of(group)))
    if group in GROUPS and name in GROUPS[group]:
        return declared_values(GROUPS[group][name], rest)
    kind = REGISTERED.get(group, ("", ""))[0]
    if group == "probe":
        kind, name, rest = "probe", rest[0], rest[1:]
    if not kind:
        return declared_values(Run, [group, *rest])
    module = registry.built_in(kind).get(name)
    if module is None:
        return Values()
    for node in _tree(module).body:
        if isinstance(node, ast.ClassDef) and any(map(_registers, node.decorator_list)):
            return _values(_member((module, node), "Options"), rest)
    return Values()


Located = tuple[str, ast.AST]
"""Module, and a node in its source."""


def _values(start: Located | None, path: Sequence[str]) -> Values:
    """Follow ``path`` through the fields of a dataclass; return the values of the last field."""
    located = start and _resolved(start)
    for name in path:
        located = located and _member(located, name)
        located = located and _resolved(located)
    if located is None:
        return Values()
    listed, is_list = _listed(located)
    return Values(tuple(dict.fromkeys(listed)), is_list)


def _listed(located: Located) -> tuple[list[str], bool]:
    """Return the values in an annotation, null included, and True if they form a list."""
    module, node = _resolved(located) or located
    if isinstance(node, ast.BinOp):  # X | Y
        left, several = _listed((module, node.left))
        right, other = _listed((module, node.right))
        if not {*left, *right} - {"null"}:
            return [], several or other  # a number or null: no enumeration is complete
        return [*left, *right], several or other
    if isinstance(node, ast.Constant) and node.value is None:
        return ["null"], False
    if isinstance(node, ast.Name) and node.id == "bool":
        return ["true", "false"], False
    if not isinstance(node, ast.Subscript) or not isinstance(node.value, ast.Name):
        return [], False
    inner = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
    match node.value.id:
        case "Literal":
            return [str(item.value) for item in inner if isinstance(item, ast.Constant)], False
        case "Annotated":
            return _listed((module, inner[0]))
        case "list" | "tuple":
            return _listed((module, inner[0]))[0], True
    return [], False


def _resolved(located: Located) -> Located | None:
    """Replace a name by its class or by the type that it stands for."""
    module, node = located
    if isinstance(node, ast.Name):
        return _find(module, node.id) or located
    return located


def _member(located: Located, name: str) -> Located | None:
    """Return the annotation or value of ``name`` in a class or in its bases."""
    module, node = located
    if not isinstance(node, ast.ClassDef):
        return None
    for item in node.body:
        if isinstance(item, ast.AnnAssign) and _is_named(item.target, name):
            is_constant = item.value is not None and "ClassVar" in ast.dump(item.annotation)
            return module, item.value if is_constant and item.value else item.annotation
        if isinstance(item, ast.Assign) and any(_is_named(target, name) for target in item.targets):
            return module, item.value
    for base in node.bases:
        parent = base.value if isinstance(base, ast.Subscript) else base
        above = _resolved((module, parent))
        if above is not None and above[1] is not parent and (found := _member(above, name)):
            return found
    return None


def _find(module: str, name: str) -> Located | None:
    """Return the class or the type alias ``name`` of a module, also if it is imported there."""
    tree = _tree(module)
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            return module, node
        if isinstance(node, ast.Assign) and any(_is_named(target, name) for target in node.targets):
            return module, node.value
    for item in ast.walk(tree):
        if isinstance(item, ast.ImportFrom) and (item.module or "").startswith("sparsepretrain"):
            for alias in item.names:
                if (alias.asname or alias.name) == name:
                    return _find(item.module or "", alias.name)
    return None


@functools.cache
def _tree(module: str) -> ast.Module:
    """Parse a module of the package; empty for others."""
    package, *parts = module.split(".")
    root = Path(sparsepretrain.__file__).parent.joinpath(*parts)
    for file in (root.with_suffix(".py"), root / "__init__.py"):
        if package == "sparsepretrain" and file.is_file():
            return ast.parse(file.read_text(encoding="utf-8"))
    return ast.Module([], [])


def _is_named(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def _registers(node: ast.AST) -> bool:
    """Return True for the decorator ``register(kind, name)``."""
    return isinstance(node, ast.Call) and _is_named(node.func, "register")
