"""Short trainings of GPT-2 124M, every method beside dense (``suite=train``).

Plain PyTorch with ``sparsify``, on the bytes of this package's own sources: nothing is downloaded
and nothing but torch and triton is imported. Steps of all methods alternate in one process.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import sparsepretrain
from sparsepretrain.bench import EVERYTHING, Choice, gpu
from sparsepretrain.bench.kernels import Timed, draw, skipped
from sparsepretrain.bench.linear import timed_methods
from sparsepretrain.bench.plain import PlainGPT2
from sparsepretrain.bench.timing import interleaved
from sparsepretrain.optim.adamw import AdamWOptions
from sparsepretrain.sparsity import Sparsifier, sparsify

__all__ = ["cases", "draw"]

GPT2_124M = {"n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024, "vocab_size": 50304}
ADAMW: Any = {"name": "adamw", "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
TINY = {"n_embd": 64, "n_layer": 2, "n_head": 2, "n_positions": 64, "vocab_size": 256}


@dataclass(slots=True, kw_only=True)
class Trained(Timed):
    """A timed training, with what it learnt."""

    losses: list[float] = field(default_factory=list)
    flip_rate: float | None = None


def cases(quick: bool, choice: Choice = EVERYTHING) -> list[Timed]:
    """Train with every method; on a GPU compiled and in bf16, else tiny and eager in fp32."""
    cuda = torch.cuda.is_available()
    device = torch.device("cuda" if cuda else "cpu")
    steps = (10 if quick else 50) if cuda else 3
    sizes, batch = (GPT2_124M, 8) if cuda else (TINY, 2)
    data = source_bytes()
    only = choice.methods or (("sste",) if quick or not cuda else ())
    names = [n for n in timed_methods(only) if not quick or n in ("dense", *only)]
    runs = {n: Training(n, sizes, batch, data, device, compiled=cuda, choice=choice) for n in names}
    how = choice.how
    works: dict[str, Callable[[], object]] = {n: run.step for n, run in runs.items()}
    seconds = interleaved(works, rounds=steps, warmup=2)
    series = {n: gpu.Series(us=[1e6 * s for s in seconds[n]], mode="step") for n in names}
    whole = f"training step, GPT-2 124M, bf16, compiled{how}"
    trained: list[Timed] = [
        Trained(
            case=whole if cuda else f"training step, tiny{how}",
            shape=[batch, sizes["n_positions"]],
            impl=name,
            status="ok" if all(map(math.isfinite, run.losses)) else "wrong",
            mode="step",
            us=series[name].percentiles(),
            ratio_to={"dense": gpu.median_ratio(series["dense"], series[name])},
            losses=run.losses,
            flip_rate=run.sparsifier.metrics().get("flip_rate"),
        )
        for name, run in runs.items()
    ]
    return trained if cuda else [skipped(whole, []), *trained]


@functools.cache
def source_bytes() -> Tensor:
    """The package's Python files as int64 byte values."""
    files = sorted(Path(sparsepretrain.__file__).parent.rglob("*.py"))
    text = b"".join(path.read_bytes() for path in files)
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long()


class Training:
    """A model, its optimiser and its data; equal initial weights and batches for each."""

    def __init__(
        self,
        name: str,
        sizes: dict[str, int],
        batch: int,
        data: Tensor,
        device: torch.device,
        *,
        compiled: bool = False,
        lr: float = 6e-4,
        choice: Choice = EVERYTHING,
    ) -> None:
        method, options = timed_methods()[name]
        torch.manual_seed(0)
        model = PlainGPT2(SimpleNamespace(**sizes))
        for parameter in model.parameters():
            if parameter.dim() > 1:  # GPT-2's: before the scale of S-STE is frozen
                torch.nn.init.normal_(parameter, std=0.02)
        model = model.to(device)
        self.sparsifier: Sparsifier = sparsify(
            model,
            method,
            targets=["*.up", "*.down"],
            total_steps=1000,
            backend=choice.backend,
            precision=choice.precision(device),
            **options,
        )
        groups = [{"params": list(model.parameters())}]
        own = self.sparsifier.method.build_optimizer(groups, AdamWOptions(**ADAMW, lr=lr))
        fused = device.type == "cuda"
        self.optimizer = own or torch.optim.AdamW(groups, lr=lr, fused=fused)
        self.sparsifier.attach(self.optimizer)
        self.sparsifier.store_operands(torch.bfloat16 if fused else None)  # as the trainer does
        if choice.backend != "emulate":  # before a graph is compiled, which tries nothing
            inputs = {
                name: (batch, sizes["n_positions"], layer.weight.shape[1])
                for name, layer in self.sparsifier.layers.items()
            }
            self.sparsifier.choose_products(inputs)
        self.model: Any = torch.compile(model) if compiled else model
        self.data, self.batch, self.length = data, batch, sizes["n_positions"]
        self.device = device
        self.losses: list[float] = []

    def step(self) -> None:
        """One optimiser step; the loss is read, so that nothing is left running."""
        generator = torch.Generator().manual_seed(len(self.losses))
        last = self.data.numel() - self.length - 1
        starts = torch.randint(last, (self.batch, 1), generator=generator)
        window = self.data[starts + torch.arange(self.length + 1)].to(self.device)
        enabled = self.device.type == "cuda"
        with torch.autocast(self.device.type, torch.bfloat16, enabled=enabled):
            logits = self.model(window[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), window[:, 1:].flatten())
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.losses.append(loss.item())
