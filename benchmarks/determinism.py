"""Time steps with ``deterministic=true`` and ``parallel.reduction=tree`` against those without.

    python benchmarks/determinism.py      JSON on the standard output; `make determinism` runs it

gpt2_nano with srste, four micro-batches of four sequences a step, one thread per rank. All variants
live in one process per rank and take turns; a ratio is the median over rounds. Two ranks train with
DistributedDataParallel (gloo).
"""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Callable
from typing import Any

import torch

from harness import interleave, ratio
from sparsepretrain.config import compose, validate
from sparsepretrain.console import Console
from sparsepretrain.training.assembly import build_session
from sparsepretrain.training.loop import train_step
from sparsepretrain.training.precision import set_numerics
from sparsepretrain.training.world import World, join
from steps import random_tokens

ROUNDS = 24
WORDS = (
    "model=gpt2_nano",
    "sparsity=srste",
    "data=python_source",
    "batch.size=16",
    "batch.micro=4",
    "steps=100000",
    "eval.batches=0",
    "log.every=1000000",
    "log.layers_every=0",
    "tracker=jsonl",
    "parallel.device=cpu",
)
VARIANTS: dict[str, tuple[str, ...]] = {
    "plain": (),
    "deterministic=true": ("deterministic=true",),
    "parallel.reduction=tree": ("parallel.reduction=tree",),
}


def main() -> int:
    """Measure with one rank and with two."""
    found: dict[str, Any] = {}
    for ranks in (1, 2):
        found |= in_children(ranks)
    json.dump(found, sys.stdout)
    return 0


def in_children(ranks: int) -> dict[str, Any]:
    """Return the ratios of rank 0; each rank is a fork of this process."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    reading, writing = os.pipe()
    children = []
    for rank in range(ranks):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                env = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "MASTER_PORT": port}
                if ranks > 1:
                    os.environ |= {k: str(v) for k, v in env.items()}
                    os.environ["MASTER_ADDR"] = "localhost"
                result = measured(ranks)
                if rank == 0:
                    os.write(writing, json.dumps(result).encode())
                code = 0
            finally:
                sys.stderr.flush()
                os._exit(code)
        children.append(child)
    os.close(writing)
    with open(reading, encoding="utf-8") as pipe:
        text = pipe.read()
    if any(os.waitpid(child, 0)[1] for child in children):
        raise SystemExit(f"{ranks} ranks failed")
    found: dict[str, Any] = json.loads(text)
    return found


def measured(ranks: int) -> dict[str, Any]:
    """Return the ratio of each variant to ``plain``."""
    torch.set_num_threads(1)  # more of them would wait for each other on a shared machine
    parallel = "single" if ranks == 1 else "ddp"

    def load(more: tuple[str, ...]) -> Any:
        return validate(compose([*WORDS, f"parallel={parallel}", *more], []))

    with join(load(())) as world:
        steps = {name: stepper(load(more), world) for name, more in VARIANTS.items()}
        series = interleave(steps, ROUNDS)
    found = {}
    for name in list(VARIANTS)[1:]:
        case = ratio(name, series[name], series["plain"])
        where = "1 rank" if ranks == 1 else f"{ranks} ranks"
        found[f"{name}, {where}"] = {"ratio": case.value, **case.detail}
    return found


def stepper(run: Any, world: World) -> Callable[[], Any]:
    """Return a function that takes a step of ``run``; batches are made beforehand."""
    session = build_session(run, Console.silent(), world=world)
    tokens = random_tokens(run, session.task, run.batch.size // run.batch.micro)
    assert tokens is not None
    own = [tokens[index] for index in session.batches.share]
    session.batches.step = lambda step: own  # type: ignore[method-assign]

    def step() -> Any:
        # the switch is one of the process: an earlier variant may have turned it
        set_numerics(run.precision, deterministic=run.deterministic)
        return train_step(session)

    return step


if __name__ == "__main__":
    raise SystemExit(main())
