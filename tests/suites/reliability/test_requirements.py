"""The table behind docs/reliability.md names tests that are there, and every requirement."""

import pytest
import yaml

from support import TESTS

ROWS = yaml.safe_load((TESTS / "suites/reliability/requirements.yaml").read_text(encoding="utf-8"))


def test_every_requirement_has_one_row():
    names = [row["id"] for row in ROWS]
    # R33 was of a feature that is gone; numbers are not used twice
    assert names[:42] == [f"R{number}" for number in range(1, 44) if number != 33]
    assert len(names) == len(set(names))
    assert all({"id", "injected", "gate"} <= row.keys() for row in ROWS)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["id"])
def test_named_tests_exist(row):
    for target in row.get("tests", ()):
        file, _, function = target.partition("::")
        assert f"\ndef {function}" in (TESTS / file).read_text(encoding="utf-8"), target
