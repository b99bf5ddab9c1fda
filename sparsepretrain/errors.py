"""User-facing errors and their exit codes.

Every message is one line with the key, file or layer and a remedy.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import re
import textwrap
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

INTERRUPTED = 130
"""Exit code after SIGINT (128 + 2); a checkpoint was saved, if a step was taken."""

PREEMPTED = 143
"""Exit code after SIGTERM (128 + 15) and a save, if a step was taken; may be requeued."""

Problems = Iterator[tuple[str, str]]
"""Invalid options as (key, message)."""


class SparsePretrainWarning(UserWarning):
    """Warning of this package; commands print it as one line."""


@functools.cache
def warn_once(message: str) -> None:
    """Issue a warning of this package, unless it was issued before."""
    warnings.warn(message, SparsePretrainWarning, stacklevel=3)


@contextlib.contextmanager
def own_warnings(show: Callable[[str], None]) -> Iterator[None]:
    """Pass this package's warnings to ``show``, one line each; others are unaffected."""
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
    """Return the text of ``error`` without line breaks."""
    return " ".join(str(error).split())


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield ``error`` and its chain of contexts."""
    while error is not None:
        yield error
        error = error.__context__


class SparsePretrainError(Exception):
    """Base of all errors that end a command with one line and a documented exit code."""

    exit_code = 1
    label = "error"

    @property
    def messages(self) -> list[str]:
        """Messages for the user, one per problem."""
        return [str(self)]


class RankError(SparsePretrainError):
    """A rank stopped because another one failed.

    Args:
        exit_code: exit code of this rank.
        text: message for the user; empty if the failed rank shows its error.
    """

    def __init__(self, exit_code: int, text: str = "") -> None:
        super().__init__(text)
        self.exit_code = exit_code

    @property
    def messages(self) -> list[str]:
        """Messages, none if the failed rank shows them."""
        return str(self).splitlines()


class ConfigError(SparsePretrainError, ValueError):
    """Wrong configuration or arguments: exit code 2. Carries every problem found, one per line."""

    exit_code = 2
    label = "config error"

    def __init__(self, messages: str | Sequence[str | tuple[str, str]]) -> None:
        """Take messages, each a text or a pair (option, text)."""
        several = [messages] if isinstance(messages, str) else messages
        self._parts = [("", m) if isinstance(m, str) else m for m in several]
        super().__init__("\n".join(self.messages))

    @property
    def messages(self) -> list[str]:
        """Messages, each starting with its option."""
        return [key + text for key, text in self._parts]

    def under(self, group: str) -> ConfigError:
        """Return the same problems with options prefixed by a configuration group."""
        parts = [(f"{group}.{key}" if key else f"{group}: ", text) for key, text in self._parts]
        return type(self)(parts)


class DataError(SparsePretrainError):
    """Missing, broken or unsuitable data: exit code 3."""

    exit_code = 3
    label = "data error"


class CheckpointError(SparsePretrainError):
    """A checkpoint that cannot be written, read or resumed from: exit code 4."""

    exit_code = 4
    label = "checkpoint error"


class DivergedError(SparsePretrainError):
    """A non-finite loss or gradient stopped the run before the optimizer step: exit code 5."""

    exit_code = 5
    label = "diverged"


@contextlib.contextmanager
def needs(
    what: str, packages: str, extra: str, *, error: type[SparsePretrainError] = DataError
) -> Iterator[None]:
    """Convert an ImportError of an optional extra's ``packages`` to ``error``."""
    words = "the packages" if " and " in packages else "the package"
    try:
        yield
    except ImportError as missing:
        raise error(
            f"{what} needs {words} {packages}: pip install 'sparsepretrain[{extra}]'"
        ) from missing


def reason(error: BaseException) -> str:
    """One-line reason of a failure; detects a full disk even when wrapped."""
    text = textwrap.shorten(one_line(error), 200, placeholder=" …")
    return _full_disk(error) or text or type(error).__name__


UNFIT = (
    errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.EACCES, errno.EPERM,
    errno.EROFS, errno.ENAMETOOLONG, errno.ELOOP,
)  # fmt: skip
"""Errors of a path at which nothing can be written."""


def cannot_write(path: object, error: OSError) -> SparsePretrainError:
    """Return the error for a failed write to ``path``.

    Its exit code is 4 on a full disk, 2 if nothing can be written there, and 1 for other failures.
    """
    text = f"cannot write {path}: "
    if full := _full_disk(error):
        return CheckpointError(text + full)
    if error.errno in UNFIT:
        return ConfigError(f"{text}{error.strerror}: choose another place")
    return SparsePretrainError(text + (error.strerror or str(error)))


def _full_disk(error: BaseException) -> str | None:
    for cause in causes(error):
        number = cause.errno if isinstance(cause, OSError) else None
        if (match := re.search(r"\(os error (\d+)\)", str(cause))) is not None:  # safetensors
            number = int(match[1])
        if number in (errno.ENOSPC, errno.EDQUOT):
            return f"disk full ({os.strerror(number)}); free some space and start again"
    return None
