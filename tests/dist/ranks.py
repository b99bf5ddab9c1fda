"""Starting several processes as torchrun would, one launch for many runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

from tiny_runs import Tiny

RANK = Path(__file__).with_name("rank.py")

VARIANTS: dict[str, tuple[str, ...]] = {
    "dense": (),
    "ste": (),
    "srste": (),
    "srste weight": ("sparsity.decay_on=weight", "sparsity.decay=0.2"),
    "step": ("sparsity.clipping=[0.2,0.5]",),
    "sste": (),
    "sste weight": ("sparsity.mvue=weight",),
    "sste step": ("sparsity.beta_update=step", "sparsity.estimator=exact"),
    "tsrste": ("sparsity.refresh=3",),
    "sdgp": ("sparsity.epsilon=1e-4",),
    "sdgp random": ("sparsity.variant=random",),
    "asp": ("sparsity.at=0.3",),
    "bimask": ("sparsity.every=4", "sparsity.candidates=8"),
    "slope": ("sparsity.mask=random", "sparsity.adapters.rank=4", "sparsity.adapters.start=0.5"),
    "act24": (),
    "mdgf": (),
    "sdgf": (),
}
"""Name, whose first word is the method -> its overrides."""

SHAPE = ("batch.size=8", "batch.micro=2", "model.dropout=0.1", "eval.batches=3", "eval.every=5")


def variant(name: str) -> tuple[str, ...]:
    """Overrides of one of ``VARIANTS`` with four micro-batches of a step, and dropout."""
    return (*SHAPE, f"sparsity={name.partition(' ')[0]}", *VARIANTS[name])


@dataclass
class Case:
    """A run of several processes and what tells it from those of others."""

    name: str
    words: tuple[str, ...]
    mutant: str = ""
    stop_after: int | None = None
    parallel: tuple[str, ...] = ("parallel=ddp",)
    directory: Path = field(default_factory=Path)


def train_with(tiny: Tiny, size: int, cases: list[Case]) -> dict[str, Path]:
    """Train ``cases`` in ``size`` processes; name -> run directory."""
    import torch.distributed as dist

    from sparsepretrain import config
    from sparsepretrain.config import freeze

    plain, found = [], {}
    # where the processes of a run find each other: here, as with torchrun, so that nobody else can
    # take a port before they listen to it
    stores = [dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False) for _ in cases]
    for case, store in zip(cases, stores, strict=True):
        root = case.directory if case.directory.name else tiny.root / f"{size} {case.name}"
        words = [*tiny.overrides(*case.words, *case.parallel), "parallel.device=cpu"]
        words.append(f"runs_dir='{root}'")
        about = {"mutant": case.mutant, "stop_after": case.stop_after}
        plain.append({"words": words, "port": store.port, **about})
        found[case.name] = words
    file = tiny.root / f"cases-{size}.json"
    file.write_text(json.dumps(plain))
    base = {**os.environ, "MASTER_ADDR": "localhost", "OMP_NUM_THREADS": "1"}
    base |= {"TORCHELASTIC_USE_AGENT_STORE": "True"}  # that of this process
    base |= {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
    started = [
        subprocess.Popen(
            [sys.executable, str(RANK), str(file)],
            env=base | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(size)
    ]
    try:
        outputs = [process.communicate(timeout=1500)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0] * size, "\n".join(outputs)
    return {name: freeze.run_directory(config.load(words)) for name, words in found.items()}
