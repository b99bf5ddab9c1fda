"""Every rank of a test with several runs: ``rank.py CASES``, one run after the other.

Each run is a fork, which may fail, hang or be killed and leave nothing to the next one. The
imports, five seconds, are done once. Prints the exit code of each run, or -signal, as JSON.
"""

import json
import os
import sys
import traceback
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed.fsdp
import torch.utils.flop_counter
import transformers.models.gpt2.modeling_gpt2  # noqa: F401

from sparsepretrain import config
from sparsepretrain.console import Console
from sparsepretrain.errors import SparsePretrainError
from sparsepretrain.runs.tensors import RowSlice
from sparsepretrain.training import identity, session_state, trainer
from sparsepretrain.training.session import Session
from support.faults import inject
from support.mutants import mistaken
from support.tiny_runs import assert_equal_bits

load_state_dict = session_state.load_state_dict


def compared_with_its_source(own: Session, state: dict[str, Any], source: Any = None) -> None:
    """Load, collect again, and end; 0 if every tensor and number came back."""
    load_state_dict(own, state, source)
    again = session_state.state_dict(own)
    for part in session_state.STORED:
        for name, value in again.pop(part, {}).items():
            stored = state[part][name]
            if isinstance(value, RowSlice):
                first, value = value.first, value.tensor
                stored = stored[first : first + len(value)]
            assert_equal_bits(stored[...], value.cpu())
        if own.world.is_main:
            state.pop(part, None)
    if own.world.is_main:
        for parts in (state, again):  # learning rates are set before each step
            for group in parts["optimizer_options"]["groups"]:
                del group["lr"]
        assert_equal_bits(state, again)
    own.world.first(lambda: None)
    sys.stderr.flush()
    os._exit(0)


def compared_with_their_hash(t: Session, *_: Any, **__: Any) -> None:
    """Gather the weights that were handed out, and end; 0 if they have the hash of those drawn."""
    state = t.model.state_dict().items()
    whole = {k: t.world.whole(v) for k, v in state if "sparsity" not in k}
    if t.world.is_main:
        assert identity._hash(whole.items()) == t.setup.initial_weights
    t.world.first(lambda: None)
    os._exit(0)


def run(case: dict[str, Any]) -> int:
    """Train a case in a world of its own; the exit code of the command."""
    os.environ["MASTER_PORT"] = str(case["port"])
    if os.environ["RANK"] in case["faults"]:
        inject(*case["faults"][os.environ["RANK"]])
    try:
        if case["only"] == "loading":
            session_state.load_state_dict = compared_with_its_source  # type: ignore[assignment]
        elif case["only"] == "weights":
            trainer._run = compared_with_their_hash  # type: ignore[assignment]
        with mistaken(case["mutant"]):
            loaded, stop = config.load(case["words"]), case["stop_after"]
            return trainer.train(loaded, Console.silent(), stop_after=stop)
    except SparsePretrainError as error:
        print(f"{case['name']}: {error.label}: {error}", file=sys.stderr)
        return error.exit_code


def forked(case: dict[str, Any]) -> int:
    """The exit code of :func:`run` in a process of its own, or -signal, once all have theirs."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            code = run(case)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    ranks = range(int(os.environ["WORLD_SIZE"]))
    store = torch.distributed.TCPStore("localhost", case["port"])
    store.set(f"ended {os.environ['RANK']}", "")
    store.wait([f"ended {rank}" for rank in ranks], timedelta(minutes=10))
    return code


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    print(json.dumps([forked(case) for case in json.loads(Path(sys.argv[1]).read_text())]))
