"""Time training steps of a recipe: plain PyTorch, the dense run, and every method.

    python benchmarks/steps.py --model gpt2_124m --variants plain,dense,sste,sste:auto

All variants live in one process and take turns, and a ratio is the median over rounds. ``plain`` is
the model and its loss in one compiled graph with fused AdamW, as nanoGPT trains it. Every other
variant is the recipe in the trainer, with ``compile=blocks``: a method, options of it and, for 2:4
matmuls where they are faster than dense ones, ``:auto`` (``sste+mvue=none:auto``).

A variant that fails or does not fit into memory is a row of the table; the results file is renewed
after every variant and every round. Without a GPU a tiny model is timed, to see that it works.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import statistics
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile

from gpt2 import PlainGPT2
from harness import CPU, Case, header, ratios, reason, write_results
from linear import timed_methods
from sparsepretrain import registry
from sparsepretrain.config import compose, validate
from sparsepretrain.config.schema import Run
from sparsepretrain.console import Console
from sparsepretrain.errors import ConfigError
from sparsepretrain.kernels.timing import Series
from sparsepretrain.sparsity.matmuls.sparse24 import PACKED
from sparsepretrain.sparsity.method import Method
from sparsepretrain.tasks import Batch, Task, build_task
from sparsepretrain.training.assembly import META, build_model, build_session
from sparsepretrain.training.hardware import peak_flops
from sparsepretrain.training.loop import train_step
from sparsepretrain.training.session import Session
from sparsepretrain.training.tracing import step_cost

OFFLINE = {
    "causal_lm": ("data=python_source", "task.documents=false"),
    "masked_lm": ("data=python_source",),
    "translation": ("data=cldr_ende",),
    "image_classification": ("data=digits",),
}
"""Task -> overrides for data that need no download. Causal language models get random tokens."""
TINY = ("model.n_layer=1", "task.sequence_length=16", "batch.micro=2")
"""Overrides of gpt2_nano, which is timed without a GPU whatever ``--model`` and ``--set`` say."""
PLAIN = "plain"
BASELINES = (PLAIN, "dense")
KERNELS = 40
"""Kernels of a profile, the most expensive first."""
ATTENTION = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}
OTHER_ATTENTION = (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH)


class Variant(ABC):
    """Something that trains."""

    note: str = ""
    """Shown in its row of the table."""

    @abstractmethod
    def step(self) -> None:
        """Launch one optimizer step; nothing waits for the device."""

    @abstractmethod
    def loss(self) -> float:
        """Return the loss of the last step."""

    def close(self) -> None:  # noqa: B027, most have none
        """Stop its workers, if it has some."""


def training(overrides: Sequence[str]) -> Session:
    """Build a run that is ready to step; nothing is written."""
    return build_session(validate(compose([*overrides, "tracker=jsonl"], [])), Console.silent())


class Trainer(Variant):
    """A run of the recipe in the trainer, on batches that all variants share."""

    def __init__(self, overrides: Sequence[str], batches: list[Batch] | None) -> None:
        self.session = training(overrides)
        shared = self.session.batches.step(0) if batches is None else batches
        self.session.batches.step = lambda step: shared  # type: ignore[method-assign]
        coverage = self.session.sparsifier.coverage()
        self.note = "" if coverage.sparse_matmuls == "emulate" else coverage.chosen

    def step(self) -> None:
        self.last = train_step(self.session)

    def loss(self) -> float:
        return self.last.loss

    def close(self) -> None:
        self.session.batches.close()


class Plain(Variant):
    """A causal language model in plain PyTorch: nanoGPT's way.

    GPT-2 is the model of gpt2.py, others are the recipe's. Model and loss are one compiled graph;
    fused AdamW, clipping and bf16 autocast.
    """

    def __init__(self, run: Run, task: Task, batches: list[Batch], device: torch.device) -> None:
        self.device, self.batches, options = device, batches, task.model_options
        torch.manual_seed(0)
        if options.family == "gpt2":
            names = ("n_embd", "n_layer", "n_head", "n_positions", "vocab_size")
            model: Any = PlainGPT2(SimpleNamespace(**{k: getattr(options, k) for k in names}))
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    torch.nn.init.normal_(parameter, std=0.02)
            self.logits: Callable[[Tensor], Tensor] = model.to(device)
        else:
            model = build_model(task, device)
            self.logits = lambda tokens: task.recipe.logits(model, tokens)
        self.parameters = list(model.parameters())
        fused = device.type == "cuda"
        self.optimizer = torch.optim.AdamW(self.parameters, lr=1e-4, weight_decay=0.1, fused=fused)
        # a CPU has no use for a compiled graph here: the rehearsal would wait for it
        self.mean_loss = torch.compile(self._mean_loss) if fused else self._mean_loss
        self.clip = run.clip
        self.losses: list[Tensor] = []

    def _mean_loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.logits(tokens).float().flatten(0, 1), targets.flatten())

    def step(self) -> None:
        self.losses = []
        for batch in self.batches:
            moved = [batch[k].to(self.device, non_blocking=True) for k in ("tokens", "targets")]
            with torch.autocast(self.device.type, torch.bfloat16):
                loss = self.mean_loss(*moved) / len(self.batches)
            loss.backward()
            self.losses.append(loss.detach())
        if self.clip is not None:
            torch.nn.utils.clip_grad_norm_(self.parameters, self.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def loss(self) -> float:
        return float(sum(self.losses))


class Bench:
    """Builds variants, times them in turns, and keeps a case for each."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.given, self.begun = given, time.monotonic()
        self.cuda = torch.cuda.is_available()
        self.device = torch.device("cuda:0") if self.cuda else CPU
        recipe = validate(compose(self.words([]), []))
        self.shared = [*OFFLINE.get(recipe.task.name, ()), *given.set]
        self.recipe = validate(compose([*self.words([]), *self.shared], []))
        micro = self.recipe.batch.micro
        self.sizes = [f"batch.micro={micro}", f"batch.size={micro * given.micro_batches}"]
        self.run = validate(compose(self.overrides(["sparsity=dense"]), []))
        self.task = build_task(self.run)
        cost = step_cost(self.run, self.task, build_model(self.task, META))
        self.flops, self.items = cost.flops, cost.items
        self.peak = peak_flops(self.device, "bf16")
        self.batches = random_tokens(self.run, self.task, given.micro_batches)
        self.cases: dict[str, Case] = {}
        self.ready: dict[str, Variant] = {}
        self.times: dict[str, list[tuple[float, float]]] = {}
        self.head = header("steps", sys.argv[1:], given.quick)
        self.head["recipe"] = {
            "model": given.model,
            "overrides": given.set,
            "micro_batches": given.micro_batches,
            "batch.micro": self.run.batch.micro,
            "items_per_step": self.items,
            "flops_per_step": self.flops,
        }

    @property
    def spent(self) -> float:
        """Seconds since the start, as a share of the budget."""
        return (time.monotonic() - self.begun) / (self.given.budget or float("inf"))

    def words(self, more: Sequence[str]) -> list[str]:
        """Return the overrides of a run: few micro-batches, bf16, nothing but steps."""
        quiet = ("eval.batches=0", "log.every=1000000", "log.layers_every=0", "tracker=jsonl")
        return [f"model={self.given.model}", "precision=bf16", *more, *quiet]

    def overrides(self, more: Sequence[str]) -> list[str]:
        """Return the overrides of a variant: those of :meth:`words`, data and sizes of all."""
        return [*self.words(more), *self.shared, *self.sizes]

    def build(self, label: str) -> Variant:
        """Build a variant from its label."""
        if label == PLAIN and self.batches is not None:
            return Plain(self.run, self.task, self.batches, self.device)
        method, colon, sparse_matmuls = label.partition(":")
        name, *options = method.split("+")
        words = [f"sparsity={name}", *(f"sparsity.{option}" for option in options)]
        if colon:
            words.append(f"sparse_matmuls={sparse_matmuls}")
        if self.cuda:  # a rehearsal would compile for minutes
            words.append("compile=blocks")
        return Trainer(self.overrides(words), self.batches)

    def add(self, label: str) -> None:
        """Build a variant and let it take its first steps, which compile; a failure is a case."""
        why = f"{self.given.budget:.0f} s are over" if self.spent > 0.8 else ""
        if label == PLAIN and self.batches is None:
            why = "plain PyTorch is written for causal language models only"
        if why:
            self.cases[label] = Case(name=label, unit="ms", status=f"skipped: {why}")
            return
        before = torch.cuda.memory_allocated() if self.cuda else 0
        try:
            started = time.perf_counter()
            variant = self.build(label)
            built = time.perf_counter()
            variant.step()
            loss = variant.loss()
            self.synchronize()
            detail: dict[str, Any] = {
                "build_s": built - started,
                "first_step_s": time.perf_counter() - built,
            }
            variant.step()  # a graph may be compiled again for the phase after the first step
            self.synchronize()
            detail |= {"first_loss": loss, "note": variant.note}
            if self.cuda:
                torch.cuda.reset_peak_memory_stats()
                held = torch.cuda.memory_allocated()
                variant.step()
                self.synchronize()
                # other variants are resident too, and were before this one was built
                peak = torch.cuda.max_memory_allocated()
                detail |= {"peak_gib": (peak - before) / 2**30, "held_gib": (held - before) / 2**30}
            self.cases[label] = Case(name=label, unit="ms", detail=detail)
            self.ready[label], self.times[label] = variant, [self.time(variant)]
        except torch.OutOfMemoryError:
            self.cases[label] = Case(name=label, unit="ms", status="failed: out of memory")
        except Exception as error:  # the other variants are worth their time
            text = f"failed: {type(error).__name__}: {reason(error)}"
            self.cases[label] = Case(name=label, unit="ms", status=text)
        if self.cuda:
            gc.collect()
            torch.cuda.empty_cache()

    def time(self, variant: Variant) -> tuple[float, float]:
        """Return the seconds of a step, and those until the host had launched it."""
        self.synchronize()
        started = time.perf_counter()
        variant.step()
        launched = time.perf_counter() - started
        self.synchronize()
        return time.perf_counter() - started, launched

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.cuda:
            torch.cuda.synchronize()

    def rounds(self) -> None:
        """Time all variants in turns, the order rotating; first times did not take turns."""
        names = list(self.ready)
        for series in self.times.values():
            series.clear()
        for index in range(self.given.rounds):
            if index >= 3 and self.spent > 1:
                break
            shift = index % max(len(names), 1)
            for label in names[shift:] + names[:shift]:
                self.times[label].append(self.time(self.ready[label]))
            self.report()

    def report(self) -> None:
        """Update the cases from the times so far, and write them."""
        series = {k: Series(us=[1e6 * t for t, _ in v], mode="step") for k, v in self.times.items()}
        for label, taken in self.times.items():
            case, micros = self.cases[label], self.given.micro_batches
            seconds = statistics.median(total for total, _ in taken)
            host = statistics.median(launched / total for total, launched in taken)
            rate = self.items / seconds
            full_steps = self.recipe.steps * self.recipe.batch.size / self.run.batch.size
            case.value = 1e3 * seconds
            case.detail |= {
                "rounds": len(taken),
                "ms_per_micro_batch": 1e3 * seconds / micros,
                f"{self.task.unit}_per_second": rate,
                "host_share": host,
                "hours_of_the_recipe": full_steps * seconds / 3600,
            }
            if self.peak is not None:
                case.detail["mfu_dense"] = self.flops / seconds / self.peak
            for other in BASELINES:
                paired = other in series and len(series[other].us) == len(taken)
                if paired and other != label:
                    found = ratios(series[label], series[other])
                    case.detail[f"over_{other}"] = statistics.median(found)
        write_results(self.given.out, self.head, list(self.cases.values()))

    def table(self) -> str:
        """Return a line per variant."""
        run, given = self.run, self.given
        shape = f"{given.micro_batches} micro-batches of {run.batch.micro} {self.task.sample}"
        unit = self.task.unit
        lines = [f"{given.model} {' '.join(given.set)}: {shape} a step, bf16"]
        for label, case in self.cases.items():
            found = case.detail
            if case.value is None:
                lines.append(f"  {label:20} {case.status}")
                continue
            text = f"  {label:20} {case.value:9.1f} ms a step"
            text += f" {found['ms_per_micro_batch']:8.1f} ms a micro-batch"
            speed = found[f"{unit}_per_second"] / 1e3
            text += f"  {speed:8.1f} k {unit}/s"
            text += f"  host {found['host_share']:4.0%}"
            if "mfu_dense" in found:
                text += f"  MFU {found['mfu_dense']:5.1%}"
            for other in BASELINES:
                ratio = found.get(f"over_{other}")
                if ratio is not None:
                    text += f"  {ratio:.3f}× {other}"
            if "peak_gib" in found:
                text += f"  {found['peak_gib']:.2f} GiB"
            text += f"  first step {found['first_step_s']:.0f} s  {found['note']}"
            lines.append(text.rstrip())
        return "\n".join(lines)

    def profile(self, label: str) -> None:
        """List the most expensive kernels of one step in the results."""
        kinds = [ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * self.cuda]
        with profile(activities=kinds) as profiled:
            self.ready[label].step()
            self.synchronize()
        key = "self_device_time_total" if self.cuda else "self_cpu_time_total"
        events = sorted(profiled.key_averages(), key=lambda e: -getattr(e, key))[:KERNELS]
        self.head.setdefault("profiles", {})[label] = [
            {"kernel": event.key[:200], "us": getattr(event, key), "calls": event.count}
            for event in events
        ]
        self.report()

    def close(self) -> None:
        """Stop the workers of all variants."""
        for variant in self.ready.values():
            variant.close()


def random_tokens(run: Run, task: Task, count: int) -> list[Batch] | None:
    """Return micro-batches of random tokens for a causal language model, else None.

    The offline text is bytes, which would read 256 rows of the embedding only.
    """
    if run.task.name != "causal_lm":
        return None
    random, options = torch.Generator().manual_seed(0), task.model_options
    size = (run.batch.micro, run.task.sequence_length + 1)
    rows = [torch.randint(options.vocab_size, size, generator=random) for _ in range(count)]
    batches: list[Batch] = [
        {"tokens": row[:, :-1].contiguous(), "targets": row[:, 1:].contiguous()} for row in rows
    ]
    if torch.cuda.is_available():
        batches = [{k: v.pin_memory() for k, v in batch.items()} for batch in batches]
    return batches


def every_variant() -> list[str]:
    """Return plain PyTorch, dense, and all methods, those with 2:4 operands also with `:auto`."""
    found = [PLAIN]
    for method, options in timed_methods().values():
        words = [f"{k}={str(v).replace(' ', '')}" for k, v in options.items()]
        label = "+".join([method, *words])
        found += [label] if label not in found else []
        if packs(method):
            found.append(f"{label}:auto")
    return found


def packs(method: str) -> bool:
    """Return True if the method has a 2:4 operand that cuSPARSELt can read packed."""
    implementation: type[Method] = registry.get("method", method)
    options = validate(compose([f"sparsity={method}"], [])).sparsity
    row = implementation(options, 1000).sparse_row
    return any(getattr(row, name).pattern == (2, 4) for name in PACKED)


@contextlib.contextmanager
def attention(name: str | None) -> Iterator[None]:
    """Prefer one kernel of scaled dot-product attention; it is chosen when a block is compiled."""
    if name is None:
        yield
        return
    with sdpa_kernel([ATTENTION[name], *OTHER_ATTENTION], set_priority=True):
        yield


def main(arguments: Sequence[str] | None = None) -> int:
    """Time the variants; return 1 if one of them failed, else 0."""
    parser = argparse.ArgumentParser(prog="benchmarks/steps.py")
    parser.add_argument("--model", default="gpt2_124m", metavar="RECIPE")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--variants", default="", metavar="A,B", help="default: every method")
    parser.add_argument("--micro-batches", type=int, default=4, help="micro-batches of a step")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--profile", default="", metavar="A,B", help="list kernels of these")
    parser.add_argument("--attention", choices=[*ATTENTION], help="kernel to prefer")
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="write the results here")
    parser.add_argument("--budget", type=float, metavar="S", help="end after about S seconds")
    parser.add_argument("--quick", action="store_true", help="two rounds: does the script run?")
    given = parser.parse_args(arguments)
    if given.quick:
        given.rounds = min(given.rounds, 2)
    if not torch.cuda.is_available():
        print(f"no CUDA GPU: a tiny gpt2_nano instead of {given.model}", flush=True)
        given.model, given.set = "gpt2_nano", list(TINY)
    try:
        bench = Bench(given)
    except ConfigError as error:
        print(f"steps.py: {error}", file=sys.stderr)
        return ConfigError.exit_code
    labels = list(filter(None, given.variants.split(","))) or every_variant()
    try:
        with attention(given.attention):
            for label in labels:
                bench.add(label)
                bench.report()
                print(f"{label}: {bench.cases[label].status}", flush=True)
            bench.rounds()
            for label in filter(None, given.profile.split(",")):
                if label in bench.ready and bench.spent < 1:
                    bench.profile(label)
    finally:
        bench.close()
    print(bench.table())
    return int(any(case.is_error for case in bench.cases.values()))


if __name__ == "__main__":
    sys.exit(main())
