"""Build the documentation site from the Markdown of the repository; ``make site`` runs it.

    python scripts/make_site.py            write build/site
    python scripts/make_site.py DIRECTORY  write DIRECTORY/site

The pages are those that GitHub shows, copied to ``site-source`` under the same names. There,
formulas become MathML, and a link to another file leads to a page that shows the file: the project
has no address to link to. Pages of the API come from docstrings. Zensical then writes HTML that
loads nothing from elsewhere. A dead link, a dead anchor or any other warning is printed as one line
and fails the build.
"""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from latex2mathml.converter import convert

ROOT = Path(__file__).resolve().parents[1]
SETTINGS = ROOT / "scripts" / "site"
INDEX = ROOT / "docs" / "README.md"

FOLDERS = ("docs", "results", "examples")
"""Folders whose Markdown files are pages."""
ROOT_PAGES = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")
AS_FILES = {".png", ".csv", ".gz"}
"""Suffixes of files that are copied; other files get a page that shows them."""
LANGUAGES = {".py": "python", ".yaml": "yaml", ".cff": "yaml", ".sbatch": "sh", ".json": "json"}
"""Suffix of a file -> its language, for colors."""

CODE = re.compile(
    r"^(?P<fence>```+)[^\n`]*\n.*?^(?P=fence)$|(?P<ticks>`+)(?!`).+?(?<!`)(?P=ticks)(?!`)",
    re.MULTILINE | re.DOTALL,
)
COMMENT = re.compile(r"^<!-- .*? -->$", re.MULTILINE)
LINK = re.compile(r"\]\((?P<target>[^)\s]+)\)")
MATH = re.compile(
    r"^\$\$\n(?P<block>.*?)\n\$\$$|(?<![\w$])\$(?P<inline>[^$\n]+)\$(?![\w$])",
    re.MULTILINE | re.DOTALL,
)
ESCAPE = re.compile(r"\\([!-/:-@\[-`{-~])")
ROW = re.compile(r"^\| \[[^\]]*\]\((?P<target>[^)]+)\)", re.MULTILINE)
FRAME = re.compile(r"Warning: (?P<message>[^\n]+)\n\s*╭─\[ (?P<place>[^\]]+?) \].*?╯\n", re.DOTALL)
"""Warning of Zensical: a message, then some lines of the page in a frame."""
TRACEBACK = re.compile(r"^Traceback .*\n(?=[^\n]+\n*\Z)", re.MULTILINE | re.DOTALL)
"""Everything but the last line of an error in Zensical or a plug-in."""
EXPECTED = re.compile(r"|Build (started|finished in .*)|No issues found|\d+ issues? found")
"""Line that Zensical prints without a reason to complain."""

API = SETTINGS / "api"
"""Pages of the API, in which mkdocstrings replaces names by docstrings."""
API_ORDER = ("sparsepretrain", "sparsifier", "method", "kernels")


def main(arguments: list[str]) -> int:
    """Build the site; print what is wrong with it."""
    target = Path(arguments[0]) if arguments else ROOT / "build"
    for name in ("site-source", "site", ".cache"):
        shutil.rmtree(target / name, ignore_errors=True)
    write_sources(target)
    found = build(target)
    for line in found:
        print(line, file=sys.stderr)
    if not found:
        print(target / "site" / "index.html")
    return 1 if found else 0


# ---------------------------------------------------------------------------------------- sources


def write_sources(target: Path) -> None:
    """Write the pages and settings that Zensical reads."""
    source = target / "site-source"
    waiting = [ROOT / name for name in ROOT_PAGES]
    for folder in FOLDERS:
        waiting += sorted((ROOT / folder).rglob("*.md"))
    done: set[Path] = set()
    while waiting:
        file = waiting.pop()
        if file in done:
            continue
        done.add(file)
        new = source / name_on_site(file)
        new.parent.mkdir(parents=True, exist_ok=True)
        if file.suffix in AS_FILES:
            shutil.copyfile(file, new)
            continue
        if file.is_dir():
            text, linked = listing(file)
        elif file.suffix == ".md":
            text, linked = page(file)
        else:
            text, linked = shown(file), []
        new.write_text(text, encoding="utf-8")
        waiting += linked
    shutil.copytree(API, source / "api")
    shutil.copyfile(SETTINGS / "style.css", source / "style.css")
    write_settings(target, navigation())


def write_settings(target: Path, pages: list[object]) -> None:
    """Write the settings of Zensical."""
    text = (SETTINGS / "zensical.toml").read_text(encoding="utf-8")
    text = text.replace('"NAVIGATION"', toml(pages)).replace('"ROOT"', toml(str(ROOT)))
    text = text.replace('"ROLES"', toml(str(SETTINGS / "roles.py")))
    (target / "zensical.toml").write_text(text, encoding="utf-8")


def name_on_site(file: Path) -> str:
    """Return the path of the page of a file or a directory, relative to the site."""
    name = file.relative_to(ROOT).as_posix()
    if file.is_dir():
        return f"{name}/README.md"
    return name if file.suffix in {".md", *AS_FILES} else f"{name}.md"


def page(file: Path) -> tuple[str, list[Path]]:
    """Return the contents of a page, and the files that it links."""
    linked: list[Path] = []

    def link(found: re.Match[str]) -> str:
        address, hash_, anchor = found["target"].partition("#")
        if not address or re.match(r"[a-z]+:", address):
            return found[0]
        other = (file.parent / address).resolve()
        if not other.exists() or not other.is_relative_to(ROOT):
            return found[0]  # Zensical says that it is dead
        linked.append(other)
        return f"]({relative(other, file)}{hash_}{anchor})"

    text = file.read_text(encoding="utf-8")
    return outside_code(text, lambda part: LINK.sub(link, for_python_markdown(part))), linked


def relative(other: Path, file: Path) -> str:
    """Return the address of one page on another one."""
    return os.path.relpath(name_on_site(other), Path(name_on_site(file)).parent)


def outside_code(text: str, change: Callable[[str], str]) -> str:
    """Change what is not in a fenced block or a code span."""
    parts, end = [], 0
    for code in CODE.finditer(text):
        # a pipe in a code span is escaped for GitHub's tables only
        unescaped = code[0] if code["fence"] else code[0].replace("\\|", "|")
        parts += [change(text[end : code.start()]), unescaped]
        end = code.end()
    return "".join([*parts, change(text[end:])])


def for_python_markdown(text: str) -> str:
    """Write what GitHub reads in another way than Python-Markdown, which Zensical uses."""
    text = COMMENT.sub("", text)  # would end a list or begin a block of HTML
    parts, end = [], 0
    for formula in MATH.finditer(text):
        parts += [ESCAPE.sub(entity, text[end : formula.start()]), mathml(formula)]
        end = formula.end()
    return "".join([*parts, ESCAPE.sub(entity, text[end:])])


def entity(found: re.Match[str]) -> str:
    """Return a character as Markdown cannot read it."""
    return f"&#{ord(found[0][-1])};"


def mathml(formula: re.Match[str]) -> str:
    """Return a formula as MathML, which browsers show without a script."""
    block = formula["block"] is not None
    latex = formula["block"] or formula["inline"]
    # the converter takes the bars of |x| for operators, with space on both sides
    latex = re.sub(r"\\l[vV]ert\b", r"\\left\g<0>", latex)
    latex = re.sub(r"\\r[vV]ert\b", r"\\right\g<0>", latex)
    made = convert(latex, display="block" if block else "inline")
    made = re.sub(r"(?<=>)[^<]+", lambda text: plain(html.unescape(text[0])), made)
    if not block:
        return f'<span class="math">{made}</span>'
    # lines keep their numbers, which warnings name
    return f'<div class="math">{made}</div>' + "\n" * formula[0].count("\n")


def plain(text: str) -> str:
    """Return text in which Markdown finds nothing."""
    return re.sub(r"[^\w\s]|_", entity, text)


def shown(file: Path) -> str:
    """Return a page that shows a text file."""
    text = file.read_text(encoding="utf-8").rstrip("\n")
    return f"{unsearched(file)}````{LANGUAGES.get(file.suffix, 'text')}\n{text}\n````\n"


def listing(folder: Path) -> tuple[str, list[Path]]:
    """Return a page that lists the files below a folder."""
    files = [f for f in sorted(folder.rglob("*")) if f.is_file() and "__pycache__" not in f.parts]
    lines = [f"- [{f.relative_to(folder)}]({relative(f, folder)})\n" for f in files]
    return unsearched(folder) + "".join(lines), files


def unsearched(file: Path) -> str:
    """Return the beginning of a page that search leaves out."""
    return f"---\nsearch:\n  exclude: true\n---\n\n# {file.relative_to(ROOT)}\n\n"


# ------------------------------------------------------------------------------------- navigation


def navigation() -> list[object]:
    """Return the navigation: the sections and tables of docs/README.md, then the API."""
    sections: list[object] = []
    for section in INDEX.read_text(encoding="utf-8").split("\n## ")[1:]:
        title = section.partition("\n")[0]
        rows = [(INDEX.parent / target).resolve() for target in ROW.findall(section)]
        entries = [entry for file in rows for entry in entries_of(file)]
        if not sections:
            entries.insert(1, name_on_site(INDEX))
        sections.append({title: entries})
    return [*sections, {"API": [f"api/{name}.md" for name in API_ORDER]}]


def entries_of(file: Path) -> Iterator[object]:
    """Yield the page of a row; if it is the index of a folder, with the folder's pages."""
    name = name_on_site(file)
    if file.name != "README.md" or file.parent == ROOT:
        yield name
        return
    text = file.read_text(encoding="utf-8")
    named = [(file.parent / found["target"]).resolve() for found in LINK.finditer(text)]
    others = [*named, *sorted(file.parent.glob("*.md"))]
    pages = dict.fromkeys(f for f in others if f.parent == file.parent and f.suffix == ".md")
    pages.pop(file, None)
    title = re.search(r"^# (.+)$", text, re.MULTILINE)
    if pages and title:
        yield {title[1]: [name, *(name_on_site(other) for other in pages)]}
    else:
        yield name


def toml(value: object) -> str:
    """Return lists, strings and tables of one key as TOML."""
    if isinstance(value, list):
        return f"[{', '.join(map(toml, value))}]"
    if isinstance(value, dict):
        ((key, item),) = value.items()
        return f"{{ {json.dumps(key)} = {toml(item)} }}"
    return json.dumps(value, ensure_ascii=False)


# ------------------------------------------------------------------------------------------ build


def build(target: Path) -> list[str]:
    """Run Zensical; return a line per warning or error."""
    command = [sys.executable, "-m", "zensical", "build", "--config-file", "zensical.toml"]
    done = subprocess.run(command, cwd=target, capture_output=True, text=True, check=False)
    output = re.sub(r"\x1b\[[\d;]*m", "", done.stdout + done.stderr)
    output = FRAME.sub(r"\g<place>: \g<message>\n", output)
    output = TRACEBACK.sub("", output)
    found = [line for line in output.splitlines() if not EXPECTED.fullmatch(line)]
    if done.returncode and not found:
        found = [f"zensical ended with exit code {done.returncode}"]
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
