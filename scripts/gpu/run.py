"""Run the GPU program, or some of its stages, on a machine that is borrowed for minutes.

    python3 scripts/gpu/run.py 1 --out DIR --seconds 470 --files 8

1, 2 and 3 are the three calls of the program (docs/gpu.md): does it run and is it right, how fast
is it, does it learn. Names of stages run these alone. Every stage has a time limit of its own and
is packed into DIR/results.tar.gz when it ends, so a call that is killed loses one stage.

Only the standard library is imported here: what the machine lacks is told before time is spent.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

ROOT = Path(__file__).resolve().parents[2]
CARRIED = ROOT / ".gpu"
"""Made by prepare.sh: wheels, a tokenizer, and the commit, since git does not travel."""
REQUIRED = (
    "torch", "triton", "numpy", "scipy", "numba", "transformers", "tokenizers", "safetensors",
    "hydra", "omegaconf", "yaml", "rich", "matplotlib",
    "pytest", "xdist", "pytest_timeout", "hypothesis",
)  # fmt: skip
"""Modules that the stages import."""
RESERVE = 10
"""Seconds of a call that are kept for packing."""
SHORTEST = 20
"""A stage that would have fewer seconds than this is not begun."""
GRACE = 8
"""Seconds between SIGTERM and SIGKILL: a run that trains saves what it has recorded."""
TAIL = 40
"""Last lines of a log that are printed and come back outside of the archive."""
SUMMARY, FAILURES, TABLES = "summary.txt", "failures.txt", "tables.txt"
"""States of all stages, ends of logs of failed stages, and of the others."""
SIZE = 16 << 20
"""Largest file in the archive, in bytes; larger ones stay on the machine."""


@dataclass(frozen=True)
class Stage:
    """One command of the program.

    ``command`` is what follows the Python interpreter. ``{out}`` becomes the results file of the
    stage, ``{work}`` the folder of all results, ``{budget}`` the seconds within which the last
    measurement must begin, ``{tokenizer}`` the carried tokenizer, and ``{workers}`` the number of
    test processes.
    """

    seconds: int
    command: Sequence[str]
    kind: Literal["bench", "tests", "text"] = "bench"
    """What its success is read from: a results file, the last line of pytest, the exit code."""
    rehearsed: Sequence[str] = ()
    """Command of a rehearsal; (): the same. Benchmarks get ``--quick`` in addition."""


def bench(seconds: int, script: str, words: str = "", *, only: str = "*") -> Stage:
    """Return a stage that runs a script of benchmarks/, or those of its cases that match ``only``.

    A rehearsal has other, tiny cases, and runs all of them.
    """
    command = f"benchmarks/{script}.py {words} --out {{out}} --budget {{budget}}".split()
    return Stage(seconds, [*command, "--only", only] if only != "*" else command, rehearsed=command)


def tests(seconds: int, path: str, rehearsed: str) -> Stage:
    """Return a stage that runs tests of ``tests/suites``; a rehearsal interprets part of them."""
    pytest = ["-m", "pytest", "-rs", "-p", "no:cacheprovider", "-n", "{workers}", "--maxfail", "30"]
    command = [*pytest, f"tests/suites/{path}"]
    return Stage(seconds, command, kind="tests", rehearsed=[*pytest, f"tests/suites/{rehearsed}"])


AUTO = "--sparse-matmuls auto"
THREE = "--methods sste,tsrste,slope"
FFN = "FFN, training, N=[14]* n=2048 d=[24]0*"
CURVES = "--data site-packages --tokenizer {tokenizer}"

WIDE = "--set batch.micro=32 --micro-batches 2"
"""With the 8 samples of the recipe, a GPU can wait for Python (first results: an H200 does)."""

STAGES: dict[str, Stage] = {
    # call 1: does it run, and is it right?
    "facts": bench(90, "facts"),
    "smoke": bench(200, "smoke"),
    "tests": tests(150, "gpu", "gpu"),
    "first": bench(100, "steps", "--variants dense,sste --rounds 6"),
    "trust": bench(70, "trust"),
    "agree": bench(150, "agree"),
    "triton": tests(170, "kernels_triton", "kernels_triton/test_triton_noise.py"),
    # call 2: how fast?
    "gpt2_124m": bench(
        215,
        "steps",
        f"{WIDE} --variants plain,dense,sste,srste,tsrste,slope,sste+mvue=none,ste "
        "--profile dense,sste",
    ),
    "gpt2_124m-auto": bench(
        115, "steps", f"{WIDE} --variants dense,sste:auto,tsrste:auto,slope:auto"
    ),
    "linear-auto": bench(80, "linear", f"{THREE} {AUTO}"),
    "ffn-auto": bench(130, "blocks", AUTO, only=FFN),
    # call 3: does it learn?
    "train-dense": bench(185, "curves", f"--methods dense {CURVES}"),
    "train-sste": bench(185, "curves", f"--methods sste --after {{work}} {CURVES}"),
    "train-srste": bench(185, "curves", f"--methods srste --after {{work}} {CURVES}"),
    # with time left
    "small": bench(110, "steps", "--variants plain,dense,sste"),
    "attention": bench(90, "steps", "--attention cudnn --variants dense"),
    "llama_1b": bench(  # 12 of 24 layers, so that three models fit
        170,
        "steps",
        "--model llama_1b --set model.n_layer=12 --rounds 6 --variants dense,sste:auto,tsrste:auto",
    ),
    "llama_130m": bench(
        150, "steps", "--model llama_130m --variants plain,dense,sste,srste,tsrste"
    ),
    "gpt2_774m": bench(
        200,
        "steps",
        "--model gpt2_774m --rounds 6 --variants dense,sste:auto,tsrste:auto,slope:auto",
    ),
    "kernels": bench(300, "kernels"),
    "square": bench(200, "square"),
    "linear": bench(200, "linear"),
    "blocks": bench(300, "blocks"),
    "blocks-auto": bench(400, "blocks", AUTO),
    "linear-fp8": bench(120, "linear", "--methods sste,tsrste --fp8"),
    "linear-fp8-auto": bench(150, "linear", f"--methods sste,tsrste --fp8 {AUTO}"),
    "doctor": Stage(60, ("-m", "sparsepretrain", "doctor"), kind="text"),
}

CALLS: dict[str, tuple[str, ...]] = {
    "1": ("facts", "smoke", "tests", "first", "trust", "agree", "triton"),
    "2": ("gpt2_124m", "gpt2_124m-auto", "linear-auto", "ffn-auto"),
    "3": ("train-dense", "train-sste", "train-srste"),
}

PASSED, MISSING = "passed", "not begun"


@dataclass
class Outcome:
    """State of one stage; everything but ``passed`` counts as missing."""

    stage: str
    status: str = MISSING
    seconds: float = 0.0
    note: str = ""

    def __str__(self) -> str:
        text = f"{self.stage}: {self.status}"
        if self.seconds:
            text += f" after {self.seconds:.0f} s"
        return f"{text} ({self.note})" if self.note else text


@dataclass
class Call:
    """One call: its stages in order, and the folder whose files come back."""

    names: Sequence[str]
    out: Path
    seconds: float
    files: int
    rehearsal: bool = False
    stages: dict[str, Stage] = field(default_factory=lambda: STAGES)
    work: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix="gpu-results-")))
    environment: dict[str, str] = field(default_factory=lambda: dict(os.environ))
    about: dict[str, Any] = field(default_factory=dict)
    """Commit, device and versions, as benchmarks/harness.py reports them."""
    child: subprocess.Popen[bytes] | None = None

    def __post_init__(self) -> None:
        self.begun = time.monotonic()
        self.outcomes = {name: Outcome(name) for name in self.names}

    @property
    def left(self) -> float:
        """Seconds of the call that stages may still use."""
        return self.seconds - RESERVE - (time.monotonic() - self.begun)

    def run(self) -> int:
        """Run all stages; return 0 if each of them passed, else 1."""
        self.pack()  # a call that is killed in its first stage leaves a summary too
        self.about = self.describe()
        if self.rehearsal or self.about.get("gpu") is not None:
            for name in self.names:
                self.run_stage(name)
                self.pack()
        else:  # on a CPU the stages would take minutes and measure nothing
            why = self.about.get("unknown", "`python3 -m sparsepretrain doctor` says why")
            print(f"run.py: torch sees no CUDA GPU ({why}); --rehearse runs the stages without one")
            self.pack()
        print(self.summary(), flush=True)
        return int(any(outcome.status != PASSED for outcome in self.outcomes.values()))

    def describe(self) -> dict[str, Any]:
        """Return commit, device and versions; asked in a process of its own, which may die."""
        code = "import json, harness; print(json.dumps(harness.header('run', [], False)))"
        command = [sys.executable, "-c", code]
        try:
            done = subprocess.run(
                command, env=self.environment, cwd=ROOT, capture_output=True, text=True, timeout=60
            )
            if done.returncode == 0:
                return dict(json.loads(done.stdout.splitlines()[-1]))
            return {"unknown": (done.stderr.splitlines() or [f"exit code {done.returncode}"])[-1]}
        except subprocess.TimeoutExpired:
            return {"unknown": "importing torch took more than 60 s"}

    def run_stage(self, name: str) -> None:
        """Run one stage within its limit and that of the call, and judge it."""
        stage, outcome = self.stages[name], self.outcomes[name]
        limit = min(stage.seconds, self.left)
        if limit < SHORTEST:
            outcome.note = f"{max(self.left, 0):.0f} s of {self.seconds:.0f} left"
            return
        outcome.status = "begun"
        self.pack()
        print(f"== {name}, at most {limit:.0f} s", flush=True)
        results = self.work / f"{name}.json"
        values = {
            "out": str(results),
            "work": str(self.work),
            "budget": f"{max(limit - 25, limit * 2 / 3):.0f}",
            "tokenizer": str(CARRIED / "tokenizer.json"),
            "workers": "2" if self.rehearsal else "8",
        }
        words = (stage.rehearsed if self.rehearsal else ()) or stage.command
        command = [sys.executable, *(word.format(**values) for word in words)]
        if self.rehearsal and stage.kind == "bench":
            command.append("--quick")
        started = time.monotonic()
        log = self.work / f"{name}.log"
        with log.open("wb") as stream:
            code = self.wait(command, stream, limit)
        outcome.seconds = time.monotonic() - started
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
        if stage.kind == "bench":
            found = judge_cases(code, cases_of(results), rehearsal=self.rehearsal)
        else:
            found = judge_text(code, lines, tests=stage.kind == "tests")
        outcome.status, outcome.note = found
        tail = lines[-TAIL:]
        name = TABLES if outcome.status == PASSED else FAILURES
        with (self.work / name).open("a", encoding="utf-8") as texts:
            texts.write("\n".join([f"==== {outcome}", *tail, ""]))
        print("\n".join(line[:200] for line in tail), flush=True)
        print(f"== {outcome}", flush=True)

    def wait(self, command: Sequence[str], log: Any, limit: float) -> int | None:
        """Return the exit code of ``command``; None: it reached ``limit`` and was stopped."""
        self.child = subprocess.Popen(
            command, stdout=log, stderr=log, cwd=ROOT, env=self.environment, start_new_session=True
        )
        try:
            return self.child.wait(limit)
        except subprocess.TimeoutExpired:
            self.stop()
            return None
        finally:
            self.stop()  # processes that a stage has left would disturb the next one
            self.child = None

    def stop(self) -> None:
        """End the running stage with all its processes."""
        if self.child is None:
            return
        for number, patience in ((signal.SIGTERM, GRACE), (signal.SIGKILL, None)):
            try:
                os.killpg(self.child.pid, number)
            except ProcessLookupError:
                return
            try:
                self.child.wait(patience)
            except subprocess.TimeoutExpired:
                continue

    def summary(self) -> str:
        """Return commit, device and versions, then a line per stage."""
        missing = [o.stage for o in self.outcomes.values() if o.status != PASSED]
        count = f"{len(self.outcomes) - len(missing)} of {len(self.outcomes)} stages passed"
        lines = [*described(self.about), *map(str, self.outcomes.values())]
        lines.append(f"{count}; missing: {', '.join(missing)}" if missing else f"all {count[5:]}")
        return "\n".join(lines)

    def pack(self) -> None:
        """Renew the files that come back: the archive, then the texts, at most ``files``."""
        stages = [dataclasses.asdict(outcome) for outcome in self.outcomes.values()]
        state = json.dumps({"about": self.about, "stages": stages}, indent=1)
        (self.work / "summary.json").write_text(state + "\n", encoding="utf-8")
        (self.work / SUMMARY).write_text(self.summary() + "\n", encoding="utf-8")
        part = self.out / ".part"
        with tarfile.open(part, "w:gz") as archive:
            archive.add(self.work, "results", filter=kept)
        part.replace(self.out / "results.tar.gz")
        texts = [name for name in (SUMMARY, FAILURES, TABLES) if (self.work / name).exists()]
        for name in texts[self.files - 1 :]:  # a first failure takes the place of the tables
            (self.out / name).unlink(missing_ok=True)
        for name in texts[: self.files - 1]:
            shutil.copyfile(self.work / name, part)
            part.replace(self.out / name)


def kept(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
    """Return None for what does not travel: checkpoints and large files."""
    return None if "checkpoints" in entry.name.split("/") or entry.size > SIZE else entry


def described(about: dict[str, Any]) -> list[str]:
    """Return commit, device and versions as lines."""
    if "environment" not in about:
        return [f"environment: {about.get('unknown', 'not asked yet')}"]
    found, gpu = about["environment"], about["gpu"] or {}
    versions = [f"{name} {found['packages'].get(name)}" for name in ("torch", "triton")]
    library = f"cuSPARSELt {gpu.get('cusparselt', 'none')}"
    python = f"Python {found['python']}"
    return [
        f"commit {found['commit']}",
        f"{found['hardware']['device']}, driver {gpu.get('driver_version', 'none')}",
        ", ".join([python, *versions, library]),
    ]


def judge_text(code: int | None, lines: Sequence[str], *, tests: bool) -> tuple[str, str]:
    """Return status and note of a stage of tests or text; ``code`` None: it reached its limit."""
    counted = [line.strip("= ") for line in lines if re.search(r"\d+ (passed|failed|error)", line)]
    note = counted[-1] if tests and counted else ""
    if code:
        return f"failed with exit code {code}", note
    if code is None:
        return "out of time", note
    if tests and not re.search(r"[1-9]\d* passed", note):
        return "incomplete", "no test passed"
    return PASSED, note


def judge_cases(
    code: int | None, cases: Sequence[dict[str, Any]], *, rehearsal: bool
) -> tuple[str, str]:
    """Return status and note of a benchmark; ``code`` None: it reached its limit.

    A case that was skipped is not measured, so the stage counts as missing, except in a rehearsal,
    which has no GPU.
    """
    note = counts(cases)
    if code is None:
        return "out of time", note
    if code not in (0, 1) or not cases or any(is_wrong(case) for case in cases):
        return f"failed with exit code {code}", note
    if code == 1:
        missed = [case["name"] for case in cases if case["ok"] is False]
        return "missed a goal", "; ".join(missed)[:200]
    if not rehearsal and any(case["status"].startswith("skipped") for case in cases):
        return "incomplete", note
    return PASSED, note


def cases_of(results: Path) -> list[dict[str, Any]]:
    """Return the cases of a results file; none if it is missing."""
    try:
        return list(json.loads(results.read_text(encoding="utf-8"))["cases"])
    except (OSError, ValueError, KeyError):
        return []


def is_wrong(case: dict[str, Any]) -> bool:
    """Return True if a case is wrong or failed."""
    return case["status"].startswith(("wrong", "failed"))


def counts(cases: Sequence[dict[str, Any]]) -> str:
    """Return how many cases were measured, and the first that was not."""
    odd = [case for case in cases if case["status"] != "ok"]
    text = f"{len(cases) - len(odd)} of {len(cases)} cases"
    return f"{text}; {odd[0]['name']}: {odd[0]['status']}"[:200] if odd else text


def clean_checkout() -> bool:
    """Return True if git knows these files; a copy may lie in a repository of an older commit."""
    try:
        status = ["git", "status", "--porcelain", "--untracked-files=no"]
        done = subprocess.run(status, cwd=ROOT, capture_output=True, text=True)
    except FileNotFoundError:
        return False
    return done.returncode == 0 and not done.stdout


def prepared(work: Path) -> dict[str, str]:
    """Return the environment of the stages, with the carried wheels installed for them.

    Raises:
        SystemExit: the machine lacks a package that is not carried.
    """
    environment = dict(os.environ)
    site = work.parent / f"{work.name}-site"
    paths = [str(ROOT), str(ROOT / "benchmarks"), str(site)]
    if earlier := os.environ.get("PYTHONPATH"):
        paths.append(earlier)
    environment["PYTHONPATH"] = os.pathsep.join(paths)
    environment |= {"PYTHONUNBUFFERED": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    environment.setdefault("TOKENIZERS_PARALLELISM", "true")
    environment.setdefault(
        "SPARSEPRETRAIN_CACHE_DIR", str(Path(tempfile.gettempdir()) / "gpu-cache")
    )
    if (CARRIED / "commit").exists() and not clean_checkout():
        environment["SPARSEPRETRAIN_COMMIT"] = (CARRIED / "commit").read_text().strip()
    wheels = sorted(map(str, (CARRIED / "wheels").glob("*.whl")))
    missing = [name for name in REQUIRED if importlib.util.find_spec(name) is None]
    if missing and wheels:
        install = "-m pip install --quiet --no-index --no-deps --no-compile --no-cache-dir --target"
        subprocess.run([sys.executable, *install.split(), str(site), *wheels], check=True)
        sys.path.append(str(site))
        importlib.invalidate_caches()
        missing = [name for name in REQUIRED if importlib.util.find_spec(name) is None]
    if missing:
        raise SystemExit(
            f"run.py: this Python ({sys.executable}) has no {', '.join(missing)}. Run "
            "scripts/gpu/prepare.sh where packages can be downloaded, and bring its .gpu/ along"
        )
    return environment


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line and run a call."""
    parser = argparse.ArgumentParser(
        prog="scripts/gpu/run.py", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("names", nargs="+", metavar="CALL|STAGE", help="1, 2, 3 or names of stages")
    parser.add_argument("--out", type=Path, required=True, help="folder whose files come back")
    parser.add_argument("--seconds", type=float, default=560, help="time limit of the whole call")
    parser.add_argument("--files", type=int, default=8, help="most files that come back")
    parser.add_argument("--rehearse", action="store_true", help="without a GPU, at tiny sizes")
    given = parser.parse_args(arguments)
    names: list[str] = []
    for word in given.names:
        names += CALLS.get(word, (word,))
    if unknown := [name for name in names if name not in STAGES]:
        parser.error(
            f"unknown stage {unknown[0]}; calls: {', '.join(CALLS)}; stages: {', '.join(STAGES)}"
        )
    if given.files < 2:
        parser.error(f"--files: expected at least 2 (archive, summary), got {given.files}")
    try:
        given.out.mkdir(parents=True, exist_ok=True)
        (given.out / ".part").touch()
    except OSError as error:
        parser.error(f"--out: {given.out} cannot be written: {error.strerror}")
    call = Call([*dict.fromkeys(names)], given.out, given.seconds, given.files, given.rehearse)
    call.environment = prepared(call.work)
    call.environment["SPARSEPRETRAIN_TEST_DEVICE"] = "cpu" if given.rehearse else "cuda"
    if given.rehearse:
        call.environment |= {"CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "1"}

    def stopped(number: int, frame: object) -> None:
        call.stop()
        call.pack()
        sys.exit(128 + number)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, stopped)
    return call.run()


if __name__ == "__main__":
    sys.exit(main())
