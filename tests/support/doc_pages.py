"""Parse the documentation: files, fenced blocks, links, headings."""

import importlib.util
import re
import sys
import unicodedata
from pathlib import Path
from typing import NamedTuple

from support import ROOT

FENCE = re.compile(r"^(?P<fence>```+)(?P<language>[^\n`]*)\n(?P<body>.*?)^(?P=fence)$", re.M | re.S)
HEADING = re.compile(r"^#+ (.+)$", re.M)
LINK = re.compile(r"!?\[[^\]]*\]\((?P<target>[^)\s]+)\)")


# scripts/generate_docs.py is not part of the package
SCRIPT = ROOT / "scripts" / "generate_docs.py"
spec = importlib.util.spec_from_file_location("generate_docs", SCRIPT)
generator = sys.modules["generate_docs"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(generator)
DOCUMENTS = generator.documents()


class Block(NamedTuple):
    """Fenced block."""

    file: Path
    line: int
    language: str
    body: str

    @property
    def name(self) -> str:
        return f"{self.file.relative_to(ROOT)}:{self.line}"


def blocks(file: Path, language: str | None = None) -> list[Block]:
    """Return the fenced blocks of a file, in order."""
    text = file.read_text(encoding="utf-8")
    found = [
        Block(file, text.count("\n", 0, m.start()) + 1, m["language"].strip(), m["body"])
        for m in FENCE.finditer(text)
    ]
    return [block for block in found if language in (None, block.language)]


def without_code(text: str) -> str:
    """Remove fenced blocks and code spans."""
    return re.sub(r"`[^`\n]*`", "", FENCE.sub("", text))


def anchors(text: str) -> set[str]:
    """Return GitHub's fragments of the headings of a page."""
    found: set[str] = set()
    for heading in HEADING.findall(FENCE.sub("", text)):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
        kept = (c for c in words if c in " -_" or unicodedata.category(c)[0] in "LN")
        slug = "".join(kept).replace(" ", "-")
        repeated = sum(re.fullmatch(re.escape(slug) + r"(-\d+)?", a) is not None for a in found)
        found.add(f"{slug}-{repeated}" if repeated else slug)
    return found


def dead_links(file: Path, text: str) -> list[str]:
    """Return links to missing files or headings of this repository."""
    dead = []
    for link in LINK.finditer(without_code(text)):
        address, _, fragment = link["target"].partition("#")
        if re.match(r"[a-z]+:", address):
            continue  # elsewhere
        target = (file.parent / address).resolve() if address else file
        if not target.exists() or not target.is_relative_to(ROOT):
            dead.append(link["target"])
        elif fragment and target.suffix == ".md":
            page = text if target == file else target.read_text(encoding="utf-8")
            if fragment not in anchors(page):
                dead.append(link["target"])
    return dead


BLOCK, INLINE = r"^\$\$\n(?P<block>.*?)\n\$\$$", r"(?<![\w$])\$(?P<inline>[^$\n]+)\$(?![\w$])"
MATH = re.compile(f"{BLOCK}|{INLINE}", re.M | re.S)
MACROS = "operatorname|mbox|phantom|newcommand|def|require|href|style|class|unicode|label|tag"
FORBIDDEN = rf"\\({MACROS})\b"


def math_problems(text: str) -> list[str]:
    """Return formulas that GitHub renders wrong."""
    text = without_code(text)
    problems = []
    for part in MATH.finditer(text):
        formula = part["block"] or part["inline"]
        if re.search(FORBIDDEN, formula):
            problems.append(f"macro that GitHub refuses: {formula}")
        if re.search(r"\\[^A-Za-z]", formula):  # Markdown takes the backslash away
            problems.append(f"escaped punctuation: {formula}")
        if formula.count("{") != formula.count("}"):
            problems.append(f"unbalanced braces: {formula}")
        if len(re.findall(r"\\left\b", formula)) != len(re.findall(r"\\right\b", formula)):
            problems.append(f"unbalanced delimiters: {formula}")
        if re.search(r"[*<]", formula):  # emphasis, HTML: \ast and \lt mean the same
            problems.append(f"* or < in a formula: {formula}")
        if part["block"]:
            around = text[max(0, part.start() - 2) : part.start()], text[part.end() :][:2]
            if around != ("\n\n", "\n\n"):
                problems.append(f"needs an empty line before and after: {formula}")
    if "$" in MATH.sub("", text):
        problems.append("a $ that opens or closes nothing")
    return problems
