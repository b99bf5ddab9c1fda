"""Starting several processes as torchrun would, one launch for many runs."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

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


@contextlib.contextmanager
def _free_port() -> Any:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        yield probe.getsockname()[1]


def train_with(tiny: Tiny, size: int, cases: list[Case]) -> dict[str, Path]:
    """Train ``cases`` in ``size`` processes; name -> run directory."""
    plain, found = [], {}
    with contextlib.ExitStack() as ports:
        for case in cases:
            root = tiny.root / f"{size} {case.name}"
            words = [*tiny.overrides(*case.words, *case.parallel), "parallel.device=cpu"]
            words.append(f"runs_dir='{case.directory if case.directory.name else root}'")
            port = ports.enter_context(_free_port())
            about = {"mutant": case.mutant, "stop_after": case.stop_after}
            plain.append({"words": words, "port": port, **about})
            found[case.name] = words
    file = tiny.root / f"cases-{size}.json"
    file.write_text(json.dumps(plain))
    base = os.environ | {"MASTER_ADDR": "localhost", "WORLD_SIZE": str(size)}
    base |= {"OMP_NUM_THREADS": "1", "LOCAL_WORLD_SIZE": str(size)}
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
    outputs = [process.communicate(timeout=1500)[0] for process in started]
    assert [process.returncode for process in started] == [0] * size, "\n".join(outputs)
    from sparsepretrain import config
    from sparsepretrain.config import freeze

    return {name: freeze.run_directory(config.load(words)) for name, words in found.items()}
