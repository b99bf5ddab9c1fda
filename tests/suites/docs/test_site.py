"""The site shows what GitHub shows, has the API, and loads nothing from elsewhere."""

import html
import importlib.util
import json
import re
from collections import Counter
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

from support import ROOT
from support.doc_pages import DOCUMENTS

for package in ("zensical", "mkdocstrings", "latex2mathml"):
    pytest.importorskip(package, reason="needs the extra `site`, which `dev` contains")

spec = importlib.util.spec_from_file_location("make_site", ROOT / "scripts/make_site.py")
assert spec is not None and spec.loader is not None
make_site = importlib.util.module_from_spec(spec)
spec.loader.exec_module(make_site)

TAGS = re.compile(r"<(h\d|li|tr|td|th|pre|blockquote|img|em|strong)\b")
LOADED = re.compile(r"""<(?:script|link|img|iframe|source)\b[^>]*?\b(?:src|href)=["']?([^"' >]+)""")
API = {
    "sparsepretrain": "sparsepretrain sparsify densify list_methods",
    "sparsifier": "sparsepretrain.Sparsifier attach metrics state_dict",
    "kernels": "sparsepretrain.kernels nm_mask mvue pack_rows",
    "method": "sparsepretrain.sparsity.method Method.project MethodOptions.patterns Projection",
}
"""Page -> the module or class and some names that it has."""


def test_the_site_is_built_without_a_warning(tmp_path, capfd):
    # one test, because a build takes longer than all that is read in it
    assert make_site.main([str(tmp_path)]) == 0
    assert capfd.readouterr().err == ""
    site = tmp_path / "site"
    for file in DOCUMENTS:
        assert_same_as_on_github(file, site)
    for name, described in API.items():
        prefix, *names = described.split()
        page = article(site / f"api/{name}.html")
        assert [n for n in names if f'id="{prefix}.{n}"' not in page] == []
        assert not re.search(r":\w+:`|``|<autoref", page), "a role or code that is not converted"
    assert "Elements kept of every m." in (site / "api/method.html").read_text()  # of a field
    assert_nothing_is_loaded_from_elsewhere(site)
    # files without a page on GitHub's side have one here
    assert 'href="../configs/model/gpt2_nano.yaml.html"' in (site / "docs/tasks.html").read_text()
    assert "n_layer" in article(site / "configs/model/gpt2_nano.yaml.html")
    found = json.loads((site / "search.json").read_text())["items"]
    folders = {item["location"].partition("/")[0] for item in found}
    assert {"docs", "results", "api"} <= folders and "configs" not in folders


def article(file: Path) -> str:
    """Return what a page shows, without navigation."""
    found = re.search(r"<article.*</article>", file.read_text(encoding="utf-8"), re.DOTALL)
    assert found is not None
    return re.sub(r'<a class="headerlink".*?</a>', "", found[0])


def assert_same_as_on_github(file: Path, site: Path) -> None:
    """Compare text, without formulas, and the number of headings, rows, items, ...."""
    source = make_site.outside_code(
        file.read_text(encoding="utf-8"), lambda part: make_site.MATH.sub("", part)
    )
    expected = MarkdownIt("commonmark").enable(["table", "strikethrough"]).render(source)
    name = make_site.name_on_site(file).replace("README.md", "index.md")
    shown = article((site / name).with_suffix(".html"))
    shown = re.sub(r"<math.*?</math>", "", shown, flags=re.DOTALL)
    assert words(shown) == words(expected), name
    assert Counter(TAGS.findall(shown)) == Counter(TAGS.findall(expected)), name


def words(markup: str) -> str:
    text = re.sub(r"<[^>]+>", "", markup)
    return re.sub(r"\s+", "", html.unescape(text))


def assert_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    for page in site.rglob("*.html"):
        loaded = LOADED.findall(page.read_text(encoding="utf-8"))
        assert loaded and [a for a in loaded if re.match(r"(\w+:)?//", a)] == [], page
    for style in site.rglob("*.css"):
        assert not re.search(r"(url\(|@import)[\"' ]*(\w+:)?//", style.read_text(encoding="utf-8"))


def test_a_dead_link_a_dead_anchor_and_a_wrong_docstring_are_one_line_each(tmp_path):
    source = tmp_path / "site-source"
    source.mkdir()
    (source / "README.md").write_text("# A b\n\n[x](#a-b) [y](no.md)\n[z](#a_b)\n")
    (source / "api.md").write_text("# C\n\n::: sparsepretrain.nothing\n")
    make_site.write_settings(tmp_path, ["README.md", "api.md"])
    found = make_site.build(tmp_path)
    assert "README.md:3:15: page does not exist" in found
    assert "README.md:4:6: anchor does not exist" in found
    assert "mkdocstrings: sparsepretrain.nothing could not be found" in found
    assert len(found) == 4, found  # the last one is the error that Python ended with


def test_formulas_keep_their_lines_and_have_no_markdown():
    text = "a $x_i$ b\n\n$$\n\\lvert y\\rvert\n$$\n\n[c](d.md) \\* `$z$ \\|`\n"
    made = make_site.outside_code(text, make_site.for_python_markdown)
    assert made.count("\n") == text.count("\n")
    assert "<msub><mi>x</mi><mi>i</mi></msub>" in made and 'form="prefix"' in made
    assert made.endswith("[c](d.md) &#42; `$z$ |`\n")
