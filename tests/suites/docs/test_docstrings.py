"""Docstrings stand alone: they start with a verb or a noun, not with a word that needs context."""

import ast

from support import ROOT

PACKAGE = ROOT / "sparsepretrain"
UNFIT = {"what", "whether", "of", "how", "as", "why", "which"}
UNFIT |= {"those", "who", "where", "inside", "so"}
MOST = 0.01
"""Share of docstrings that may start with one of these."""


def test_docstrings_start_with_words_that_stand_alone():
    trees = [ast.parse(file.read_text(encoding="utf-8")) for file in PACKAGE.rglob("*.py")]
    expressions = [n.value for t in trees for n in ast.walk(t) if isinstance(n, ast.Expr)]
    constants = [e.value for e in expressions if isinstance(e, ast.Constant)]
    found = [value for value in constants if isinstance(value, str)]
    unfit = [text for text in found if text.split()[0].strip("`:,.").lower() in UNFIT]
    assert len(found) > 2000
    assert len(unfit) <= MOST * len(found), unfit
