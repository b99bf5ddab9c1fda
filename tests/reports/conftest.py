"""Fixtures that skip drawing figures."""

from pathlib import Path

import pytest
from matplotlib.figure import Figure


@pytest.fixture
def drawn():
    """Draw figures in this test."""


@pytest.fixture
def quick_files(request, monkeypatch):
    """Do not draw figures, which takes half a second each."""
    if "drawn" not in request.fixturenames:
        monkeypatch.setattr(Figure, "savefig", lambda figure, file: Path(file).touch())
