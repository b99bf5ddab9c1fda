"""Completion of the command in bash and zsh with argcomplete: verbs, flags, groups, keys and paths.

``eval "$(register-python-argcomplete sparsepretrain)"`` lets a shell call the command on every
press of Tab. Nothing here imports torch, Hydra or plug-ins.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, get_type_hints

from sparsepretrain import registry
from sparsepretrain.cli._keys import Merge, Values, declared_values, values_of
from sparsepretrain.config.places import TABLES, catalog, search_path
from sparsepretrain.config.schema import Run

Parsers = Callable[[str], argparse.ArgumentParser]
"""Function from the name of a verb to its parser."""

MULTIRUN = ("-m", "--multirun")
"""Flags with which a key takes several values, separated by commas."""

HEAD_FLAGS = {"--help": "list the verbs", "--version": "print the version"}
"""Flags in front of a verb."""

PATHS = {"path", "resume", "runs_dir", "out", "root", "tokenizer"}
"""Last parts of keys whose value is a file or a directory."""

PATH_LISTS = {"files", "data_files", "plugins", "roots"}
"""Last parts of keys whose value is a list of files or directories."""

SPLITS = {"train", "validation", "test"}
"""Last parts of keys whose value may be a list of files."""

DIRECTORIES = {"resume", "runs_dir", "init.path", "init.mask", "model.path", "teacher.path"}
"""Keys whose value is a directory."""

VALUE = re.compile(r"(?P<head>.*[\[,]\s*|)(?P<quote>['\"]?)(?P<part>[^'\"]*)", re.DOTALL)
"""Value of a key up to the cursor: items of a list before the last one, and the last one."""


def complete(parsers: Parsers) -> int:
    """Answer a shell that asks for completions, and end this process.

    Returns:
        1 if argcomplete is not installed; nothing is completed then.
    """
    try:
        import argcomplete
    except ImportError:
        return 1
    # Flags and positionals may alternate, which argcomplete's use of argparse cannot follow: this
    # parser takes every word as a positional. NUL cannot be part of a command line.
    parser = argparse.ArgumentParser(prefix_chars="\0", add_help=False)
    words: Any = parser.add_argument("words", nargs="*")
    words.completer = lambda prefix, parsed_args, **_: _quiet(parsed_args.words, prefix, parsers)
    argcomplete.autocomplete(parser)
    return 1


def _quiet(words: Sequence[str], prefix: str, parsers: Parsers) -> Mapping[str, str]:
    """Return no candidates after an error: its text would land in the line that a user types."""
    try:
        return candidates(words or (), prefix, parsers)
    except Exception:
        if "_ARC_DEBUG" in os.environ:
            raise
        return {}


def candidates(words: Sequence[str], prefix: str, parsers: Parsers) -> Mapping[str, str]:
    """Return candidates for a word of a command line -> their descriptions.

    Args:
        words: finished words after ``sparsepretrain``.
        prefix: characters of the word before the cursor.
        parsers: returns the parser of a verb.
    """
    words = [word for word in words if not word.startswith("plugins=")]
    if not words:
        return _starting(prefix, _verbs() | HEAD_FLAGS)
    verb, *rest = words
    if verb not in registry.built_in("verb"):
        return {}
    return Line.of(parsers(verb), verb, rest).candidates(prefix)


def _verbs() -> dict[str, str]:
    names = sorted(registry.built_in("verb"))
    return {name: getattr(registry.get("verb", name), "summary", "") for name in names}


@dataclass(slots=True)
class Line:
    """Words of a command line after the verb."""

    parser: argparse.ArgumentParser
    verb: str
    words: list[str]
    """Positionals before the cursor."""
    pending: argparse.Action | None = None
    """Flag before the cursor that takes the word at the cursor."""
    config_dirs: tuple[Path, ...] = ()
    is_multirun: bool = False

    @classmethod
    def of(cls, parser: argparse.ArgumentParser, verb: str, words: Iterable[str]) -> Line:
        """Sort words into flags and positionals."""
        line = cls(parser, verb, [])
        for word in words:
            if line.pending is not None:
                line._note(line.pending, word)
                line.pending = None
                continue
            flag, equals, value = word.partition("=")
            action = line._flag(flag)
            if action is None:
                line.is_multirun |= word in MULTIRUN
                line.words += [] if word.startswith("-") else [word]
            elif equals:
                line._note(action, value)
            else:
                line.is_multirun |= flag in MULTIRUN
                line.pending = action if action.nargs is None else None
        return line

    def _flag(self, word: str) -> argparse.Action | None:
        actions = self.parser._actions
        return next((action for action in actions if word in action.option_strings), None)

    def _note(self, action: argparse.Action, value: str) -> None:
        if action.dest == "config_dir":
            self.config_dirs += (Path(value).expanduser(),)

    def candidates(self, prefix: str) -> Mapping[str, str]:
        """Return candidates for the word that starts with ``prefix`` -> their descriptions."""
        if self.pending is not None:
            return dict.fromkeys(self._argument(self.pending, prefix), "")
        flag, equals, value = prefix.partition("=")
        if prefix.startswith("-"):
            if equals:
                action = self._flag(flag)
                found = self._argument(action, value) if action is not None else ()
                return {f"{flag}={text}": "" for text in found}
            return _starting(prefix, self._flags())
        positionals = [action for action in self.parser._actions if not action.option_strings]
        found = []
        if positionals:
            at = positionals[min(len(self.words), len(positionals) - 1)]
            is_full = at.nargs in (None, "?") and len(self.words) >= len(positionals)
            found = [] if is_full else [*self._argument(at, prefix)]
        if not prefix and not any(word.endswith("/") for word in found):
            return self._flags() | dict.fromkeys(found, "")
        return dict.fromkeys(found, "")

    def _flags(self) -> dict[str, str]:
        return {
            flag: (action.help or "").replace("%%", "%")
            for action in self.parser._actions
            for flag in action.option_strings
            if flag.startswith("--") or len(action.option_strings) == 1
        }

    def _argument(self, action: argparse.Action, prefix: str) -> Iterable[str]:
        """Return values of an argument; its kind is known from the name that ``--help`` shows."""
        if action.choices is not None:
            return [str(choice) for choice in action.choices if str(choice).startswith(prefix)]
        match action.metavar:
            case "KEY=VALUE":
                return self._overrides(prefix)
            case "GROUP=OPTION":
                return self._options(prefix, "", catalog(self.config_dirs))
            case "TABLE":
                return self._tables(prefix)
            case "METHOD":
                return [name for name in registry.names("pruning") if name.startswith(prefix)]
            case "RUN|TABLE":
                if not self.words:
                    return [*self._tables(prefix), *paths(prefix, directories=True)]
                if self.words[0] in self._tables(self.words[0]):
                    return self._overrides(prefix)
                return paths(prefix, directories=True)
            case "CHECKPOINT" | "RUN" | "DIR":
                return paths(prefix, directories=True)
            case "FILE":
                return paths(prefix)
        return ()

    def _tables(self, prefix: str) -> list[str]:
        files = [f for d in search_path(self.config_dirs) for f in (d / TABLES).glob("[!_.]*.yaml")]
        return sorted(file.stem for file in files if file.stem.startswith(prefix))

    def _overrides(self, prefix: str) -> list[str]:
        """Return groups, keys and values that continue ``prefix``."""
        match = re.match(r"~|\+{0,2}", prefix)
        sign = match[0] if match else ""
        word = prefix[len(sign) :]
        settings: type | None = getattr(registry.get("verb", self.verb), "settings", None)
        own = get_type_hints(settings) if settings is not None else {}
        is_configured = any(action.dest == "config_dir" for action in self.parser._actions)
        key, equals, value = word.partition("=")
        if equals and settings is not None and key in own:
            declared = declared_values(settings, [key])
            return [f"{sign}{key}={text}" for text in self._values(key, value, declared)]
        found = [f"{sign}{name}=" for name in own if f"{name}=".startswith(word)]
        if not is_configured:
            return found
        groups = catalog(self.config_dirs)
        if key in groups and equals:
            return self._options(prefix, sign, groups)
        if not equals and "." not in key:
            found += [f"{sign}{name}" for name in _roots(groups) if name.startswith(word)]
            if len(found) != 1 or not found[0].endswith("."):
                return found
            word = found[0].removeprefix(sign)
        plain = Merge(search_path(self.config_dirs), self._choices(groups)).run()
        if equals:
            values = self._values(key, value, values_of(key, plain))
            return [f"{sign}{key}={text}" for text in values]
        return [f"{sign}{name}" for name in next_parts(plain, word)]

    def _choices(self, groups: Mapping[str, Mapping[str, Path]]) -> dict[str, str]:
        """Return the options that words before the cursor choose, the last one of each group."""
        pairs = [word.lstrip("+").partition("=") for word in self.words]
        return {
            group: option.strip("'\"")
            for group, _, option in pairs
            if option.strip("'\"") in groups.get(group, ())
        }

    def _options(
        self, prefix: str, sign: str, groups: Mapping[str, Mapping[str, Path]]
    ) -> list[str]:
        """Return ``group=option``; after a comma the next option of several runs."""
        group, equals, value = prefix[len(sign) :].partition("=")
        if not equals:
            return [f"{sign}{name}=" for name in groups if name.startswith(group)]
        before, comma, part = value.rpartition(",") if self.is_multirun else ("", "", value)
        return [
            f"{sign}{group}={before}{comma}{option}"
            for option in groups.get(group, ())
            if option.startswith(part)
        ]

    def _values(self, key: str, text: str, declared: Values) -> list[str]:
        """Return values of a key that start with ``text``, within a list or quotes too."""
        match = VALUE.fullmatch(text)
        if match is None:
            return []
        head, quote, part = match.groups()
        last = key.rpartition(".")[2]
        has_files = last in PATH_LISTS or (last in SPLITS and declared.is_list)
        takes_list = has_files or declared.is_list
        if takes_list and not head:
            head = "["
        elif head and not takes_list and not self.is_multirun:
            return []
        start = head + quote
        found = [f"{start}{value}" for value in declared.listed if value.startswith(part)]
        if key == "resume":
            found += [f"{start}{value}" for value in ("auto", "never") if value.startswith(part)]
        if last in PATHS or has_files:
            only = key in DIRECTORIES
            found += [f"{start}{path}" for path in paths(part, directories=only)]
        return found


def _roots(groups: Mapping[str, Any]) -> list[str]:
    """Return keys without a dot: ``group=``, ``key=``, and ``block.`` for keys of their own."""
    hints = get_type_hints(Run)
    names = [f"{group}=" for group in groups]
    for key in fields(Run):
        if is_dataclass(hints[key.name]):
            names.append(f"{key.name}.")
        elif key.name in groups:  # experiment has no keys of its own
            names += [f"{key.name}."] if hints[key.name] in (Any, dict[str, Any]) else []
        else:
            names.append(f"{key.name}=")
    return [*names, "tracker."] if "tracker." not in names else names


def next_parts(plain: Mapping[str, Any], prefix: str) -> list[str]:
    """Return dotted keys up to the part at the cursor, ``key=`` or ``block.``.

    A block that is the only candidate is opened: shells append a space to a single word that ends
    with a dot.
    """
    head, dot, part = prefix.rpartition(".")
    block: Any = plain
    for name in head.split(".") if head else ():
        block = block.get(name) if isinstance(block, dict) else None
    if not isinstance(block, dict):
        return []
    names = [str(name) for name in block if str(name).startswith(part)]
    is_block = {name: isinstance(block.get(name), dict) and block[name] for name in names}
    found = [f"{head}{dot}{name}{'.' if is_block[name] else '='}" for name in names]
    if len(found) == 1 and found[0].endswith("."):
        return next_parts(plain, found[0])
    return found


def paths(prefix: str, *, directories: bool = False) -> list[str]:
    """Return files and directories (with a slash at the end) whose path starts with ``prefix``."""
    head, slash, part = prefix.rpartition("/")
    parent = Path(os.path.expanduser(head + slash) or ".")
    found = []
    try:
        entries = sorted(os.scandir(parent), key=lambda entry: entry.name)
    except OSError:
        return []
    for entry in entries:
        is_hidden = entry.name.startswith(".") and not part.startswith(".")
        if is_hidden or not entry.name.startswith(part):
            continue
        if entry.is_dir():
            found.append(f"{head}{slash}{entry.name}/")
        elif not directories:
            found.append(f"{head}{slash}{entry.name}")
    return found


def _starting(prefix: str, known: Mapping[str, str]) -> dict[str, str]:
    return {name: text for name, text in known.items() if name.startswith(prefix)}
