"""Helpers of tests, and the programs that tests start."""

from pathlib import Path

SUPPORT = Path(__file__).parent
TESTS = SUPPORT.parent
ROOT = TESTS.parent
"""Checkout."""
