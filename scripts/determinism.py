"""Run the checks behind docs/determinism.md and record the results; ``make determinism``.

    python scripts/determinism.py                   cases, mutants, operators, costs
    python scripts/determinism.py "sste *" mutants  cases with such names, and one part
    python scripts/determinism.py --again           also those that this code has passed
    python scripts/determinism.py --accept          new bits become the golden ones
    python scripts/determinism.py --golden          gate 2 alone, one run per case
    python scripts/determinism.py --device cuda     the cases on GPUs, with deterministic=true

A case trains tiny runs through the command line (tests/support/run_worlds.py) and compares hashes
of the record and of the last checkpoint. ``docs/determinism.json`` is written after every case. A
second start at the same code does the cases that are left. ``scripts/generate_docs.py`` generates
the page from this file. The exit code is 1 if a gate fails or a mutant is not noticed. A result is
of the last commit that changed the code that trains.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import hashlib
import itertools
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from sparsepretrain import registry
from sparsepretrain.files import cache_directory, write_atomic
from support.ranks import VARIANTS
from support.tiny_runs import TINY, final_state, metrics, write_corpus

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs" / "determinism.json"
SERVER = ROOT / "tests" / "support" / "run_worlds.py"
NOT_TRAINING = ("cli", "export", "integrations", "pruning", "reports", "studies")
"""Parts of the package that no number of a run comes from."""
CODE = (
    *("sparsepretrain", "configs", ":!configs/table"),
    *(f":!sparsepretrain/{part}" for part in NOT_TRAINING),
)
"""Paths (of git) whose last commit is that of a result: the code that trains."""

METHODS = tuple(registry.built_in("method"))
AXES: dict[str, tuple[str, ...]] = {
    "method": METHODS,
    "precision": ("fp32", "bf16", "fp16", "fp8_sim"),
    "parallel": ("single", "ddp", "fsdp", "tree"),
    "compile": ("none", "blocks"),
}
REFUSED = (("fp16", "fsdp"), ("fp8_sim", "fsdp"))
"""Precisions that ``parallel=fsdp`` refuses: one case of each shows the message."""

STEPS = 8
KILLED_IN = 5  # a checkpoint is written every two steps
MICRO_BATCHES = 4
SHAPE = (
    *TINY,
    f"steps={STEPS}",
    "batch.size=8",
    "batch.micro=2",
    "model.dropout=0.1",
    "eval.batches=3",
    "log.layers_every=4",
)
"""Overrides of every run: gpt2_nano with 28,768 parameters, one block."""

TOKENS = 96
"""Tokens behind a loss: those of an evaluation, of three micro-batches of two; a step has 128."""
ROUNDOFF = {"bf16": 2**-8, "fp16": 2**-11, "fp8_sim": 2**-4}
"""Unit roundoff of the format that matmuls read; e4m3 for fp8_sim."""
FP32 = 2e-6
"""Greatest difference of a loss in fp32: that of docs/many_machines.md."""
ADAMS = 1e-4
"""The same for ``cast``: AdamS follows sign(W), and rounding decides the sign near zero."""

PARTS = ("record", "weights", "optimizer", "state")
"""Hashes of a run: its record without times; tensors of the model, masks included; moments; the
rest of the checkpoint, with counters."""

OTHER_CPU = {"ATEN_CPU_CAPABILITY": "avx2", "MKL_CBWR": "AVX2", "DNNL_MAX_CPU_ISA": "AVX2"}
"""Environment in which torch, MKL and oneDNN choose the code of an older CPU."""
ELSEWHERE = "another CPU"
"""Gate 2 on a CPU that is not the one of the other gates."""


class Case(NamedTuple):
    """One row of the contract."""

    method: str
    precision: str = "fp32"
    parallel: str = "single"
    compile: str = "none"

    @property
    def name(self) -> str:
        return " ".join(self)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return 1 if self.parallel == "single" else 2

    @property
    def is_exact(self) -> bool:
        """True if another world size promises equal bits."""
        return self.parallel == "tree"

    def words(self, size: int) -> list[str]:
        """Return the overrides of a run in ``size`` ranks."""
        group = "single" if size == 1 else "ddp"
        if self.parallel == "fsdp" and size > 1:
            group = "fsdp"
        words = [*SHAPE, f"sparsity={self.method}", *VARIANTS.get(self.method, ())]
        words += [f"precision={self.precision}", f"compile={self.compile}", f"parallel={group}"]
        return [*words, "parallel.reduction=tree"] if self.is_exact else words


def contract() -> list[Case]:
    """Return every method in fp32 with each kind of ranks, then a cover of the other pairs."""
    kinds = ("single", "ddp", "fsdp")
    first = [Case(method, "fp32", kind) for kind in kinds for method in METHODS]
    refused = [Case("sste", precision, parallel) for precision, parallel in REFUSED]
    return [*first, *refused, *cover(first)]


def pairs(case: Sequence[str]) -> Iterator[tuple[tuple[int, str], tuple[int, str]]]:
    """Yield the pairs of values that a case has, as (axis, value) twice."""
    return itertools.combinations(enumerate(case), 2)


def is_refused(values: Sequence[str]) -> bool:
    """Return True if the precision and the parallelism of a case exclude each other."""
    return (values[1], values[2]) in REFUSED


def cover(done: Sequence[Case]) -> list[Case]:
    """Return cases that have, together with ``done``, every pair of values that is not refused."""
    values = list(AXES.values())
    left = dict.fromkeys(
        ((i, a), (j, b))
        for i, j in itertools.combinations(range(len(values)), 2)
        for a in values[i]
        for b in values[j]
        if not (i == 1 and (a, b) in REFUSED)
    )
    for case in done:
        for pair in pairs(case):
            left.pop(pair, None)
    found: list[Case] = []
    while left:
        fixed = dict(next(iter(left)))
        choices = [[fixed[i]] if i in fixed else list(own) for i, own in enumerate(values)]
        # Of equally good ones another is first each time, so that further axes rotate too; except
        # compiled blocks, which take longest.
        k = len(found)
        choices = [own[k % len(own) :] + own[: k % len(own)] for own in choices[:-1]] + choices[-1:]
        options = [o for o in itertools.product(*choices) if not is_refused(o)]
        best = max(options, key=lambda option: sum(pair in left for pair in pairs(option)))
        found.append(Case(*best))
        for pair in pairs(best):
            left.pop(pair, None)
    return found


# ------------------------------------------------------------------------------------------- runs


class Failed(Exception):
    """A run that did not end as it should; the message is the end of its output."""


class Refused(Exception):
    """A configuration that the command refuses; the message is its line."""


class Parent:
    """Warm parent of runs: see tests/support/run_worlds.py."""

    def __init__(self, scratch: Path, name: str, **more: str) -> None:
        env = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", **more}
        env["PYTHONPATH"] = f"{ROOT}:{ROOT / 'tests'}:{env.get('PYTHONPATH', '')}"
        env["SPARSEPRETRAIN_CACHE_DIR"] = str(scratch / "cache")
        env.setdefault("NUMBA_CACHE_DIR", str(cache_directory() / "kernels" / "tests"))
        env["TORCHINDUCTOR_CACHE_DIR"] = str(scratch / f"compiled-by-{name}")  # no spaces: g++
        env["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
        pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        words = [sys.executable, str(SERVER)]
        self._process = subprocess.Popen(words, env=env, cwd=scratch, **pipes)
        self._lock = threading.Lock()

    def run(self, **job: Any) -> dict[str, Any]:
        """Return exit codes and output of a job."""
        store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        assert self._process.stdin is not None and self._process.stdout is not None
        with self._lock:
            print(json.dumps({**job, "port": store.port}), file=self._process.stdin, flush=True)
            return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        self._process.communicate()


class Runs:
    """Trains the runs of a case below a directory of its own."""

    def __init__(
        self, parents: dict[str, Parent], scratch: Path, case: Case, device: str = "cpu"
    ) -> None:
        self._parents, self._case = parents, case
        self._device = [f"parallel.device={device}"]
        if device != "cpu":
            self._device.append("deterministic=true")
        self._root = Path(tempfile.mkdtemp(dir=scratch))
        self._data = f"['{scratch / 'corpus'}/*.txt']"

    def train(self, parent: str, name: str, size: int, *, kill: int = 0, mutant: str = "") -> Path:
        """Train run ``name`` in ``size`` ranks and return its directory.

        Args:
            parent: name of the warm parent.
            name: directory of the run; one that exists is continued.
            size: number of ranks.
            kill: micro-batch of each rank that ends in SIGKILL; 0: none.
            mutant: mistake in the code of the run.

        Raises:
            Refused: the configuration is refused.
            Failed: the run ends otherwise than it should.
        """
        place = self._root / name
        words = ["data=text_files", f"data.files={self._data}", "data.validation=0.3"]
        words += [f"runs_dir='{place}'", *self._case.words(size), *self._device]
        argv = ["train", *words]
        done = self._parents[parent].run(argv=argv, size=size, kill=kill, mutant=mutant)
        lines = [line for line in done["out"].splitlines() if line.startswith("sparsepretrain: ")]
        if 2 in done["codes"] and lines:
            raise Refused(lines[0].removeprefix("sparsepretrain: "))
        if done["codes"] != [-9 if kill else 0] * size:
            raise Failed(f"{name}: exit codes {done['codes']}: {done['out'][-1500:]}")
        found = [file.parent for file in place.rglob("metrics.jsonl")]
        if len(found) != 1:
            raise Failed(f"{name}: {len(found)} run directories: {done['out'][-1500:]}")
        return found[0]

    def has(self, parent: str) -> bool:
        """Return True if there is such a parent."""
        return parent in self._parents

    def killed(self, parent: str, name: str) -> Path:
        """Train until SIGKILL ends all ranks within step ``KILLED_IN``."""
        size = self._case.size
        each = MICRO_BATCHES // size
        number = (KILLED_IN - 1) * each + 1
        number *= 2 if self._case.method == "maskpro" else 1  # two forwards per micro-batch
        return self.train(parent, name, size, kill=number)

    def copy(self, source: str, name: str) -> None:
        """Copy a run; the copy can be continued."""
        shutil.copytree(self._root / source, self._root / name)

    def clear(self) -> None:
        shutil.rmtree(self._root, ignore_errors=True)


def digest(directory: Path) -> dict[str, str]:
    """Return a hash of each of ``PARTS``: equal if and only if all bits are."""
    state = final_state(directory)
    found = {"record": _hash(metrics(directory)), "weights": _hash(state.pop("model"))}
    found["optimizer"] = _hash(state.pop("optimizer"))
    return found | {"state": _hash(state)}


def _hash(value: Any) -> str:
    total = hashlib.sha256()

    def add(value: Any) -> None:
        if isinstance(value, dict):
            for key in sorted(value):
                total.update(f"{key}:".encode())
                add(value[key])
        elif isinstance(value, list | tuple):
            for entry in value:
                add(entry)
        elif isinstance(value, torch.Tensor):
            total.update(f"{value.dtype}{tuple(value.shape)}".encode())
            total.update(value.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        else:
            total.update(repr(value).encode())  # repr of a float gives its bits back
        total.update(b";")

    add(value)
    return total.hexdigest()[:16]


def losses_of(directory: Path) -> list[float]:
    """Return the losses of all lines of the record, evaluations included."""
    return [line["loss"] for line in metrics(directory)]


# ------------------------------------------------------------------------------------------ gates


def bound_of(case: Case, losses: Sequence[float]) -> float:
    """Return the greatest difference of a loss that another order of summation may cause.

    fp32: the promise of docs/many_machines.md. Lower precisions: sums and weights are fp32, so
    another order changes them by 2⁻²⁴, which moves some operands to the neighboring number of
    their format. The loss of a token then changes by a rounding in that format, and a mean over
    independent tokens by less.
    """
    least = ADAMS if case.method == "cast" else FP32
    if case.precision == "fp32":
        return least
    return max(ROUNDOFF[case.precision] * max(losses) / TOKENS**0.5, least)


def drift(left: Sequence[float], right: Sequence[float]) -> float:
    """Return the greatest difference of two losses; infinite if their numbers differ."""
    if len(left) != len(right):
        return float("inf")
    return max(abs(a - b) for a, b in zip(left, right, strict=True))


def differing(left: dict[str, str], right: dict[str, str]) -> list[str]:
    """Return the parts whose bits differ."""
    return [part for part in PARTS if left[part] != right[part]]


def repeated(left: dict[str, str], right: dict[str, str]) -> dict[str, Any]:
    """Judge two runs that have to be equal bit by bit."""
    found = differing(left, right)
    return {"passed": not found, "differ": found}


def near(left: Sequence[float], right: Sequence[float], bound: float) -> dict[str, Any]:
    """Judge two runs whose losses have to agree within ``bound``."""
    apart = drift(left, right)
    return {"passed": apart <= bound, "drift": apart, "bound": bound}


def golden(
    case: Case, own: dict[str, str], losses: list[float], stored: dict[str, Any] | None, cpu: str
) -> dict[str, Any]:
    """Judge a run against the committed bits of this CPU, or else the committed losses."""
    if stored is None:
        return {"passed": True, "how": "recorded"}
    if cpu in stored["bits"]:
        return {**repeated(stored["bits"][cpu], own), "how": f"bits of {stored['commit']}"}
    return {**near(stored["losses"], losses, bound_of(case, losses)), "how": "losses"}


def check(case: Case, runs: Runs, stored: dict[str, Any] | None, cpu: str) -> dict[str, Any]:
    """Return the results of all gates of a case; ``stored``: its golden bits and losses."""
    started = time.monotonic()
    try:
        first = runs.train("first", "first", case.size)
    except Refused as refused:
        return {"refused": str(refused)}
    own, losses = digest(first), losses_of(first)
    bound = bound_of(case, losses)
    again = digest(runs.train("second", "second", case.size))
    runs.killed("first", "killed")
    other = 3 - case.size
    runs.copy("killed", "killed other")
    resumed = digest(runs.train("second", "killed", case.size))
    elsewhere = runs.train("first", "killed other", other)
    if case.is_exact:
        moved = {**repeated(own, digest(elsewhere)), "drift": drift(losses, losses_of(elsewhere))}
    else:
        moved = near(losses, losses_of(elsewhere), bound)
    gates: dict[str, dict[str, Any]] = {
        "repeat": repeated(own, again),
        "golden": golden(case, own, losses, stored, cpu),
        "resume": repeated(own, resumed),
        "resume elsewhere": {**moved, "ranks": other},
    }
    if runs.has("older") and case.compile == "none":  # inductor compiles for this CPU
        old = losses_of(runs.train("older", "older", case.size))
        gates["older CPU"] = near(losses, old, bound)
    runs.clear()
    return {
        "passed": all(gate["passed"] for gate in gates.values()),
        "gates": gates,
        "seconds": round(time.monotonic() - started, 1),
        "own": {"bits": own, "losses": losses},
    }


def compare(
    case: Case,
    runs: Runs,
    stored: dict[str, Any] | None,
    cpu: str,
    commit: str,
    before: dict[str, Any],
) -> dict[str, Any]:
    """Return ``before``, the results of all gates of a case, with gate 2 checked again.

    On another CPU than that of ``before`` the other gates stay its own, and gate 2 gets a second
    result beside that of the first CPU.
    """
    run = runs.train("first", "first", case.size)
    found = golden(case, digest(run), losses_of(run), stored, cpu)
    runs.clear()
    if before["cpu"] == cpu:
        again = {**before, "commit": commit, "gates": {**before["gates"], "golden": found}}
    else:
        elsewhere = {**found, "cpu": cpu, "commit": commit}
        again = {**before, "gates": {**before["gates"], ELSEWHERE: elsewhere}}
    return {**again, "passed": all(gate["passed"] for gate in again["gates"].values())}


# ---------------------------------------------------------------------------------------- mutants


class Mutant(NamedTuple):
    """A mistake, the gate that has to fail because of it, and the case in which it does."""

    name: str
    gate: str
    case: Case


MUTANTS = (
    Mutant("draws of the method from the clock", "repeat", Case("sste")),
    Mutant("dropout from the clock", "repeat", Case("dense", parallel="ddp")),
    Mutant("learning rate one ulp higher", "golden", Case("dense")),
    Mutant("another order of summation", "golden", Case("srste")),
    Mutant("moments not restored", "resume", Case("srste", parallel="ddp")),
    Mutant("counter of the draws not restored", "resume", Case("sste")),
    Mutant("dropout counted from the resume", "resume", Case("dense", parallel="fsdp")),
    Mutant("draws by rank", "resume elsewhere", Case("sste")),
    Mutant("reduction=tree ignored", "resume elsewhere", Case("tsrste", parallel="tree")),
)
"""At least one for each gate, all in fp32."""


def notices(mutant: Mutant, runs: Runs) -> dict[str, Any]:
    """Judge a run with a mistake by the gate of :func:`check` that has to fail."""
    case, name = mutant.case, mutant.name
    right = runs.train("first", "right", case.size)
    if mutant.gate in ("repeat", "golden"):
        wrong = runs.train("second", "wrong", case.size, mutant=name)
        # a mistake of the clock differs from itself, others from the golden bits
        against = (
            runs.train("first", "wrong again", case.size, mutant=name)
            if mutant.gate == "repeat"
            else right
        )
        result = repeated(digest(against), digest(wrong))
    else:
        runs.killed("first", "wrong")
        size = case.size if mutant.gate == "resume" else 3 - case.size
        wrong = runs.train("second", "wrong", size, mutant=name)
        if mutant.gate == "resume" or case.is_exact:
            result = repeated(digest(right), digest(wrong))
        else:
            losses = losses_of(right)
            result = near(losses, losses_of(wrong), bound_of(case, losses))
    apart = drift(losses_of(right), losses_of(wrong))
    runs.clear()
    found = {"gate": mutant.gate, "case": case.name, "noticed": not result["passed"]}
    return found | {"differ": result.get("differ", ["losses"]), "drift": apart}


# ------------------------------------------------------------------------------------------ files


def hardware_key(device: str) -> str:
    """Return the CPU or GPU and the version of torch whose bits are golden."""
    if device == "cuda":
        return f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    facts = dict.fromkeys(("model name", "cpu family", "model"), "")
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            key, _, value = line.partition(":")
            if key.strip() in facts:
                facts[key.strip()] = value.strip()
    name = facts["model name"] or platform.processor() or platform.machine()
    number = f"family {facts['cpu family']} model {facts['model']}"
    capability = torch.backends.cpu.get_cpu_capability()
    return f"{name}, {number}, {capability}, torch {torch.__version__}"


def code_version() -> str:
    """Return the last commit of the code that is checked; with ``-dirty`` if that differs."""
    commit = _git("log", "-1", "--format=%h", "--abbrev=12", "--", *CODE)
    return commit + "-dirty" * bool(_git("status", "--porcelain", "--", *CODE))


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True).stdout.strip()


class Results:
    """docs/determinism.json: a part per kind of check, the golden bits, and what they ran on.

    Attributes:
        content: part -> name -> result; parts of GPUs have names of their own.
    """

    def __init__(self, file: Path, commit: str, cpu: str, device: str = "cpu") -> None:
        self.file, self.commit, self.cpu = file, commit, cpu
        suffix = "" if device == "cpu" else f" on {device}"
        self.cases, self.golden = f"cases{suffix}", f"golden{suffix}"
        parts = (self.cases, self.golden, "mutants", "operators", "costs", "hardware")
        self.content: dict[str, Any] = {part: {} for part in parts}
        if file.is_file():
            self.content |= json.loads(file.read_text(encoding="utf-8"))
        self.content["contract"] = {"cases": [case.name for case in contract()]}
        self._lock = threading.Lock()

    def is_done(self, part: str, name: str) -> bool:
        """Return True if this code has passed the check on this CPU."""
        found = self.content[part].get(name, {})
        here = (found.get("commit"), found.get("cpu")) == (self.commit, self.cpu)
        good = found.get("passed", True) and found.get("noticed", True)
        return here and good and not self.commit.endswith("-dirty")

    def add(self, part: str, name: str, result: dict[str, Any], *, accept: bool = False) -> None:
        """Keep a result and write the file."""
        with self._lock:
            own = result.pop("own", None)
            if own is not None and (accept or name not in self.content[self.golden]):
                self.content[self.golden][name] = {
                    "commit": self.commit,
                    "losses": own["losses"],
                    "bits": {self.cpu: own["bits"]},
                }
            self.content[part][name] = {"commit": self.commit, "cpu": self.cpu} | result
            self.content["hardware"][self.cpu] = {
                "cores": os.cpu_count(),
                "python": platform.python_version(),
                "system": f"{platform.system()} {platform.machine()}",
                "date": datetime.date.today().isoformat(),
            }
            self.write()

    def write(self) -> None:
        """Write one line per entry, so that a change of the file can be read."""
        parts = []
        for part, entries in sorted(self.content.items()):
            rows = [f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in sorted(entries.items())]
            parts.append(f" {json.dumps(part)}: {{\n" + ",\n".join(rows) + "\n }")
        write_atomic(self.file, "{\n" + ",\n".join(parts) + "\n}\n")


# ------------------------------------------------------------------------------------------- main


def main(arguments: list[str]) -> int:
    """Run the checks that are left."""
    parser = argparse.ArgumentParser(prog="scripts/determinism.py")
    parser.add_argument("names", nargs="*", metavar="GLOB", help="names of cases, or of parts")
    parser.add_argument("--again", action="store_true", help="also checks that this code passed")
    parser.add_argument("--accept", action="store_true", help="new bits become the golden ones")
    parser.add_argument("--golden", action="store_true", help="gate 2 alone, of finished cases")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--list", action="store_true", help="print the cases and stop")
    given = parser.parse_args(arguments)
    if given.list:
        print("\n".join(case.name for case in contract()))
        return 0
    results = Results(RESULTS, code_version(), hardware_key(given.device), given.device)

    def is_chosen(part: str, name: str) -> bool:
        named = not given.names or any(fnmatch(x, g) for g in given.names for x in (part, name))
        if given.golden:
            return named and "gates" in results.content[part].get(name, {})
        return named and (given.again or given.accept or not results.is_done(part, name))

    on_cpu = given.device == "cpu"
    cases = [case for case in contract() if is_chosen(results.cases, case.name)]
    mutants = [m for m in MUTANTS if on_cpu and is_chosen("mutants", m.name)]
    older = OTHER_CPU if on_cpu else None
    with tempfile.TemporaryDirectory() as folder, warm_parents(Path(folder), older) as parents:

        def judge(case: Case) -> None:
            stored = None if given.accept else results.content[results.golden].get(case.name)
            runs = Runs(parents, Path(folder), case, given.device)
            if given.golden:
                before = results.content[results.cases][case.name]
                result = attempt(
                    lambda: compare(case, runs, stored, results.cpu, results.commit, before)
                )
            else:
                result = attempt(lambda: check(case, runs, stored, results.cpu))
            results.add(results.cases, case.name, result, accept=given.accept)
            print(f"{case.name}: {summary(result)}", flush=True)

        def challenge(mutant: Mutant) -> None:
            runs = Runs(parents, Path(folder), mutant.case)
            result = attempt(lambda: notices(mutant, runs))
            results.add("mutants", mutant.name, result)
            print(f"mutant, {mutant.name}: {summary(result)}", flush=True)

        # two at a time keep two cores busy; every run then has company that disturbs it
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(judge, cases))
            list(pool.map(challenge, mutants))
    for part, program in PROGRAMS.items():
        if on_cpu and any(is_chosen(part, name) for name in results.content[part] or [part]):
            measured = subprocess.run(
                [sys.executable, str(program)], cwd=ROOT, stdout=subprocess.PIPE, text=True
            )
            if measured.returncode:
                raise SystemExit(f"{program.name} failed")
            for name, result in json.loads(measured.stdout).items():
                results.add(part, name, result)
                print(f"{part}, {name}: {summary(result)}", flush=True)
    return report(results.content)


PROGRAMS = {
    "operators": ROOT / "tests" / "support" / "repeated_operators.py",
    "costs": ROOT / "benchmarks" / "determinism.py",
}
"""Part -> program that prints its results as JSON."""


@contextlib.contextmanager
def warm_parents(scratch: Path, older: dict[str, str] | None) -> Iterator[dict[str, Parent]]:
    """Start the parents of all runs, one in the environment ``older``; write their data."""
    (scratch / "corpus").mkdir()
    write_corpus(scratch / "corpus")
    parents = {
        "first": Parent(scratch, "first", PYTHONHASHSEED="0"),
        "second": Parent(scratch, "second", PYTHONHASHSEED="1", MALLOC_ARENA_MAX="1"),
    }
    if older is not None:
        parents["older"] = Parent(scratch, "older", PYTHONHASHSEED="2", **older)
    try:
        yield parents
    finally:
        for parent in parents.values():
            parent.close()


def attempt(work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return the result of a check; a run that fails is a failed check."""
    try:
        return work()
    except (Failed, Refused) as error:
        return {"passed": False, "error": str(error)}


def summary(result: dict[str, Any]) -> str:
    """Return a result in one line."""
    if "refused" in result:
        return f"refused: {result['refused']}"
    if "error" in result:
        return f"FAILED: {result['error']}"
    if "noticed" in result:
        return "noticed" if result["noticed"] else "NOT NOTICED"
    if "gates" not in result:
        return json.dumps(result)
    bad = {name: gate for name, gate in result["gates"].items() if not gate["passed"]}
    apart = " ".join(f"{g['drift']:.1e}" for g in result["gates"].values() if "drift" in g)
    verdict = f"FAILED {bad}" if bad else "passed"
    return f"{verdict} (drift {apart}; {result['seconds']} s)"


def report(content: dict[str, Any]) -> int:
    """Print the number of failures; 1 if there is one."""
    failed = [
        f"{part}: {name}"
        for part, entries in content.items()
        for name, entry in entries.items()
        if part.startswith(("cases", "mutants", "operators"))
        and not (entry.get("passed", True) and entry.get("noticed", True))
    ]
    cases = content["cases"].values()
    refused = sum("refused" in case for case in cases)
    print(f"{len(cases)} cases, {refused} refused, {len(failed)} checks failed", *failed, sep="\n")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
