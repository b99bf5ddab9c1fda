"""The wheel holds every file and works from an empty directory."""

import email
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from support import ROOT


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    pytest.importorskip("setuptools", minversion="77")
    work = tmp_path_factory.mktemp("wheel")
    # building writes files: use a copy
    ignored = shutil.ignore_patterns("__pycache__")
    for name in ("sparsepretrain", "hydra_plugins", "configs"):
        shutil.copytree(ROOT / name, work / "source" / name, ignore=ignored)
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, work / "source")
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "--wheel-dir", work, work / "source"], check=True)
    return next(work.glob("*.whl"))


@pytest.fixture(scope="module")
def installed(wheel):
    target = wheel.parent / "installed"
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", target]
    subprocess.run([*command, "--no-index", wheel], check=True)
    return target


def run(installed: Path, cwd: Path, *argv: str) -> str:
    code = (
        "import sys, sparsepretrain.cli as cli\n"
        f"assert cli.__file__.startswith({str(installed)!r}), cli.__file__\n"
        "sys.exit(cli.main(sys.argv[1:]))"
    )
    command = [sys.executable, "-P", "-c", code, *argv]
    env = {**os.environ, "PYTHONPATH": str(installed)}
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_file_is_in_the_wheel(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    folders = {"sparsepretrain": "", "hydra_plugins": "", "configs": "sparsepretrain/"}
    files = {
        inside + file.relative_to(ROOT).as_posix()
        for folder, inside in folders.items()
        for file in (ROOT / folder).rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    }
    assert files - names == set() and "sparsepretrain/studies/published.yaml" in files
    top = {name.split("/")[0] for name in names if ".dist-info" not in name}
    assert top == {"sparsepretrain", "hydra_plugins"}
    assert "hydra_plugins/__init__.py" not in names, "the package is shared by all plug-ins"


def test_pypi_shows_a_description_without_dead_links(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [n for n in archive.namelist() if n.endswith(".dist-info/METADATA")]
        about = email.message_from_string(archive.read(name).decode())
    text = about.get_payload()
    assert about["Description-Content-Type"] == "text/markdown" and text.startswith("# sparse")
    links = re.findall(r"\]\(([^)]*)\)", text)
    assert links and all(link.startswith("https://") for link in links)
    assert not re.search(r"!\[|<!--|bars are", text) and "docs/methods" in text
    assert about["Keywords"] and "Typing :: Typed" in about.get_all("Classifier")


def test_hydra_finds_the_launchers_of_the_wheel(installed, tmp_path):
    words = ("seed=0,1", "hydra/launcher=submitit_local", "hydra.launcher.timeout_min=5")
    lines = run(installed, tmp_path, "train", "-m", *words, "--commands").splitlines()
    assert len(lines) == 2 and all(line.startswith("sparsepretrain train ") for line in lines)


def test_wheel_composes_from_an_empty_directory(installed, tmp_path):
    out = run(installed, tmp_path, "train", "model=gpt2_350m", "--cfg", "job")
    assert "n_layer: 24" in out and "name: openwebtext" in out
    assert "gpt2_nano *" in run(installed, tmp_path, "configs")
    assert not list(tmp_path.iterdir())
