"""Print the installed size of sparsepretrain and of each extra, as the table of docs/install.md.

    python scripts/installed_sizes.py

Measures the environment that runs it, in which every extra is installed (`make test` makes one):
bytes of all files that the packages list, with the bytecode that pip writes. An extra is counted
beyond the packages that an installation without extras brings. Downloads nothing.
"""

from __future__ import annotations

import platform
from collections.abc import Iterable
from importlib.metadata import Distribution, PackageNotFoundError, distribution

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PROJECT = "sparsepretrain"


def needed(name: str, extras: Iterable[str] = ()) -> dict[str, Distribution]:
    """Return the installed packages that a package with these extras needs, by name."""
    found: dict[str, Distribution] = {}
    done = set()
    waiting = [(canonicalize_name(name), extra) for extra in ("", *extras)]
    while waiting:
        entry = waiting.pop()
        if entry in done:
            continue
        done.add(entry)
        package, extra = entry
        found[package] = distribution(package)
        for text in found[package].requires or ():
            requirement = Requirement(text)
            if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
                other = canonicalize_name(requirement.name)
                waiting += [(other, more) for more in ("", *requirement.extras)]
    return found


def size(package: Distribution) -> float:
    """Return the megabytes (10⁶ bytes) of the files of a package."""
    files = [file.locate() for file in package.files or ()]
    return sum(file.stat().st_size for file in files if file.is_file()) / 1e6


def row(label: str, packages: dict[str, Distribution]) -> str:
    """Return a row of the table; the largest packages are named with their versions."""
    sizes = {name: size(package) for name, package in packages.items()}
    largest = sorted(sizes, key=sizes.__getitem__, reverse=True)[:3]
    names = ", ".join(f"{name} {packages[name].version}" for name in largest)
    return f"| {label} | {sum(sizes.values()):,.0f} | {len(sizes)} | {names or '–'} |"


def main() -> None:
    base = needed(PROJECT)
    cuda = {n: p for n, p in base.items() if n.startswith(("nvidia-", "cuda-")) or n == "triton"}
    print(f"Python {platform.python_version()}, {platform.system()} {platform.machine()}\n")
    print("| installation | MB | packages | largest |\n|---|---|---|---|")
    print(row("without extras", base))
    print(row("… of these, CUDA libraries and Triton", cuda))
    for extra in distribution(PROJECT).metadata.get_all("Provides-Extra") or ():
        if extra == "dev":
            continue
        try:
            more = needed(PROJECT, [extra])
        except PackageNotFoundError as missing:
            print(f"| `{extra}` | not measured: {missing.name} is not installed | | |")
            continue
        label = extra.replace("-", "_")  # metadata have lm-eval for lm_eval
        print(row(f"`{label}`", {name: p for name, p in more.items() if name not in base}))


if __name__ == "__main__":
    main()
