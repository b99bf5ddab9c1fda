"""Run the tests behind docs/reliability.md and record the results; ``make reliability``.

    python scripts/reliability.py            every row of tests/suites/reliability/requirements.yaml
    python scripts/reliability.py R1 R3      only these; other rows keep their results

``docs/reliability.json`` holds the results and the commit of each row; ``scripts/generate_docs.py``
generates the page from this file. The exit code is that of pytest.
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
REQUIREMENTS = ROOT / "tests" / "suites" / "reliability" / "requirements.yaml"
RESULTS = ROOT / "docs" / "reliability.json"


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
    results = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.is_file() else {}
    for row in rows:
        own = [case for case in cases if any(_belongs(case, target) for target in row["tests"])]
        if not own:  # a file that cannot be imported, or a renamed test: nothing was shown
            print(f"{row['id']}: no case ran; its earlier result stays")
            code = code or 1
            continue
        results[row["id"]] = {**_summary(own), "commit": commit}
    RESULTS.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    return code


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True).stdout.strip()


def _belongs(case: ElementTree.Element, target: str) -> bool:
    file, _, function = target.partition("::")
    module = "tests." + file.removesuffix(".py").replace("/", ".")
    name = str(case.get("name")).partition("[")[0]
    return case.get("classname") == module and function in ("", name)


def _summary(cases: list[ElementTree.Element]) -> dict[str, Any]:
    """Count cases, injected faults (one per case without the property), failures and skips."""

    def cases_with(*kinds: str) -> list[ElementTree.Element]:
        return [case for case in cases if any(case.find(kind) is not None for kind in kinds)]

    skipped = cases_with("skipped")
    reported = [node for c in cases for node in c.iterfind("properties/property[@name='reported']")]
    injected = 0
    for case in cases:
        entry = case.find("properties/property[@name='injected']")
        injected += 0 if case in skipped else 1 if entry is None else int(str(entry.get("value")))
    return {
        "cases": len(cases) - len(skipped),
        "injected": injected,
        "failed": len(cases_with("failure", "error")),
        "skipped": len(skipped),
        "reported": ", ".join(str(node.get("value")) for node in reported),
    }


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
