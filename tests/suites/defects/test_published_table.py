"""docs/published_defects.md and the tests that it names stay in step."""

import ast
import re
from pathlib import Path

import pytest

from support import ROOT

PAGE = (ROOT / "docs" / "published_defects.md").read_text()
HERE = Path(__file__).parent
NAME = re.compile(r"`((?:tests/[\w/]+/)?test_\w+\.py)::(test_\w+)`")


def rows():
    """The cells of every row, without the heads of the tables."""
    lines = [line for line in PAGE.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    return [c for c in cells if c[0] != "where" and not set(c[0]) <= set("-|")]


def functions(file):
    return {
        node.name
        for node in ast.parse(file.read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }


def named(cell):
    """(file, function) of each test in a cell."""
    found = NAME.findall(cell)
    return [(ROOT / file if "/" in file else HERE / file, name) for file, name in found]


@pytest.mark.parametrize("row", rows(), ids=lambda row: f"{row[0]}: {row[1]}"[:60])
def test_every_row_names_tests_that_exist(row):
    assert len(row) == 4 and all(row), "where, defect, here, test"
    tests = named(row[3])
    assert tests and len(tests) == row[3].count("::")
    for file, name in tests:
        assert file.is_file(), file
        assert name in functions(file), f"{file.name} has no {name}"


def test_every_test_here_has_a_row():
    listed = {(file, name) for row in rows() for file, name in named(row[3])}
    assert len(rows()) >= 60
    for file in HERE.glob("test_published_*.py"):
        if file != Path(__file__):
            missing = {name for name in functions(file) if (file, name) not in listed}
            assert not missing, f"docs/published_defects.md lists no row for {sorted(missing)}"
