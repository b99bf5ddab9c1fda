import pytest
import yaml

from sparsepretrain import registry
from sparsepretrain.config import strict
from sparsepretrain.data.formats import pairs
from support import ROOT

CONFIGS = ROOT / "configs" / "data"


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """Every test has its own cache directory."""
    directory = tmp_path / "cache"
    monkeypatch.setenv("SPARSEPRETRAIN_CACHE_DIR", str(directory))
    return directory


@pytest.fixture
def options():
    """``options("text_files", files=[...])``: a shipped YAML with some keys changed, checked."""

    def build(config: str, **changes):
        plain = yaml.safe_load((CONFIGS / f"{config}.yaml").read_text()) | changes
        return strict.build(registry.get("source", plain["source"]).Options, plain, "data")

    return build


@pytest.fixture
def pair_texts():
    """``pair_texts(data, "train")``: the decoded sentence pairs of a split."""

    def decode(data, split):
        found = pairs(data, split)
        sides = ((found.source(i), found.target(i)) for i in range(len(found)))
        return [tuple(data.decode(side[:-1]) for side in pair) for pair in sides]

    return decode


@pytest.fixture
def corpus(tmp_path):
    """A directory of 40 small Python files, two of which share a name."""
    root = tmp_path / "corpus"
    for i in range(40):
        file = root / f"package{i % 3}" / f"module{i // 3}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        body = "\n".join(f"def function_{i}_{j}(x):\n    return x + {j}\n" for j in range(i + 3))
        file.write_text(body)
    return root
