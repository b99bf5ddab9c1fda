"""Names to implementations, without importing torch.

A built-in is a module of the package that holds its kind: the method ``sste`` is
``sparsepretrain/sparsity/methods/sste.py``. The module is imported when the name is looked up and
registers its class with :func:`register`. Plugins (a file, a module, or an installed package with
the entry-point group ``sparsepretrain.plugins``) register in the same way, so a new method is one
file and one YAML and nothing else is edited.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import hashlib
import importlib
import importlib.util
import inspect
import pkgutil
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import TypeVar

from sparsepretrain.errors import ConfigError

T = TypeVar("T")

PACKAGES = {
    "method": "sparsepretrain.sparsity.methods",
    "source": "sparsepretrain.data.sources",
    "task": "sparsepretrain.tasks",
    "model": "sparsepretrain.models",
    "optimizer": "sparsepretrain.optim",
    "probe": "sparsepretrain.training.probes",
    "verb": "sparsepretrain.cli",
}
"""Kind of thing -> package whose modules are the built-ins of that kind."""

MOST_LISTED = 16
"""Names in a message; more make it unreadable."""

_registered: dict[str, dict[str, type]] = {kind: {} for kind in PACKAGES}
named_plugins: set[str] = set()
"""Plugins that a command line or a configuration of the user named, once they are imported."""


def register(kind: str, name: str) -> Callable[[type[T]], type[T]]:
    """Return a class decorator that makes the class available as ``name`` of ``kind``.

    Raises:
        ConfigError: another class already has that name (a plugin cannot replace a built-in),
            ``kind`` is none, or the class lacks a method of its contract.
    """
    if kind not in PACKAGES:
        raise ConfigError(f"there is no kind {kind!r}{suggestion(kind, PACKAGES)}")

    def decorate(cls: type[T]) -> type[T]:
        known = _registered[kind].get(name, cls)
        same = (known.__module__, known.__qualname__) == (cls.__module__, cls.__qualname__)
        if not same or cls.__module__ != built_in(kind).get(name, cls.__module__):
            raise ConfigError(f"{kind} {name!r} exists already; choose another name")
        if missing := sorted(getattr(cls, "__abstractmethods__", ())):
            raise ConfigError(f"{place(cls)}: class {cls.__name__} lacks {', '.join(missing)}")
        _registered[kind][name] = cls
        return cls

    return decorate


def names(kind: str) -> list[str]:
    """All names of ``kind``, built-in and plugin, sorted."""
    return sorted({*built_in(kind), *_registered[kind]})


def get(kind: str, name: str) -> type:
    """The class registered as ``name`` of ``kind``; imports its module on first use.

    Raises:
        ConfigError: unknown name, with the nearest known one.
    """
    if name not in _registered[kind] and (module := built_in(kind).get(name)):
        importlib.import_module(module)
    if name not in _registered[kind]:
        raise ConfigError(f"unknown {kind} {name!r}{suggestion(name, names(kind))}")
    return _registered[kind][name]


def options_of(kind: str, name: str) -> type:
    """The dataclass ``Options`` of the class registered as ``name`` of ``kind``.

    Raises:
        ConfigError: unknown name, or a plugin's class without it; names the file and the line.
    """
    cls = get(kind, name)
    options = getattr(cls, "Options", None)
    if not isinstance(options, type) or not dataclasses.is_dataclass(options):
        raise ConfigError(f"{place(cls)}: class {cls.__name__} has no dataclass 'Options'")
    return options


def place(cls: type) -> str:
    """``file.py, line 3``: where a class stands."""
    return f"{inspect.getsourcefile(cls)}, line {inspect.getsourcelines(cls)[1]}"


def suggestion(word: str, known: Iterable[str], prefix: str = "", *, listing: str = "") -> str:
    """`` (did you mean 'x'?)``, or the list of choices when nothing is near; case is ignored.

    ``prefix`` is put before the names in the answer only, so that a long common path does not make
    everything look near. ``listing``: see :func:`choices`.
    """
    known = list(known)
    lower = {name.lower(): name for name in known}
    # 0.5 finds every word of four letters or more with two wrong ones
    near = difflib.get_close_matches(word.lower(), lower, n=1, cutoff=0.5)
    if near:
        return f" (did you mean {prefix + lower[near[0]]!r}?)"
    return f" (choose from {choices(known, listing)})" if known else ""


def choices(known: Sequence[str], listing: str = "") -> str:
    """``known`` in a line; of very many the first, and the command ``listing`` that has all."""
    if len(known) <= MOST_LISTED:
        return ", ".join(known)
    rest = f" (`sparsepretrain {listing}` lists all {len(known)})" if listing else ""
    return f"{', '.join(known[:MOST_LISTED])}, …{rest}"


def load_plugin(plugin: str) -> None:
    """Import a plugin: a path to a ``.py`` file or the dotted name of an installed module.

    What it prints goes to stderr: the standard output may be a configuration.

    Raises:
        ConfigError: it does not exist or its import fails; names the file and the line.
    """
    try:
        with contextlib.redirect_stdout(sys.stderr):
            if plugin.endswith(".py"):
                _import_file(plugin)
            else:
                importlib.import_module(plugin)
    except (Exception, SystemExit) as error:
        text = getattr(error, "msg", None) or str(error)  # of a SyntaxError without its place
        reason = text if isinstance(error, ConfigError) else f"{type(error).__name__}: {text}"
        where = f" ({place})" if (place := origin(error)) else ""
        problem = f"plugin {plugin!r} does not import: {reason.splitlines()[0]}{where}"
        raise ConfigError(problem) from error


def _import_file(plugin: str) -> None:
    path, module_name = Path(plugin).expanduser().resolve(), _module_name(plugin)
    if module_name in sys.modules:
        return
    if not path.is_file():
        raise ConfigError("no such file")
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[module_name]
        raise


def _module_name(plugin: str) -> str:
    """Key of an imported plugin in ``sys.modules``."""
    if not plugin.endswith(".py"):
        return plugin
    path = Path(plugin).expanduser().resolve()
    digest = hashlib.sha256(str(path).encode()).hexdigest()[:8]
    return f"sparsepretrain_plugin_{path.stem}_{digest}"


def require_imported(plugins: object, source: object) -> None:
    """Refuse plugins that only a checkpoint names: to import one is to run its code.

    Args:
        plugins: ``plugins`` of the checkpoint's configuration.
        source: names the checkpoint in the error.

    Raises:
        ConfigError: a plugin was not imported before, from the command line for example.
    """
    load_plugins([])  # installed ones; their problems are reported by the check of a configuration
    names = [name for name in plugins if isinstance(name, str)] if isinstance(plugins, list) else []
    if new := [name for name in names if _module_name(name) not in sys.modules]:
        raise ConfigError(
            f"{source} names plugins, and a plugin runs code: if you trust them, add "
            f"plugins=[{','.join(new)}]"
        )


def origin(error: BaseException) -> str:
    """``file.py, line 3``: where code that is not this package's raised ``error``; else empty."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}, line {error.lineno}"
    known = (str(Path(__file__).parent), sysconfig.get_path("stdlib"), "<frozen")
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        # packages may lie below the standard library
        if "site-packages" in frame.filename or not frame.filename.startswith(known):
            return f"{frame.filename}, line {frame.lineno}"
    return ""


def load_plugins(named: object) -> list[str]:
    """Import installed plugins (entry-point group ``sparsepretrain.plugins``) and the named ones.

    Args:
        named: a list for :func:`load_plugin`; what is no list or no text is left to who checks it.

    Returns:
        The problems.
    """
    installed = [entry.module for entry in entry_points(group="sparsepretrain.plugins")]
    errors = []
    for plugin in [*installed, *(named if isinstance(named, list) else ())]:
        try:
            if isinstance(plugin, str):
                load_plugin(plugin)
                named_plugins.update({plugin} - set(installed))
        except ConfigError as error:
            errors += error.messages
    return errors


def built_in(kind: str) -> dict[str, str]:
    """Name -> module of the built-ins; ``tune-decay`` is the verb of ``tune_decay.py``."""
    # find_spec of a.b.c imports a.b: the packages' __init__ files are torch-free by rule
    spec = importlib.util.find_spec(PACKAGES[kind])
    if spec is None or spec.submodule_search_locations is None:
        return {}
    modules = [m.name for m in pkgutil.iter_modules(list(spec.submodule_search_locations))]
    return {
        module.replace("_", "-") if kind == "verb" else module: f"{PACKAGES[kind]}.{module}"
        for module in modules
        if not module.startswith("_") and module != "main"
    }
