"""A run that takes a tenth of a second, for every test that trains."""

import functools
import io
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TRAINING = (
    "eval.every=4",
    "eval.batches=1",
    "log.every=1",
    "log.layers_every=2",
    "checkpoint.every=2",
    "schedule.warmup=2",
    "steps=6",
    "tracker.mode=disabled",
    "parallel.device=cpu",
)
TINY = (
    *TRAINING,
    "model.n_embd=32",
    "model.n_layer=1",
    "model.n_head=2",
    "task.sequence_length=16",
    "batch.size=4",
    "batch.micro=4",
)
METHODS = ("dense", "ste", "srste", "sste")
UNREPEATABLE = ("time", "tokens_per_second", "data_wait", "mfu_dense")


@functools.cache
def composed(*overrides: str) -> dict[str, Any]:
    """``config.compose``, once per process (a fifth of a second each): for reading only."""
    from sparsepretrain import config

    return config.compose(overrides)


@dataclass
class Outcome:
    """What a call of ``train`` left behind."""

    code: int
    directory: Path
    output: str


class Tiny:
    """Composes, checks and trains small runs below ``root`` in this process."""

    def __init__(self, root: Path, corpus: Path) -> None:
        self.root, self.corpus = root, corpus

    def overrides(self, *more: str) -> list[str]:
        data = ["data=text_files", f"data.files=['{self.corpus}/*.txt']", "data.validation=0.3"]
        return [*TINY, *data, f"runs_dir='{self.root / 'runs'}'", *more]

    def load(self, *more: str) -> tuple[Any, dict[str, Any]]:
        from sparsepretrain import config

        return config.load(self.overrides(*more))

    def directory(self, *more: str) -> Path:
        from sparsepretrain.config import freeze

        return freeze.run_directory(self.load(*more).plain)

    def train(self, *more: str) -> Outcome:
        from sparsepretrain.config import freeze
        from sparsepretrain.console import Console
        from sparsepretrain.training.trainer import train

        run = self.load(*more)
        out = io.StringIO()
        code = train(run, Console(out))
        return Outcome(code, freeze.run_directory(run), out.getvalue())

    def build(self, *more: str) -> Any:
        """Everything the loop touches, before the first step."""
        from sparsepretrain.console import Console
        from sparsepretrain.training.assembly import build_session

        return build_session(self.load(*more), Console(io.StringIO()))


def metrics(directory: Path) -> list[dict[str, Any]]:
    """The record without what two equal runs may differ in."""
    lines = (directory / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    return [{k: v for k, v in r.items() if k not in UNREPEATABLE} for r in records]


def final_state(directory: Path) -> dict[str, Any]:
    """The state in the newest checkpoint."""
    from sparsepretrain.runs import checkpoint

    newest = sorted((directory / "checkpoints").glob("step_*"))[-1]
    state = checkpoint.Checkpoint(newest).parts()
    for key in ("evaluated", "lines"):  # a run stopped in an evaluation saves before it is complete
        del state[key]
    return state


def assert_equal_bits(left: Any, right: Any, path: str = "") -> None:
    """Nested states are equal, tensors bit by bit."""
    import torch

    assert type(left) is type(right), path
    if isinstance(left, dict):
        assert list(left) == list(right), path
        for key in left:
            assert_equal_bits(left[key], right[key], f"{path}/{key}")
    elif isinstance(left, list | tuple):
        assert len(left) == len(right), path
        for i, (a, b) in enumerate(zip(left, right, strict=True)):
            assert_equal_bits(a, b, f"{path}/{i}")
    elif isinstance(left, torch.Tensor):
        assert left.dtype == right.dtype and left.shape == right.shape, path
        same = left.contiguous().view(-1).view(torch.uint8)
        other = right.contiguous().view(-1).view(torch.uint8)
        assert torch.equal(same, other), path
    else:
        assert left == right, (path, left, right)


def assert_same_run(left: Path, right: Path) -> None:
    """Equal records, and equal final weights, moments, masks, counters and generators."""
    assert metrics(left) == metrics(right)
    assert_equal_bits(final_state(left), final_state(right))


def interrupted(tiny: Tiny, stop_after: Any, stops: tuple[int, ...], *overrides: str) -> Path:
    """The directory of a run that was stopped and continued at each of ``stops``."""
    for step in stops:
        stop_after(step)
        outcome = tiny.train(*overrides)
        assert outcome.code == 143, outcome.output
        assert final_state(outcome.directory)["step"] == step
    stop_after(-1)
    outcome = tiny.train(*overrides)
    assert outcome.code == 0
    return outcome.directory


def write_corpus(root: Path) -> Path:
    """Twelve text files, 40 kB in all."""
    for i in range(12):
        lines = (f"line {j} of file {i}: {j * j % 97} sheep, {i * j % 89} goats" for j in range(90))
        (root / f"{i:02}.txt").write_text("\n".join(lines))
    return root
