"""Run the examples and save their outputs in examples/ (make examples)."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
PAGE = EXAMPLES / "README.md"
COMPARED = EXAMPLES / "compare_methods"
SAVED = re.compile(r"^Saved with .*$", re.MULTILINE)
OUTPUT = re.compile(r"(<!-- output of (\w+\.py) -->\n```text\n)(.*?)(```)", re.DOTALL)


def run(script: str, directory: Path) -> str:
    """Run an example in a directory, with this checkout; return what it prints."""
    command = [sys.executable, str(EXAMPLES / script)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{script} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


def versions() -> str:
    """Return the line that says what the outputs were saved with."""
    command = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    python = platform.python_version()
    return f"Saved with Python {python}, torch {metadata.version('torch')}, commit {commit}."


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        run("compare_methods.py", Path(directory))
        for file in Path(directory, "compared").glob("my_text*"):
            if file.suffix != ".html":
                shutil.copy(file, COMPARED)
        text = OUTPUT.sub(
            lambda block: block[1] + run(block[2], Path(directory)) + block[4],
            PAGE.read_text(encoding="utf-8"),
        )
        PAGE.write_text(SAVED.sub(versions(), text), encoding="utf-8")


if __name__ == "__main__":
    main()
