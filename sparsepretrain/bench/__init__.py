"""Benchmarks: two things compared in one process, results as JSON with the hardware in it."""

from __future__ import annotations

import json
import time
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from sparsepretrain.errors import ConfigError
from sparsepretrain.files import write_atomic

if TYPE_CHECKING:
    import torch

SUITES = {
    "cpu": "sparsepretrain.bench.cpu",
    "smoke": "sparsepretrain.bench.smoke",
    "trust": "sparsepretrain.bench.trust",
    "kernels": "sparsepretrain.bench.kernels",
    "linear": "sparsepretrain.bench.linear",
    "block": "sparsepretrain.bench.block",
    "products": "sparsepretrain.bench.products",
    "train": "sparsepretrain.bench.train",
    "hours": "sparsepretrain.bench.hours",
    "operands": "sparsepretrain.bench.operands",
    "host": "sparsepretrain.bench.host",
    "checkpoint": "sparsepretrain.bench.checkpoint",
    "gather": "sparsepretrain.bench.gather",
}
"""Name -> module with ``cases(quick)``, a list of :class:`timing.Case` or ``kernels.Timed``, or of
functions that measure some; those of :data:`CHOOSE` have ``cases(quick, choice)``.

A module may also have ``draw(result, path)``, which is given a path for a plot, and
``report(result)``, lines of Markdown in the form of a paper's table.
"""


CHOOSE = ("linear", "block", "train", "hours")
"""Suites that measure methods."""


class Choice(NamedTuple):
    """What a suite of methods measures."""

    methods: tuple[str, ...] = ()
    """Names; none: all of them."""
    backend: str = "emulate"
    """``auto``: with sparse products where they are faster."""
    fp8: bool = False
    """Whether sparse layers multiply in fp8."""

    @property
    def how(self) -> str:
        """In words, for the name of a case."""
        return ", fp8" * self.fp8 + f", backend={self.backend}" * (self.backend != "emulate")

    def precision(self, device: torch.device) -> dict[str, str] | None:
        """Of :func:`sparsepretrain.sparsify`, with a recipe that ``backend`` runs sparse.

        A rehearsal on the CPU simulates fp8.
        """
        if not self.fp8:
            return None
        recipe = "hybrid" if self.backend == "emulate" else "e4m3"
        return {"name": "fp8" if device.type == "cuda" else "fp8_sim", "recipe": recipe}


EVERYTHING = Choice()


def run(
    *,
    suite: str,
    out: Path | None = None,
    quick: bool = False,
    choice: Choice | None = None,
    budget: float | None = None,
) -> dict[str, Any]:
    """Run a suite, print its table and write the JSON; a page of Markdown and a plot go beside it.

    The JSON is renewed after every case, so that a run that is killed keeps what it measured.

    Args:
        suite: a key of :data:`SUITES`.
        out: file to write; None: ``<suite>.json`` in the working directory.
        quick: few repetitions, to see that it works; limits are not judged.
        choice: for the suites of :data:`CHOOSE`; None: every method, emulated.
        budget: seconds after which no further case is begun; None: no limit.

    Returns:
        what was written: environment, settings and one entry per case; ``within_limits`` tells
        whether every case that has a limit keeps it.
    """
    import torch

    from sparsepretrain.bench import gpu
    from sparsepretrain.bench.kernels import skipped
    from sparsepretrain.bench.summary import page
    from sparsepretrain.tracking.console import Console
    from sparsepretrain.training.hardware import environment

    path = out or Path(f"{suite}.json")
    try:  # before minutes are spent on what could not be kept
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"out: cannot write {path}: {error.strerror}") from error
    console, cuda = Console(), torch.cuda.is_available()
    device = torch.device("cuda" if cuda else "cpu")
    module = import_module(SUITES[suite])
    before = gpu.state() if cuda else None
    cases: list[Any] = []
    result: dict[str, Any] = {
        "schema": 1,
        "suite": suite,
        "quick": quick,
        "environment": environment(device),
        "gpu": {"before": before} if cuda else None,
        "ceilings": gpu.ceilings(device) if cuda else None,
    }

    def write() -> None:
        result["cases"] = [case.as_dict() for case in cases]
        result["within_limits"] = quick or all(case.ok is not False for case in cases)
        write_atomic(path, json.dumps(result, indent=1) + "\n")

    started = time.monotonic()
    works = [*(module.cases(quick) if choice is None else module.cases(quick, choice))]
    for index, work in enumerate(works):
        if budget is not None and time.monotonic() - started > budget:
            left = f"skipped: {budget:g} s are over"
            cases.append(skipped(f"the last {len(works) - index} of {len(works)}", [], left))
            break
        cases += work() if callable(work) else [work]
        write()
    if cuda:
        result["gpu"]["after"] = gpu.state()
    write()
    if hasattr(module, "draw"):
        module.draw(result, path.with_suffix(".png"))
    write_atomic(path.with_suffix(".md"), "\n".join(page(path)) + "\n")
    kept = {None: "", True: "yes", False: "NO"}
    rows = [(c.name, c.value_text, c.limit_text, kept[None if quick else c.ok]) for c in cases]
    console.table(f"bench {suite}", rows, header=["case", "value", "limit", "kept"])
    console.info(f"written to {path}, and as a page to {path.with_suffix('.md')}")
    return result
