"""List the packages: the code, the folders of YAML files as `sparsepretrain.configs`, and Hydra's
package of plug-ins, which all of them share and which has no `__init__.py`. Write the description
for PyPI.

Everything else is in pyproject.toml, where setuptools cannot find packages under another name.
"""

import re
from pathlib import Path

from setuptools import find_namespace_packages, find_packages, setup

RELATIVE = r"\[([^]]*)\]\((?!https?:)[^)]*\)"
"""Markdown link to a file of the repository; its first group is the text."""


def description() -> str:
    """Return the README as PyPI can show it: without figures, and links to files as text."""
    text = Path(__file__).with_name("README.md").read_text(encoding="utf-8")
    text = re.sub(r"<!-- generated: figure .*?<!-- end -->\n\n", "", text, flags=re.DOTALL)
    text = re.sub(r"<!-- .*? -->\n", "", text)
    return re.sub(RELATIVE, r"\1", text)


configs = find_namespace_packages(include=["configs", "configs.*"])
setup(
    long_description=description(),
    long_description_content_type="text/markdown",
    packages=find_packages(include=["sparsepretrain", "sparsepretrain.*"])
    + find_namespace_packages(include=["hydra_plugins.*"])
    + [f"sparsepretrain.{name}" for name in configs],
)
