"""Starting several processes as torchrun would, one launch for many runs."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist

from sparsepretrain import config
from sparsepretrain.config import freeze
from support import SUPPORT, TESTS
from support.tiny_runs import Tiny

RANK = SUPPORT / "rank.py"

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
    "tsrste 4:8": ("sparsity.n=4", "sparsity.m=8", "sparsity.refresh=3"),
    "sdgp": ("sparsity.epsilon=1e-4",),
    "sdgp random": ("sparsity.variant=random",),
    "asp": ("sparsity.at=0.3",),
    "bimask": ("sparsity.every=4", "sparsity.candidates=8"),
    "slope": ("sparsity.mask=random", "sparsity.adapters.rank=4", "sparsity.adapters.start=0.5"),
    "act24": (),
    "mdgf": (),
    "sdgf": (),
    "ast": ("sparsity.refresh=2", "sparsity.decay=0.1"),
    "ast branch": ("sparsity.refresh=3", "sparsity.slorb=4"),
    "maskpro": ("sparsity.logit=1", "optim.lr=0.1"),
    "maskllm": ("sparsity.penalty=0.01", "optim.lr=0.05"),
    "proxsparse": ("optim.lr=1e-2",),
    "proxsparse frozen": ("optim.lr=1e-2", "sparsity.frozen_strength=1"),
    "ternary": (),
    # the learning rate is one that can train weights to zero in so few steps
    "cast": ("sparsity.refresh=2", "sparsity.decay=0.01", "optim.lr=1e-2"),
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
    # rank -> kind, moment and number of a fault, see faults.py
    faults: dict[int, tuple[str, str, int]] = field(default_factory=dict)
    # "loading": compare what was loaded with its checkpoint, and end; "weights": what each process
    # was given of the initial weights with their hash
    only: str = ""
    fails: bool = False  # no process may end with 0
    # afterwards: exit code or -signal of each rank, and what all wrote on the standard error
    codes: list[int] = field(default_factory=list)
    errors: str = ""


def start_ranks(size: int, script: Path, word: str, **more: str) -> list[subprocess.Popen[str]]:
    """Start ``script`` with ``word`` once for each rank."""
    base = {**os.environ, "MASTER_ADDR": "localhost", "OMP_NUM_THREADS": "1", **more}
    base["PYTHONPATH"] = f"{TESTS}:{os.environ.get('PYTHONPATH', '')}"
    base |= {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    command = [sys.executable, str(script), word]
    ranks = [base | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(size)]
    return [subprocess.Popen(command, env=rank, **pipes) for rank in ranks]


def train_with(tiny: Tiny, size: int, cases: list[Case]) -> dict[str, Path]:
    """Train ``cases`` in ``size`` processes; name -> run directory."""
    plain, found = [], {}
    # where the processes of a run find each other: here, as with torchrun, so that nobody else can
    # take a port before they listen to it
    stores = [dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False) for _ in cases]
    for case, store in zip(cases, stores, strict=True):
        root = case.directory if case.directory.name else tiny.root / f"{size} {case.name}"
        words = [*tiny.overrides(*case.words, *case.parallel), "parallel.device=cpu"]
        words.append(f"runs_dir='{root}'")
        keys = ("mutant", "stop_after", "faults", "only")
        about = {key: getattr(case, key) for key in keys}
        plain.append({"name": case.name, "words": words, "port": store.port, **about})
        found[case.name] = words
    file = tiny.root / f"cases-{size}.json"
    file.write_text(json.dumps(plain))
    # the agent store is that of this process
    started = start_ranks(size, RANK, str(file), TORCHELASTIC_USE_AGENT_STORE="True")
    try:
        outputs = [process.communicate(timeout=1500) for process in started]
    finally:
        for process in started:
            process.kill()
    errors = "\n".join(error for _, error in outputs)
    assert [process.returncode for process in started] == [0] * size, errors
    codes = zip(*(json.loads(printed) for printed, _ in outputs), strict=True)
    for case, own in zip(cases, codes, strict=True):
        case.codes = list(own)
        lines = errors.splitlines()
        case.errors = "\n".join(line for line in lines if line.startswith(f"{case.name}: "))
        assert all(own) if case.fails else not any(own), (case, errors[-5000:])
    return {name: freeze.run_directory(config.load(words)) for name, words in found.items()}
