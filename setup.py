"""List the packages: the code, the folders of YAML files as `sparsepretrain.configs`, and Hydra's
package of plug-ins, which all of them share and which has no `__init__.py`.

Everything else is in pyproject.toml, where setuptools cannot find packages under another name.
"""

from setuptools import find_namespace_packages, find_packages, setup

configs = find_namespace_packages(include=["configs", "configs.*"])
setup(
    packages=find_packages(include=["sparsepretrain", "sparsepretrain.*"])
    + find_namespace_packages(include=["hydra_plugins.*"])
    + [f"sparsepretrain.{name}" for name in configs]
)
