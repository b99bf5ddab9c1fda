"""Run the tests behind docs/reliability.md and write what they found; ``make reliability``.

    python scripts/reliability.py            every row of tests/reliability/requirements.yaml
    python scripts/reliability.py R1 R3      only these; the others keep what was found before

``docs/reliability.json`` holds what was found, row by row, with the commit; the page is generated
from it (``scripts/generate_docs.py``). The exit code is that of pytest.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import yaml

ROOT = Path(__file__).resolve().parents[1]
REQUIREMENTS = ROOT / "tests" / "reliability" / "requirements.yaml"
FOUND = ROOT / "docs" / "reliability.json"


def main(names: list[str]) -> int:
    """Run the rows called ``names``, or all."""
    rows = yaml.safe_load(REQUIREMENTS.read_text(encoding="utf-8"))
    if unknown := set(names) - {row["id"] for row in rows}:
        raise SystemExit(f"no row is called {', '.join(sorted(unknown))}")
    rows = [row for row in rows if row.get("tests") and (not names or row["id"] in names)]
    targets = dict.fromkeys(f"tests/{target}" for row in rows for target in row["tests"])
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch) / "report.xml"
        command = [sys.executable, "-m", "pytest", f"--junitxml={report}"]
        command += ["-o", "junit_family=xunit1", *targets]
        code = subprocess.run(command, cwd=ROOT).returncode
        cases = list(ElementTree.parse(report).iter("testcase"))
    commit = _git("rev-parse", "--short=12", "HEAD")
    if _git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!docs/reliability.*"):
        commit += "-dirty"
    found = json.loads(FOUND.read_text(encoding="utf-8")) if FOUND.is_file() else {}
    for row in rows:
        own = [case for case in cases if any(_belongs(case, target) for target in row["tests"])]
        found[row["id"]] = {**_summary(own), "commit": commit}
    FOUND.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    return code


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True).stdout.strip()


def _belongs(case: ElementTree.Element, target: str) -> bool:
    file, _, function = target.partition("::")
    module = "tests." + file.removesuffix(".py").replace("/", ".")
    name = str(case.get("name")).partition("[")[0]
    return case.get("classname") == module and function in ("", name)


def _summary(cases: list[ElementTree.Element]) -> dict[str, Any]:
    """Cases, what they injected (one each unless they say otherwise), and failures."""

    def with_(*kinds: str) -> list[ElementTree.Element]:
        return [case for case in cases if any(case.find(kind) is not None for kind in kinds)]

    skipped = with_("skipped")
    reported = [node for c in cases for node in c.iterfind("properties/property[@name='reported']")]
    injected = 0
    for case in cases:
        said = case.find("properties/property[@name='injected']")
        injected += 0 if case in skipped else 1 if said is None else int(str(said.get("value")))
    return {
        "cases": len(cases) - len(skipped),
        "injected": injected,
        "failed": len(with_("failure", "error")),
        "skipped": len(skipped),
        "reported": ", ".join(str(node.get("value")) for node in reported),
    }


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
