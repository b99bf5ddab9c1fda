"""What a step launches and moves for the sake of sparsity, held to a committed table.

The counts are those of ``train_step`` on a pretended GPU, beside its products and the optimiser:
they need no GPU and no clock. ``python tests/pretend_cuda/test_budget.py`` renews the table.
"""

import json
import os
import sys
from pathlib import Path

import pytest

os.environ["TRITON_INTERPRET"] = "1"
ROOT = Path(__file__).resolve().parents[2]
sys.path += [str(ROOT / "tests"), str(ROOT / "tests" / "pretend_cuda")]

from pretended import RECORD, pretend_cuda  # noqa: E402
from tiny_runs import Tiny, write_corpus  # noqa: E402

from sparsepretrain import registry  # noqa: E402
from sparsepretrain.training import loop  # noqa: E402

BUDGET = ROOT / "benchmarks" / "device_budget.json"
COMMITTED = json.loads(BUDGET.read_text()) if BUDGET.is_file() else {}
SETTLED = {
    "asp": "sparsity.at=0.0", "mdgf": "sparsity.until=0.0", "sdgf": "sparsity.until=0.0",
    "step": "sparsity.clipping=[0.0,0.0]", "tsrste": "sparsity.dense_tail=0",
}  # fmt: skip
"""With which the measured step is one of the last phase; T-SR-STE's without its dense tail."""
METHODS = [name for name in sorted(registry.names("method")) if name != "act24"]
STEP = 3
"""The step that is measured: nothing is new any more, and nothing is searched."""


def measure(tiny: Tiny, method: str) -> dict[str, float]:
    """Launches and bytes of one step in bf16, beyond those of the products.

    ``launches``, ``bytes``: of a step, per sparse layer and per sparse entry. ``micro_launches``,
    ``micro_bytes``: of each micro-batch (of 16 tokens) in addition, likewise. ``step_launches``: of
    a step of one micro-batch, whatever the number of layers. The model has parameters in fp32.
    """

    def counted(blocks: int, count: int) -> tuple[float, float, int]:
        words = [f"batch.size={count}", "batch.micro=1", "model.n_embd=128", "precision=bf16"]
        words += [f"sparsity={method}", "parallel.device=cuda", f"model.n_layer={blocks}"]
        with pretend_cuda():
            session = tiny.build(*words, *filter(None, [SETTLED.get(method)]))
            for _ in range(STEP):
                RECORD.clear()
                loop.train_step(session)
        layers = session.sparsifier.layers.values()
        entries = sum(layer.weight.numel() for layer in layers)
        return RECORD.launches["sparse"], RECORD.bytes["sparse"] / entries, len(layers)

    (one, size, layers), (two, more, _) = counted(1, 1), counted(1, 2)
    (other, _, many), (last, *_) = counted(2, 1), counted(2, 2)
    micro = ((last - other) - (two - one)) / (many - layers)
    every = (other - one) / (many - layers)
    found = {
        "launches": every - micro,
        "bytes": size - (more - size),
        "micro_launches": micro,
        "micro_bytes": more - size,
        "step_launches": one - layers * every,
    }
    return {name: round(value, 2) for name, value in found.items()}


@pytest.mark.parametrize("method", METHODS)
def test_a_step_keeps_its_budget(tiny, method):
    found = measure(tiny, method)
    allowed = COMMITTED["methods"][method]
    over = {k: (v, allowed[k]) for k, v in found.items() if v > allowed[k] + 0.01}
    assert not over, f"(found, allowed) {over}"


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as scratch:
        (Path(scratch) / "corpus").mkdir()
        os.environ["SPARSEPRETRAIN_CACHE_DIR"] = f"{scratch}/cache"
        small = Tiny(Path(scratch), write_corpus(Path(scratch) / "corpus"))
        about = " ".join((measure.__doc__ or "").split())
        table = {"about": about, "methods": {name: measure(small, name) for name in METHODS}}
    BUDGET.write_text(json.dumps(table, indent=1) + "\n")
