"""The ``sparsepretrain`` command: dispatch to a verb; errors become lines and exit codes."""

from __future__ import annotations

import argparse
import contextlib
import errno
import os
import select
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

from sparsepretrain import __version__, processes, registry
from sparsepretrain.cli._verb import ConfiguredVerb, UsageError, Verb
from sparsepretrain.errors import (
    INTERRUPTED,
    CheckpointError,
    ConfigError,
    SparsePretrainError,
    causes,
    own_warnings,
)
from sparsepretrain.processes import rank, report

HELP = """\
usage: sparsepretrain VERB [arguments]   (sparsepretrain VERB --help says more)

Pre-train 2:4 and N:M sparse networks.

{verbs}

examples:
  sparsepretrain train                                     gpt2_nano with S-STE: offline, minutes
  sparsepretrain train sparsity=srste sparsity.decay=1e-4 seed=1
  sparsepretrain train model=gpt2_124m sparsity=sste --dry-run
  sparsepretrain train -m sparsity=ste,sste seed=0,1       several runs, here or on a cluster
  sparsepretrain train --config-dir my_configs plugins=[my_method.py] sparsity=mine
  sparsepretrain --help plugins=[my_verb.py]                your own verb
exit codes:
  0 done, 1 a cell of a table failed or an unexpected error, 2 config, 3 data, 4 checkpoint,
  5 diverged, 130 interrupted, 143 preempted after a save
"""

ORDER = ("train", "finetune", "eval", "export", "reproduce", "report", "prepare")
"""Verbs in the order in which people need them; others follow by name."""

WORKER = "__worker"
"""Hidden verb of processes started by ``sparsepretrain.training.launch``."""


class Parser(argparse.ArgumentParser):
    """argparse with one-line errors and suggestions for mistyped flags."""

    def error(self, message: str) -> NoReturn:
        """Raise instead of printing the usage and exiting."""
        raise UsageError(message)

    def read(self, argv: Sequence[str]) -> argparse.Namespace:
        """Parse flags and positionals in any order."""
        flags = [flag for action in self._actions for flag in action.option_strings]
        for word in argv:
            flag = word.partition("=")[0]
            if word in ("-m", "--multirun") and word not in flags:
                raise UsageError(f"{word!r}: `sparsepretrain train -m KEY=A,B` trains several runs")
            if word.startswith("--") and flag != "--" and flag not in flags:
                raise UsageError(f"unknown flag {flag!r}{registry.suggestion(flag, flags)}")
        return self.parse_intermixed_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit code; user errors are one line each."""
    if argv is None and "_ARGCOMPLETE" in os.environ:
        from sparsepretrain.cli._completion import complete

        return complete(parser)
    if argv is None and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, processes.interrupt)  # not for callers from Python
    argv = list(sys.argv[1:] if argv is None else argv)
    if sys.flags.optimize > 1:  # transformers reads docstrings when it is imported
        _complain("usage error: Python runs without docstrings (-OO, PYTHONOPTIMIZE=2): unset that")
        return UsageError.exit_code
    # before torch loads OpenMP: spinning threads slow a run on a busy machine up to twenty times
    # and gain nothing on an idle one
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # an ASCII terminal shows ? for ᵀ
    try:
        with own_warnings(lambda line: _complain(f"warning: {line}")):
            code = _dispatch(argv)
        print(end="", flush=True)
        return code
    except SparsePretrainError as error:
        # this package's launcher shows reported errors; torchrun buries them
        if not report(error) or (rank() == 0 and argv[:1] != [WORKER]):
            for line in error.messages:
                _complain(f"{error.label}: {line}")
        return error.exit_code
    except SystemExit as stop:  # raised by a plug-in
        origin = registry.origin(stop) or "some code"
        _complain(f"error: {origin} called sys.exit({stop.code!r}), which ended the command")
        return 1
    except BrokenPipeError:
        if not _stdout_is_closed():
            raise
        return 0
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        _silence_stdout()
        _complain(f"error: disk full: cannot write {error.filename or 'the output'}")
        return CheckpointError.exit_code
    except (Exception, KeyboardInterrupt) as error:
        # Argparse and OmegaConf can turn an interrupt into an error of their own, and numpy fails
        # later if its import was interrupted: an error after Ctrl-C counts as the interrupt.
        is_interrupt = any(isinstance(cause, KeyboardInterrupt) for cause in causes(error))
        if not (is_interrupt or processes.interrupted):
            report(error)
            raise
        _complain("interrupted")
        exec("")  # CPython dies of SIGINT if the last executed string was interrupted
        return INTERRUPTED


def parser(name: str) -> Parser:
    """Return the argument parser of a verb."""
    verb = _verb(name)
    made = Parser(prog=f"sparsepretrain {name}", description=verb.summary, allow_abbrev=False)
    verb.add_arguments(made)
    return made


def _dispatch(argv: list[str]) -> int:
    if argv[:1] == [WORKER]:
        from sparsepretrain.training.launch import work

        return work(*argv[1:])
    plugins = [word for word in argv if word.startswith("plugins=")]
    at = next((i for i, word in enumerate(argv) if word not in plugins), len(argv))
    name = argv[at] if at < len(argv) else ""
    rest = argv[at + 1 :] + argv[:at]
    if name in ("-V", "--version"):
        print(f"sparsepretrain {__version__}")
        return 0
    if name in ("", "-h", "--help", "help"):
        for problem in _load_plugins(plugins):
            _complain(f"warning: {problem}")
        print(_help(), end="")
        return 0 if name else UsageError.exit_code
    built_in = name in registry.built_in("verb")
    if not built_in and (problems := _load_plugins(plugins)):
        raise ConfigError(problems)
    if name not in registry.names("verb"):
        hint = registry.suggestion(name, registry.names("verb"))
        if "=" in name:
            hint = f" (did you mean 'sparsepretrain train {name}'?)"
        raise UsageError(f"unknown verb {name!r}{hint}")
    verb = _verb(name)
    if plugins and not isinstance(verb, ConfiguredVerb):  # else part of the configuration
        if problems := _load_plugins(plugins):
            raise ConfigError(problems)
        rest = [word for word in rest if word not in plugins]
    try:
        args = parser(name).read(rest)
    except SystemExit as stop:  # argparse ends --help this way
        return int(stop.code or 0)
    return verb.run(args)


def _verb(name: str) -> Verb:
    verb = registry.get("verb", name)
    if not issubclass(verb, Verb):
        raise ConfigError(f"{registry.location(verb)}: class {verb.__name__} is not a Verb")
    return verb()


def _load_plugins(words: list[str]) -> list[str]:
    """Import installed plug-ins and ``plugins=[…]``; return the problems."""
    if not words:
        return registry.load_plugins([])
    from sparsepretrain.config.compose import read

    request = read(words)
    return request.errors or registry.load_plugins(request.values[-1][1])


def _help() -> str:
    names = sorted(registry.names("verb"), key=lambda name: (*ORDER, name).index(name))
    verbs = {name: _verb(name) for name in names}
    width = max(map(len, verbs)) + 2
    lines = [f"  {name:<{width}}{verb.summary}" for name, verb in verbs.items()]
    return HELP.format(verbs="\n".join(lines))


def _complain(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # the standard error may be closed
        print(f"sparsepretrain: {' '.join(text.split())}", file=sys.stderr)


def _stdout_is_closed() -> bool:
    """Return True if the reader is gone (``| head``); then stdout is silenced."""
    output = select.poll()
    output.register(sys.stdout, 0)  # a pipe without a reader reports an error by itself
    if not output.poll(0):
        return False
    _silence_stdout()
    return True


def _silence_stdout() -> None:  # flushing the buffer at exit would fail again
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
