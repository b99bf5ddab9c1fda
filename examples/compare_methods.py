"""Compare three 2:4 methods with dense training on your own text, five seeds each.

    python examples/compare_methods.py [FILE.txt …]

Without files the text is the reference of the Python language that every installation has. Rows,
settings, seeds and claims are in compare_methods/table/my_text.yaml: change that file, not this
one, which types two commands for you. All methods share the initial weights and the data order of
a seed, so differences to dense are taken seed by seed. The page is compared/my_text.md.
"""

import shutil
import sys
from pathlib import Path

from sparsepretrain.cli import main as sparsepretrain

TABLE = ("my_text", "--config-dir", str(Path(__file__).parent / "compare_methods"))


def gather(files: list[str]) -> None:
    """Fill the directory ``text``, which the table reads."""
    shutil.rmtree("text", ignore_errors=True)
    Path("text").mkdir()
    for file in files:
        shutil.copy(file, "text")
    if not files:
        from pydoc_data.topics import topics

        for name, text in topics.items():
            Path("text", f"{name}.txt").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    gather(sys.argv[1:])
    code = sparsepretrain(["reproduce", *TABLE, "--jobs", "2"])
    sys.exit(code or sparsepretrain(["report", *TABLE, "--out", "compared"]))
