"""Errors that a user can cause, each with the exit code the shell sees.

Every message is one line that names the key, file or layer and says what to do.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

INTERRUPTED = 130
"""Exit code after SIGINT (128 + 2); a checkpoint was saved."""

PREEMPTED = 143
"""Exit code after SIGTERM and a clean save (128 + 15); schedulers may requeue."""


class SparsePretrainWarning(UserWarning):
    """What a run survives but its user should know; the commands print it as one line."""


@contextlib.contextmanager
def own_warnings(show: Callable[[str], None]) -> Iterator[None]:
    """Give this package's Python warnings to ``show``, one line each; others appear as ever."""
    with warnings.catch_warnings():
        before = warnings.showwarning

        def showwarning(message: Warning | str, category: type[Warning], *where: Any) -> None:
            if issubclass(category, SparsePretrainWarning):
                show(str(message))
            else:
                before(message, category, *where)

        warnings.showwarning = showwarning  # type: ignore[assignment]
        yield


def one_line(error: BaseException) -> str:
    """The text of ``error`` without line breaks."""
    return " ".join(str(error).split())


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """``error`` and what was being handled when it was raised, and so on."""
    while error is not None:
        yield error
        error = error.__context__


class SparsePretrainError(Exception):
    """Base of all errors that end a command with one line and a documented exit code."""

    exit_code = 1
    label = "error"

    @property
    def messages(self) -> list[str]:
        """What the user is told, one problem each."""
        return [str(self)]


class RankError(SparsePretrainError):
    """One of several processes stopped because another one failed.

    Args:
        exit_code: of this process.
        text: for the user; empty: the process that failed shows its error.
    """

    def __init__(self, exit_code: int, text: str = "") -> None:
        super().__init__(text)
        self.exit_code = exit_code

    @property
    def messages(self) -> list[str]:
        """None where the process that failed shows them."""
        return str(self).splitlines()


class ConfigError(SparsePretrainError, ValueError):
    """Wrong configuration or arguments: exit code 2. Carries every problem found, one per line."""

    exit_code = 2
    label = "config error"

    def __init__(self, messages: str | Sequence[str | tuple[str, str]]) -> None:
        """A message may be a pair of the option that it begins with, and the rest."""
        given = [messages] if isinstance(messages, str) else messages
        self._parts = [("", m) if isinstance(m, str) else m for m in given]
        super().__init__("\n".join(self.messages))

    @property
    def messages(self) -> list[str]:
        """With the option that each begins with."""
        return [key + text for key, text in self._parts]

    def under(self, group: str) -> ConfigError:
        """The same problems, as those of a group of the configuration."""
        parts = [(f"{group}.{key}" if key else f"{group}: ", text) for key, text in self._parts]
        return type(self)(parts)


class DataError(SparsePretrainError):
    """Missing, broken or unsuitable data: exit code 3."""

    exit_code = 3
    label = "data error"


class CheckpointError(SparsePretrainError):
    """A checkpoint that cannot be written, read or continued from: exit code 4."""

    exit_code = 4
    label = "checkpoint error"


class DivergedError(SparsePretrainError):
    """A non-finite loss or gradient stopped the run before the optimiser step: exit code 5."""

    exit_code = 5
    label = "diverged"


@contextlib.contextmanager
def needs(
    what: str, packages: str, extra: str, *, error: type[SparsePretrainError] = DataError
) -> Iterator[None]:
    """Inside, ``packages`` of an optional extra are imported; without them, an ``error``."""
    words = "the packages" if " and " in packages else "the package"
    try:
        yield
    except ImportError as missing:
        raise error(
            f"{what} needs {words} {packages}: pip install 'sparsepretrain[{extra}]'"
        ) from missing


def reason(error: BaseException) -> str:
    """Why something failed, in one line; a full disk by its name, whatever was made of it."""
    return _full_disk(error) or one_line(error)[:200] or type(error).__name__


def cannot_write(path: object, error: OSError) -> SparsePretrainError:
    """The error to raise where ``path`` could not be written; of exit code 4 on a full disk."""
    cls = CheckpointError if _full_disk(error) else SparsePretrainError
    return cls(f"cannot write {path}: {_full_disk(error) or error.strerror or error}")


def _full_disk(error: BaseException) -> str | None:
    for cause in causes(error):
        number = cause.errno if isinstance(cause, OSError) else None
        if (told := re.search(r"\(os error (\d+)\)", str(cause))) is not None:  # by safetensors
            number = int(told[1])
        if number in (errno.ENOSPC, errno.EDQUOT):
            return f"disk full ({os.strerror(number)}); free some space and start again"
    return None
