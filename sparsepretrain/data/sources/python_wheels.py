"""Python files of named wheels from a package index: the same bytes for every reader."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from sparsepretrain.data.source import SourceOptions, TextOptions
from sparsepretrain.data.sources._files import FileSource, TextFile
from sparsepretrain.data.sources.python_source import walk
from sparsepretrain.errors import DataError, Problems
from sparsepretrain.files import cache_directory
from sparsepretrain.registry import register

WHEEL = re.compile(r"[\w.-]+==[\w.+!]+ --hash=sha256:[0-9a-f]{64}")
"""A line of pip's requirements files, with one hash."""

WAIT_S = 600
"""Longest download of a wheel, seconds."""


@dataclass(slots=True, kw_only=True)
class Options(TextOptions):
    """Options of ``source: python_wheels``."""

    wheels: list[str]

    def problems(self) -> Problems:
        yield from TextOptions.problems(self)
        if not self.wheels:
            yield "wheels", "must name at least one wheel"
        for line in self.wheels:
            if WHEEL.fullmatch(line) is None:
                yield "wheels", f"must have lines NAME==VERSION --hash=sha256:DIGEST, got {line!r}"


@register("source", "python_wheels")
class PythonWheels(FileSource):
    """All .py files of wheels that pip downloads, checked against their SHA-256.

    The files are unpacked into the cache directory, a directory per digest, and never run.
    """

    Options: ClassVar[type[SourceOptions]] = Options

    @property
    def offline(self) -> bool:  # type: ignore[override]
        """True if all wheels are in the cache directory."""
        return all(_directory(digest).is_dir() for _, digest in self._wheels())

    def state(self) -> list[Any]:
        # the digests say everything, also before the first download
        return [digest for _, digest in self._wheels()]

    def find(self) -> list[TextFile]:
        files: list[TextFile] = []
        for line, digest in self._wheels():
            directory = _directory(digest)
            if not directory.is_dir():
                _fetch(line, directory)
            files.extend(walk(str(directory)))
        return files

    def missing(self) -> str:
        return f"{super().missing()} (downloads {len(self.options.wheels)} wheels with pip)"

    def _wheels(self) -> list[tuple[str, str]]:
        return [(line, line.rpartition(":")[2]) for line in self.options.wheels]


def _directory(digest: str) -> Path:
    return cache_directory() / "wheels" / digest[:16]


def _fetch(line: str, directory: Path) -> None:
    """Download a wheel and unpack its Python files into ``directory``."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory.parent) as scratch:
        wheel = _download(line, Path(scratch, "wheel"))
        unpacked = Path(scratch, "unpacked")
        try:
            with zipfile.ZipFile(wheel) as archive:
                names = [name for name in archive.namelist() if name.endswith(".py")]
                archive.extractall(unpacked, names)  # leaves out absolute paths and ".."
        except zipfile.BadZipFile as error:
            raise DataError(f"data.wheels: {line}: {wheel.name} is no wheel: {error}") from error
        if not names:
            raise DataError(f"data.wheels: {line}: the wheel has no .py file")
        if not directory.is_dir():  # another process may have been faster
            os.replace(unpacked, directory)


def _download(line: str, directory: Path) -> Path:
    """Return the file that pip downloads and compares with the hash.

    pip knows the user's index, proxy and certificates.
    """
    directory.mkdir()
    requirements = directory / "requirements.txt"
    requirements.write_text(f"{line}\n", encoding="utf-8")
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--only-binary=:all:",
    ]
    command += ["--require-hashes", "--dest", str(directory), "--requirement", str(requirements)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S)
    except subprocess.TimeoutExpired:
        raise DataError(f"data.wheels: {line}: pip has not ended after {WAIT_S} s") from None
    wheels = [*directory.glob("*.whl")]
    if done.returncode or len(wheels) != 1:
        said = [text for text in done.stderr.splitlines() if text.startswith("ERROR")]
        why = said[-1] if said else f"pip ended with exit code {done.returncode}"
        raise DataError(f"data.wheels: {line}: {why}")
    return wheels[0]
