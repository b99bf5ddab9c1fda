"""Tests run in their own directories; one that writes into the checkout fails the session."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from support import TESTS


def run_pytest(checkout: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *words]
    command += ["-o", "pythonpath=tests", "tests"]
    return subprocess.run(command, cwd=checkout, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_a_file_left_in_the_checkout_fails_the_session(tmp_path):
    shutil.copytree(TESTS / "support", tmp_path / "tests/support")
    shutil.copy(TESTS / "conftest.py", tmp_path / "tests")
    test = tmp_path / "tests/test_writes.py"
    write = "from pathlib import Path\n\ndef test_writes():\n    ({} / 'left').touch()\n"
    test.write_text(write.format("Path.cwd()"))
    done = run_pytest(tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    test.write_text(write.format("Path(__file__).parents[1]"))
    done = run_pytest(tmp_path, "-n", "1")
    assert done.returncode == 1 and "checkout: left" in done.stdout, done.stdout + done.stderr
