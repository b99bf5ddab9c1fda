"""The examples run, and print what examples/README.md and the page of the comparison show."""

import importlib.util
import re

import pytest

from support import ROOT

spec = importlib.util.spec_from_file_location("run_examples", ROOT / "scripts/run_examples.py")
assert spec is not None and spec.loader is not None
examples = importlib.util.module_from_spec(spec)
spec.loader.exec_module(examples)

SAVED = {
    script: output for _, script, output, _ in examples.OUTPUT.findall(examples.PAGE.read_text())
}
NUMBER = re.compile(r"[+-]?\d[\d,]*(?:\.\d+(?:e[+-]\d+)?)?")


def assert_close(output: str, saved: str) -> None:
    """Compare texts: measured numbers, which have a point, may differ by rounding elsewhere."""
    assert NUMBER.sub("#", output) == NUMBER.sub("#", saved)
    for new, old in zip(NUMBER.findall(output), NUMBER.findall(saved), strict=True):
        if "." in old:
            assert float(new) == pytest.approx(float(old), rel=0.1, abs=0.02), output
        else:
            assert new == old, output


def test_every_script_is_on_the_page():
    scripts = {file.name for file in examples.EXAMPLES.glob("*.py")}
    assert scripts == {*SAVED, "compare_methods.py"}
    assert all(output.strip() for output in SAVED.values()), "run `make examples`"


@pytest.mark.slow
@pytest.mark.parametrize("script", SAVED)
def test_an_example_prints_what_the_page_shows(script, tmp_path):
    assert_close(examples.run(script, tmp_path), SAVED[script])


@pytest.mark.slow
@pytest.mark.timeout(900)  # twenty runs
def test_the_comparison_measures_what_its_page_shows(tmp_path):
    examples.run("compare_methods.py", tmp_path)
    pages = [tmp_path / "compared/my_text.md", examples.COMPARED / "my_text.md"]
    texts = [page.read_text(encoding="utf-8") for page in pages]
    new, saved = (text.partition("## What ran")[2].partition("\n## ")[0] for text in texts)
    assert new == saved  # settings
    # the default text is another one with another version of Python
    new, saved = (re.findall(r"^\| ([\w-]+) \| (\d\.\d+) ±", text, re.M) for text in texts)
    assert [row for row, _ in new] == [row for row, _ in saved]
    assert len(new) == 4
    for (_, loss), (_, old) in zip(new, saved, strict=True):
        assert float(loss) == pytest.approx(float(old), rel=0.05)
