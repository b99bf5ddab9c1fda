"""Registry of implementations by name, without importing torch.

A built-in is a module in the package of its kind: the method ``sste`` is
``sparsepretrain/sparsity/methods/sste.py``. It is imported on lookup and registers its class with
:func:`register`. Plugins (a file, a module, or an installed package with the entry-point group
``sparsepretrain.plugins``) register in the same way: a new method is one file and one YAML.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import functools
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
    "pruning": "sparsepretrain.pruning.methods",
    "verb": "sparsepretrain.cli",
}
"""Kind -> package with the built-ins of that kind."""

MOST_LISTED = 16
"""Maximum number of names listed in a message."""

_registered: dict[str, dict[str, type]] = {kind: {} for kind in PACKAGES}
named_plugins: set[str] = set()
"""Imported plugins that the user named on the command line or in a configuration."""


def register(kind: str, name: str) -> Callable[[type[T]], type[T]]:
    """Return a class decorator that registers a class as ``name`` of ``kind``.

    Raises:
        ConfigError: name in use (a plugin cannot replace a built-in), unknown kind, or a missing
            abstract method.
    """
    if kind not in PACKAGES:
        raise ConfigError(f"unknown kind {kind!r}{suggestion(kind, PACKAGES)}")

    def decorate(cls: type[T]) -> type[T]:
        known = _registered[kind].get(name, cls)
        same = (known.__module__, known.__qualname__) == (cls.__module__, cls.__qualname__)
        if not same or cls.__module__ != built_in(kind).get(name, cls.__module__):
            raise ConfigError(f"{kind} {name!r} exists already; choose another name")
        if missing := sorted(getattr(cls, "__abstractmethods__", ())):
            raise ConfigError(f"{location(cls)}: class {cls.__name__} lacks {', '.join(missing)}")
        _registered[kind][name] = cls
        return cls

    return decorate


def names(kind: str) -> list[str]:
    """Return all names of ``kind``, built-in and plugin, sorted."""
    return sorted({*built_in(kind), *_registered[kind]})


def get(kind: str, name: str) -> type:
    """Return the class registered as ``name`` of ``kind``, importing its module if necessary."""
    if name not in _registered[kind] and (module := built_in(kind).get(name)):
        importlib.import_module(module)
    if name not in _registered[kind]:
        raise ConfigError(f"unknown {kind} {name!r}{suggestion(name, names(kind))}")
    return _registered[kind][name]


def options_of(kind: str, name: str) -> type:
    """Return the dataclass ``Options`` of the class registered as ``name`` of ``kind``."""
    cls = get(kind, name)
    options = getattr(cls, "Options", None)
    if not isinstance(options, type) or not dataclasses.is_dataclass(options):
        raise ConfigError(f"{location(cls)}: class {cls.__name__} has no dataclass 'Options'")
    return options


def location(cls: type) -> str:
    """Return the location of a class as ``file.py, line 3``."""
    return f"{inspect.getsourcefile(cls)}, line {inspect.getsourcelines(cls)[1]}"


def suggestion(word: str, known: Iterable[str], prefix: str = "") -> str:
    """Return `` (did you mean 'x'?)``, or a list of choices if no name is close.

    Case is ignored. ``prefix`` is prepended in the answer only, since a long common path would make
    all names look close.
    """
    known = list(known)
    lower = {name.lower(): name for name in known}
    begun = [lower[name] for name in lower if len(word) > 2 and name.startswith(word.lower())]
    if len(begun) > 1:  # such as gpt2, which says no more than that
        return f" (choose from {choices([prefix + name for name in begun])})"
    if begun:
        return f" (did you mean {prefix + begun[0]!r}?)"
    # 0.5 finds every word of at least four letters with two wrong ones
    near = difflib.get_close_matches(word.lower(), lower, n=1, cutoff=0.5)
    if near:
        return f" (did you mean {prefix + lower[near[0]]!r}?)"
    return f" (choose from {choices(known)})" if known else ""


def choices(known: Sequence[str]) -> str:
    """Join ``known`` names, numbers in quotes; shorten long lists."""
    names = [repr(name) if name.isdigit() else name for name in known[:MOST_LISTED]]
    return ", ".join([*names, "…"] if len(known) > MOST_LISTED else names)


def load_plugin(plugin: str) -> None:
    """Import a plugin: a path to a ``.py`` file or the dotted name of an installed module.

    Its output goes to stderr, since stdout may be a configuration.
    """
    try:
        with contextlib.redirect_stdout(sys.stderr):
            if plugin.endswith(".py"):
                _import_file(plugin)
            else:
                importlib.import_module(plugin)
    except (Exception, SystemExit) as error:
        text = getattr(error, "msg", None) or str(error)  # a SyntaxError without its location
        reason = text if isinstance(error, ConfigError) else f"{type(error).__name__}: {text}"
        where = f" ({place})" if (place := origin(error)) else ""
        problem = f"plugin {plugin!r} does not import: {reason.splitlines()[0]}{where}"
        raise ConfigError(problem) from error


def _import_file(plugin: str) -> None:
    path = Path(plugin).expanduser().resolve()
    module_name = _module_name(plugin)
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
    """Return the key of a plugin in ``sys.modules``."""
    if not plugin.endswith(".py"):
        return plugin
    path = Path(plugin).expanduser().resolve()
    digest = hashlib.sha256(str(path).encode()).hexdigest()[:8]
    return f"sparsepretrain_plugin_{path.stem}_{digest}"


def require_imported(plugins: object, source: object) -> None:
    """Raise ConfigError for ``plugins`` that only the checkpoint ``source`` names.

    Importing a plugin runs its code.
    """
    load_plugins([])  # installed plugins; configuration checks report their problems
    names = [name for name in plugins if isinstance(name, str)] if isinstance(plugins, list) else []
    if new := [name for name in names if _module_name(name) not in sys.modules]:
        raise ConfigError(
            f"{source} names plugins, and a plugin runs code: if you trust them, add "
            f"plugins=[{','.join(new)}]"
        )


def origin(error: BaseException) -> str:
    """Return ``file.py, line 3`` of the foreign code that led to ``error``, or an empty string.

    The user's own files come before installed packages: W&B wraps ``sys.exit``, and an error in
    torch follows from the line that called it.
    """
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}, line {error.lineno}"
    known = (str(Path(__file__).parent), sysconfig.get_path("stdlib"), "<frozen")
    installed = ""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        place = f"{frame.filename}, line {frame.lineno}"
        if "site-packages" in frame.filename:  # may lie below the standard library
            installed = installed or place
        elif not frame.filename.startswith(known):
            return place
    return installed


def installed_plugins() -> tuple[str, ...]:
    """Return the modules of installed plugins."""
    return _plugins_on(tuple(sys.path))


@functools.cache
def _plugins_on(path: tuple[str, ...]) -> tuple[str, ...]:
    """Return the modules of installed plugins, which ``path``, that is ``sys.path``, decides.

    Kept, since reading the metadata of all distributions takes a tenth of composing.
    """
    return tuple(entry.module for entry in entry_points(group="sparsepretrain.plugins"))


def load_plugins(named: object) -> list[str]:
    """Import installed plugins and those of the list ``named``; return error messages.

    Values of wrong type are ignored here; the configuration check reports them.
    """
    installed = installed_plugins()
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
    """Return name -> module of the built-ins."""
    directory = Path(__file__).parent.joinpath(*PACKAGES[kind].split(".")[1:])
    modules = [module.name for module in pkgutil.iter_modules([str(directory)])]
    return {
        module: f"{PACKAGES[kind]}.{module}"
        for module in modules
        if not module.startswith("_") and module != "main"
    }
