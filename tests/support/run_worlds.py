"""Runs `sparsepretrain` in forked ranks of a warm parent; reads jobs from stdin, writes results.

Importing torch and transformers takes five seconds, a tiny run a tenth of one: the imports are done
once. Every rank of a run is a fork of this process, which has no threads of its own, in the
environment that torchrun gives. Two such parents share nothing but the file system: they differ in
hash seed, memory layout, state of the generators and cache of compiled graphs.

A job: {"argv": [...], "size": ranks, "port": of the store where they meet, "mutant": a name of
MUTANTS or "", "kill": number of the micro-batch of each rank that ends in SIGKILL, or 0}
The result: {"codes": exit code or -signal of each rank, "out": stdout and stderr of all}.
"""

import dataclasses
import importlib
import json
import os
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import numpy as np
import torch.distributed.fsdp
import torch.utils.flop_counter
import transformers.models.gpt2.modeling_gpt2  # noqa: F401

from sparsepretrain.cli import train
from sparsepretrain.sparsity import Sparsifier
from sparsepretrain.sparsity.engine.model_state import ModelState
from sparsepretrain.training import assembly, loop, session_state
from support.faults import inject
from support.forked import main_in_child
from support.mutants import noise

WARM = (
    "hydra",
    "hydra.core.override_parser.overrides_parser",
    "numba",
    "numba.core.typed_passes",
)
"""Modules that a run imports late. Not torch._inductor: a fork of a process that had imported it
was still compiling after six minutes."""

LIMIT = 600.0
"""Seconds of a run, after which it counts as hung."""

seed_draws, rate, losses = loop.seed_draws, loop.learning_rate, loop._losses
restore, build = session_state._load_optimizer, assembly.gradients


def clock() -> int:
    return time.time_ns() // 1000 % 2**20


def without_moments(model: Any, optimizer: Any, state: dict[str, Any], world: Any) -> None:
    """Restore the options of the optimizer, and zeros in place of its moments."""
    zeros = {
        k: torch.zeros_like(v[...]) if "exp" in k else v for k, v in state["optimizer"].items()
    }
    restore(model, optimizer, {**state, "optimizer": zeros}, world)


def counted_here() -> Callable[..., None]:
    """Seed dropout by the steps that this process has taken, not by those of the run."""
    first: list[int] = []

    def seed(number: int, step: int, micro: int) -> None:
        first.append(step)
        seed_draws(number, step - first[0], micro)

    return seed


def one_ulp_higher(*words: Any) -> float:
    """Return the next learning rate of fp32: of fp64 it would vanish in the weights."""
    return float(np.nextafter(np.float32(rate(*words)), np.float32(np.inf)))


def as_they_come(parallel: Any, loss: Any, world: Any) -> Any:
    """Ignore ``reduction=tree``."""
    return build(dataclasses.replace(parallel, reduction="fast"), loss, world)


def backwards(session: Any, step: int, own: list[Any]) -> Any:
    """Add the gradients of a step in another order; losses keep their number."""
    with patch.object(session.batches, "share", session.batches.share[::-1]):
        yield from losses(session, step, own[::-1])


MUTANTS: dict[str, tuple[Any, ...]] = {
    "draws of the method from the clock": (noise(lambda index: index + clock()),),
    "dropout from the clock": (
        patch.object(
            loop, "seed_draws", lambda seed, step, micro: seed_draws(clock(), step, micro)
        ),
    ),
    "learning rate one ulp higher": (patch.object(loop, "learning_rate", one_ulp_higher),),
    "another order of summation": (patch.object(loop, "_losses", backwards),),
    "moments not restored": (patch.object(session_state, "_load_optimizer", without_moments),),
    "counter of the draws not restored": (
        patch.object(Sparsifier, "load_state_dict", lambda own, state: None),
        patch.object(ModelState, "sync", lambda own, always=False: None),
    ),
    "dropout counted from the resume": (patch.object(loop, "seed_draws", counted_here()),),
    "draws by rank": (noise(lambda index: index + 4 * int(os.environ.get("RANK", "0"))),),
    "reduction=tree ignored": (patch.object(assembly, "gradients", as_they_come),),
}
"""Name -> patches of the trained code."""


def child(job: dict[str, Any], rank: int, log: int) -> None:
    def prepare() -> None:
        if job["size"] > 1:
            os.environ |= {
                "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(job["size"]),
                "LOCAL_WORLD_SIZE": str(job["size"]), "MASTER_ADDR": "localhost",
                "MASTER_PORT": str(job["port"]), "TORCHELASTIC_USE_AGENT_STORE": "True",
            }  # fmt: skip
        for mistake in MUTANTS[job["mutant"]] if job["mutant"] else ():
            mistake.start()
        if job["kill"]:
            inject("SIGKILL", "micro-batch", job["kill"])

    main_in_child(job["argv"], log, prepare)


def run(job: dict[str, Any]) -> dict[str, Any]:
    """Start all ranks of a job and wait for them."""
    with tempfile.TemporaryFile() as log:
        alive: dict[int, int] = {}
        for rank in range(job["size"]):
            pid = os.fork()
            if pid == 0:
                child(job, rank, log.fileno())
            alive[pid] = rank
        codes: list[int | None] = [None] * job["size"]
        start = time.monotonic()
        while alive:
            for pid in list(alive):
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    codes[alive.pop(pid)] = os.waitstatus_to_exitcode(status)
            if time.monotonic() - start > LIMIT:
                for pid in alive:
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.002)
        log.seek(0)
        return {"codes": codes, "out": log.read().decode(errors="replace")}


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    for module in WARM:
        importlib.import_module(module)
    train.illustrate = lambda *args: None  # plots take longer than the runs
    for text in sys.stdin:
        print(json.dumps(run(json.loads(text))), flush=True)
