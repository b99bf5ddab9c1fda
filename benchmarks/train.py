"""Train GPT-2 124M for some steps, every method against dense.

Plain PyTorch with `sparsify` on the bytes of this package's sources: no downloads, only torch and
triton are imported. Steps of all methods alternate in one process. Without a GPU a tiny model is
trained, eager and in fp32.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import sparsepretrain
from gpt2 import PlainGPT2
from harness import CPU, CUDA, Case, Options, Work, interleave, main, timed
from linear import timed_methods
from sparsepretrain.optim.adamw import AdamWOptions
from sparsepretrain.sparsity import Sparsifier, sparsify

GPT2_124M = {"n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024, "vocab_size": 50304}
ADAMW: Any = {"name": "adamw", "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
EVERYTHING = Options()
TINY = {"n_embd": 64, "n_layer": 2, "n_head": 2, "n_positions": 64, "vocab_size": 256}


def works(options: Options) -> dict[str, Work]:
    """Return one work that trains with all methods in turn."""
    cuda = torch.cuda.is_available()
    only = options.methods or (("sste",) if options.quick or not cuda else ())
    names = [n for n in timed_methods(only) if not options.quick or n in ("dense", *only)]
    size = "GPT-2 124M, bf16, compiled" if cuda else "tiny"
    title = f"training step, {size}{options.label}"
    steps = 3 if not cuda else 10 if options.quick else 50
    work = functools.partial(train, title, names, steps, CUDA if cuda else CPU, options)
    return {title: work}


def train(
    title: str, names: list[str], steps: int, device: torch.device, options: Options
) -> list[Case]:
    """Time `steps` steps of every method, and record the losses."""
    cuda, data = device.type == "cuda", source_bytes()
    sizes, batch = (GPT2_124M, 8) if cuda else (TINY, 2)
    runs = {n: Training(n, sizes, batch, data, device, options, compiled=cuda) for n in names}
    # timed by the CPU clock: every step reads its loss, so no graph captures it
    series = interleave({name: run.step for name, run in runs.items()}, steps)
    found = []
    for name, run in runs.items():
        detail = {"losses": run.losses, "flip_rate": run.sparsifier.metrics().get("flip_rate")}
        case = timed(f"{title}, {name}", series[name], {"dense": series["dense"]}, **detail)
        if not all(map(math.isfinite, run.losses)):
            case.status = "wrong: a loss is not finite"
        found.append(case)
    return found


@functools.cache
def source_bytes() -> Tensor:
    """Return the package's Python files as int64 byte values."""
    files = sorted(Path(sparsepretrain.__file__).parent.rglob("*.py"))
    text = b"".join(path.read_bytes() for path in files)
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long()


class Training:
    """Model, optimizer and data; all methods have equal initial weights and batches."""

    def __init__(
        self,
        name: str,
        sizes: dict[str, int],
        batch: int,
        data: Tensor,
        device: torch.device,
        options: Options = EVERYTHING,
        *,
        compiled: bool = False,
        lr: float = 6e-4,
    ) -> None:
        method, keywords = timed_methods()[name]
        torch.manual_seed(0)
        model = PlainGPT2(SimpleNamespace(**sizes))
        for parameter in model.parameters():
            if parameter.dim() > 1:  # as GPT-2, before the scale of S-STE is frozen
                torch.nn.init.normal_(parameter, std=0.02)
        model = model.to(device)
        self.sparsifier: Sparsifier = sparsify(
            model,
            method,
            targets=["*.up", "*.down"],
            total_steps=1000,
            backend=options.backend,
            precision=options.precision(device),
            **keywords,
        )
        groups = [{"params": list(model.parameters())}]
        own = self.sparsifier.method.build_optimizer(groups, AdamWOptions(**ADAMW, lr=lr))
        cuda = device.type == "cuda"
        self.optimizer = own or torch.optim.AdamW(groups, lr=lr, fused=cuda)
        self.sparsifier.attach(self.optimizer)
        self.sparsifier.store_operands(torch.bfloat16 if cuda else None)  # as the trainer does
        if options.backend != "emulate":  # a compiled graph tries no matmul
            inputs = {
                name: (batch, sizes["n_positions"], layer.weight.shape[1])
                for name, layer in self.sparsifier.layers.items()
            }
            self.sparsifier.choose_products(inputs)
        self.model: Callable[[Tensor], Tensor] = torch.compile(model) if compiled else model
        self.data, self.batch, self.length = data, batch, sizes["n_positions"]
        self.device = device
        self.losses: list[float] = []

    def step(self) -> None:
        """Take an optimizer step and read its loss, which waits for the device."""
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


if __name__ == "__main__":
    sys.exit(main("train", works, methods=True))
