"""List the packages: the code, and the folders of YAML files as `sparsepretrain.configs`.

Everything else is in pyproject.toml, where setuptools cannot find packages under another name.
"""

from setuptools import find_namespace_packages, find_packages, setup

configs = find_namespace_packages(include=["configs", "configs.*"])
setup(
    packages=find_packages(include=["sparsepretrain", "sparsepretrain.*"])
    + [f"sparsepretrain.{name}" for name in configs]
)
