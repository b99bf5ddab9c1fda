"""Documentation matches the code: a page per method, all keys explained, tables up to date."""

import dataclasses
import re
import tomllib

import pytest
import yaml

from sparsepretrain import registry
from sparsepretrain.studies.results import write_record
from support.doc_pages import DOCUMENTS, ROOT, anchors, blocks, dead_links, generator, math_problems
from support.tiny_runs import composed

METHODS = list(registry.built_in("method"))
PAGES = ROOT / "docs" / "methods"
SECTIONS = "equations sources options where-paper-and-code-differ published-settings use costs"
SECTIONS = (*SECTIONS.split(), "pitfalls")
OWN_PAGES = {"README", "figures", "recipes"}
"""Pages of results that are of no table."""
each_document = pytest.mark.parametrize("file", DOCUMENTS, ids=lambda f: str(f.relative_to(ROOT)))
each_method = pytest.mark.parametrize("method", METHODS)


def test_the_files_of_the_reading_list_exist():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    section = text.partition("## Reading the code")[2].partition("\n## ")[0]
    names = re.findall(r"`([\w/]+\.py)`", section)
    assert len(names) > 20
    assert [name for name in names if not (ROOT / "sparsepretrain" / name).is_file()] == []


def page(method: str) -> str:
    return (PAGES / f"{method}.md").read_text(encoding="utf-8")


def test_every_method_has_a_page_and_every_page_a_method():
    assert {f.stem for f in PAGES.glob("*.md")} - {"README"} == set(METHODS)


@each_method
def test_a_page_has_every_section_and_table(method):
    text = page(method)
    assert text.startswith("# ") and f"(`{method}`)" in text.splitlines()[0]
    assert anchors(text) >= set(SECTIONS)
    tables = {(m["table"], m["argument"]) for m in generator.BLOCK.finditer(text)}
    assert tables == {("operands", method), ("options", method), ("costs", method)}


@each_method
def test_every_key_is_in_the_table_with_a_meaning(method):
    lines = generator.options(method, PAGES).splitlines()[2:]
    rows = [re.split(r"(?<!\\)\|", line)[1:-1] for line in lines]
    options = registry.get("method", method).Options
    keys = {key for key, _ in generator.leaves(options)} - {"name"}
    top = {f.name for f in dataclasses.fields(options)} - {"name"}
    assert {row[0].strip(" `") for row in rows} == keys
    assert {key.partition(".")[0] for key in keys} == top
    assert all(len(row) == 4 and all(cell.strip(" `") for cell in row) for row in rows), rows


@each_method
def test_the_papers_of_a_method_can_be_cited(method):
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))["references"]
    named = re.findall(r"arXiv:([\d.]+)", registry.get("method", method).paper)
    assert named or method == "dense"
    for number in named:
        (entry,) = [e for e in cited if e["url"] == f"https://arxiv.org/abs/{number}"]
        assert {"type", "title", "authors", "year"} <= set(entry)


@each_method
def test_the_readme_lists_a_method_with_its_paper_and_purpose(method):
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (row,) = re.findall(rf"^\| \[`{method}`\]\(docs/methods/{method}\.md\)(.*)$", text, re.M)
    assert len(row.split("|")) == 7 and generator.purpose_of_methods()[method] in row
    papers = re.findall(r"arXiv:([\d.]+)", registry.get("method", method).paper)
    assert all(f"https://arxiv.org/abs/{paper}" in row for paper in papers)


@each_document
def test_generated_tables_are_up_to_date(file, monkeypatch):
    monkeypatch.setattr(generator, "compose", lambda overrides: composed(*overrides))
    text = file.read_text(encoding="utf-8")
    assert generator.render(text, file) == text, "run `make docs`"
    found = list(generator.BLOCK.finditer(text))
    assert all(m["body"].strip() and "<!--" not in m["body"] for m in found), "a marker in a table"
    assert len(re.findall("^<!-- (?:generated|end)", text, re.M)) == 2 * len(found)


@each_document
def test_links_math_and_code_blocks_are_valid(file):
    text = file.read_text(encoding="utf-8")
    assert dead_links(file, text) == []
    assert math_problems(text) == []
    assert {b.language for b in blocks(file)} <= {"sh", "python", "text", "yaml"}


def test_every_page_is_reachable_from_the_index():
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    top = {f for f in DOCUMENTS if f.parent in (ROOT / "docs", ROOT) and f.name != "README.md"}
    missing = [f.name for f in top if f"{f.name})" not in index]
    assert not missing, f"docs/README.md does not link {missing}"


def test_check_reports_and_does_not_write(tmp_path, monkeypatch, capsys):
    file = tmp_path / "page.md"
    file.write_text("<!-- generated: operands ste -->\nold\n<!-- end -->\n")
    monkeypatch.setattr(generator, "documents", lambda: [file])
    monkeypatch.setattr(generator, "ROOT", tmp_path)
    assert generator.main(["--check"]) == 1 and "old" in file.read_text()
    assert generator.main([]) == 0 and "M∘W" in file.read_text() and "old" not in file.read_text()
    assert generator.main(["--check"]) == 0
    assert capsys.readouterr().out == "page.md\npage.md\n"


def test_the_index_of_results_counts_what_the_records_say(tmp_path, monkeypatch):
    record = generator.read_record(generator.RECORDS / "claims_batch.json.gz")
    monkeypatch.setattr(generator, "RECORDS", tmp_path / "tables" / "records")
    file = tmp_path / "results.md"
    compared = generator.compared("claims_batch", file)
    assert "Not run yet: `sparsepretrain reproduce claims_batch" in compared
    for cell in record.cells:  # the second claim has too few seeds left
        if cell.seed == 7 and cell.column == "512":
            cell.state, cell.metrics = "failed", {}
    write_record(record, generator.RECORDS / "claims_batch.json.gz")
    commit = record.cells[0].commit[:12]
    row = f"](tables/claims_batch.md) | 18 of 20 | {commit} | 1 | – | 1 | – |"
    assert row in generator.reports("", file)
    assert generator.unheld("", file).count("](tables/claims_batch.md) | not decided | ") == 1
    machines = generator.machines("", file)
    assert "- Seeds: 7, 8, 9, 10, 11\n- Dates: 2026" in machines and " torch 2." in machines


def test_dead_links_and_broken_math_are_found():
    for text in ("$$\n\\operatorname{sign}(x)\n$$", "text\n$$\nx\n$$\n", "costs $5"):
        assert math_problems(text)
    file = PAGES / "README.md"
    text = "# A b\n[x](ste.md) [y](nothing.md) [z](#a-b) [w](#c) [v](ste.md#nowhere) `[u](n.md)`"
    assert dead_links(file, text) == ["nothing.md", "#c", "ste.md#nowhere"]


def test_the_readme_lists_every_extra():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"].keys() - {"dev", "site"}  # for developers
    install = text.partition("## Install")[2].partition("\n## ")[0]
    assert extras == set(re.findall(r"`(\w+)`", install))
    before = " ".join(text.partition("```")[0].split())  # before the first command
    assert all(words in before for words in ("pip install .", "6.4 GB", "five minutes"))


def test_the_readme_needs_no_horizontal_scrolling():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    code = re.findall(r"^```\w*\n(.*?)^```", text, re.M | re.S)
    wide = [line for block in code for line in block.splitlines() if len(line) > 84]
    assert not wide, "wider than the text of a page at 1280 pixels"


def test_numbers_among_the_results_of_the_readme_are_on_the_page_of_sizes():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    results = text.partition("## Results")[2].partition("\n## ")[0]
    sentences = " ".join(generator.BLOCK.sub("", results).split())
    numbers = re.findall(r"\d+\.\d ± \d+\.\d", sentences)
    page = (ROOT / "results" / "scaling_lm.md").read_text(encoding="utf-8")
    missing = [number for number in numbers if f"+{number} " not in page]
    assert numbers and not missing


def test_the_readme_counts_the_published_defects():
    page = (ROOT / "docs" / "published_defects.md").read_text(encoding="utf-8")
    rows = [line for line in page.splitlines() if line.startswith("| ")]
    heads = [row for row in rows if row.startswith("| where |")]
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    assert f"lists {len(rows) - len(heads)} errors found" in readme


def test_the_version_is_the_same_everywhere():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    changes = re.findall(r"^## \[([\d.]+)\]", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert project["version"] == citation["version"] == changes[0]


def test_tables_that_decide_nothing_have_a_line_instead_of_a_page():
    pages = {file.stem for file in generator.RECORDS.parent.glob("*.md")} - OWN_PAGES
    records = generator.records()
    assert pages == {name for name, found in records.items() if generator.has_page(found)}
    lines = (generator.RECORDS.parent / "recipes.md").read_text(encoding="utf-8").splitlines()
    for name in records.keys() - pages:
        assert any(line.endswith(f"`sparsepretrain reproduce {name}` |") for line in lines)


def test_no_page_of_small_runs_prints_published_numbers():
    for file in generator.RECORDS.parent.glob("*.md"):
        text = file.read_text(encoding="utf-8")
        assert "scale nano" in text or file.stem in OWN_PAGES | {"claims_small"}
        assert "| published |" not in text and "⚠" not in text and "second-hand" not in text
