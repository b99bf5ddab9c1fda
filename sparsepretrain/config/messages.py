"""What third parties' errors are called here: one line that says where and what to do."""

from __future__ import annotations

import re


def syntax(text: str) -> str:
    """What to say of an override that Hydra's grammar cannot read."""
    if "=" not in text:
        return f"override {text!r} has no value; write {text or 'key'}=value"
    key, _, _ = text.partition("=")
    shown = text if len(text) <= 60 else text[:57] + "..."
    if not re.fullmatch(r"[+~]*[A-Za-z_]\w*([./@][A-Za-z_]\w*)*", key):
        return f"override {shown!r}: {key!r} is not a key; write a.b.c=value"
    return (
        f"override {shown!r} cannot be read: close every bracket and quote, and put a value with "
        f"special characters in quotes: {key}='\"…\"'"
    )


def yaml_problem(error: Exception) -> str:
    """File, line and problem of a YAML error."""
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    if mark is None:
        return f"YAML error: {one_line(error)}"
    problem = getattr(error, "problem", None) or getattr(error, "context", None)
    return f"{mark.name}:{mark.line + 1}: YAML error: {problem}"


def one_line(error: BaseException) -> str:
    """The text of ``error`` without line breaks."""
    return " ".join(str(error).split())
