"""What packed gathering saves and costs: two processes (gloo) of ``parallel=fsdp`` on the CPU.

Between two processes of one machine the network is memory, so that the time is the price of packing
and unpacking; bytes are those of any network.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from sparsepretrain.bench.timing import Case, interleaved, ratio
from sparsepretrain.config import compose, validate
from sparsepretrain.tracking.console import Console
from sparsepretrain.training.assembly import build_session
from sparsepretrain.training.loop import train_step
from sparsepretrain.training.precision import compute_dtype
from sparsepretrain.training.session import Session
from sparsepretrain.training.world import World, join

PROCESSES = 2
RUNS = [(method, precision) for precision in ("bf16", "fp32") for method in ("sste", "slope")]
"""One operand, and two."""


def cases(quick: bool) -> list[Case]:
    """Bytes and time of packed over operand, for each run."""
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    command = [sys.executable, "-m", __name__, str(2 if quick else 10)]
    base = {**os.environ, "MASTER_ADDR": "localhost", "MASTER_PORT": str(store.port)}
    base |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "WORLD_SIZE": str(PROCESSES)}
    started = [
        subprocess.Popen(
            command,
            env=base | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(PROCESSES)
    ]
    outputs = [process.communicate()[0] for process in started]
    for process in started:
        if process.returncode:
            raise subprocess.CalledProcessError(process.returncode, command)
    found = json.loads(outputs[0].splitlines()[-1])
    return [
        case
        for (method, precision), one in zip(RUNS, found, strict=True)
        for case in _cases(f"{method}, {precision}", one)
    ]


def _cases(name: str, one: dict[str, Any]) -> Iterator[Case]:
    for what, (packed, operand) in one["bytes"].items():
        yield Case(
            name=f"bytes received, packed over operand, {what}, {name}",
            value=packed / operand,
            unit="×",
            detail={"bytes": [packed, operand]},
        )
    seconds = one["seconds"]
    yield ratio(f"step time, packed over operand, {name}", seconds["packed"], seconds["operand"])


class Counted:
    """An all-gather of FSDP that knows how many bytes this process has received."""

    def __init__(self) -> None:
        self.bytes = 0

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A buffer."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False
    ) -> Any:
        """The all-gather."""
        self.bytes += output_tensor.nbytes - input_tensor.nbytes
        given: Any = {"group": group, "async_op": async_op}
        return dist.all_gather_into_tensor(output_tensor, input_tensor, **given)


def _measured(method: str, precision: str, world: World, rounds: int) -> dict[str, Any]:
    """``bytes``: what -> packed, operand; ``seconds``: of steps that take turns."""
    sessions = {
        gather: _session(method, precision, gather, world) for gather in ("packed", "operand")
    }
    counts = {gather: Counted() for gather in sessions}
    for gather, session in sessions.items():
        for module in session.model.modules():
            if isinstance(module, FSDPModule):
                module.set_custom_all_gather(counts[gather])  # type: ignore[arg-type]
    layer = [_layer_bytes(session, world) for session in sessions.values()]
    works: dict[str, Callable[[], object]] = {
        gather: functools.partial(train_step, session) for gather, session in sessions.items()
    }
    seconds = interleaved(works, rounds=rounds)
    steps = [count.bytes // (rounds + 2) for count in counts.values()]
    return {"bytes": {"a sparse layer": layer, "a step": steps}, "seconds": seconds}


def _layer_bytes(session: Session, world: World) -> int:
    """What this process receives of one sparse layer each time that it is gathered."""
    own = next(iter(session.sparsifier.layers.values())).sparsity
    parts = own.gathered.parts(compute_dtype(session.run.precision), True)
    return (world.size - 1) * sum(part.nbytes for part in parts)


def _session(method: str, precision: str, gather: str, world: World) -> Session:
    words = [f"sparsity={method}", f"precision={precision}", "parallel=fsdp", "batch.micro=8"]
    words += [f"parallel.gather={gather}", "parallel.device=cpu", "tracker=jsonl"]
    return build_session(validate(compose(words, [])), Console.silent(), world=world)


def main() -> None:
    """In every process: measure all runs; the first one prints the results as a line of JSON."""
    run = validate(compose(["parallel=fsdp", "parallel.device=cpu", "batch.micro=8"], []))
    with join(run) as world:
        found = [_measured(*each, world, int(sys.argv[1])) for each in RUNS]
        if world.is_main:
            sys.stdout.write(f"{json.dumps(found)}\n")


if __name__ == "__main__":
    main()
