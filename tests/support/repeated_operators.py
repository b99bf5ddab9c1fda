"""Runs each operator of a training step again and again and compares bits; prints JSON.

Two other processes keep the cores busy meanwhile, so that threads finish in varying order. The
column for CUDA is what the docstring of ``torch.use_deterministic_algorithms`` says.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from harness import fresh
from kernel_cases import KernelCase, kernel_cases

REPEATS = 10
THREADS = (1, 2)
SHAPE = (128, 256)
"""Of the kernels' inputs: several blocks of work for each thread."""
BUSY = """
import torch
x = torch.randn(700, 700)
while True:
    x @ x
"""

DOCUMENTED = {
    "convolution": "torch.nn.Conv2d",
    "cumsum": "torch.cumsum",
    "embedding, backward": "torch.nn.Embedding`",
    "gather, backward": "torch.gather",
    "index_add": "torch.index_add",
    "index_put, accumulating": "index_put` with ``accumulate=True``",
    "index_select, backward": "torch.index_select",
    "negative log-likelihood in 2-D": "torch.nn.NLLLoss",
    "scatter_add": "scatter_add_",
}
"""Operator -> its words in the docstring of ``torch.use_deterministic_algorithms``."""


def on_cuda(name: str) -> str:
    """Return what torch documents about an operator on a GPU."""
    if name not in DOCUMENTED:
        return "not listed"
    text = str(torch.use_deterministic_algorithms.__doc__)
    before, _, _ = text.partition(DOCUMENTED[name])
    if before == text:
        return "not listed"
    raises = "operations will throw a" in before
    return "error with deterministic=true" if raises else "only with deterministic=true"


Operator = Callable[[], list[Tensor]]


def drawn(*shape: int, grad: bool = True, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(shape, generator=generator).to(dtype).requires_grad_(grad)


def both(function: Callable[..., Tensor], *inputs: Tensor) -> Operator:
    """Return forward and backward of ``function``: its value and the gradients."""

    def run() -> list[Tensor]:
        y = function(*inputs)
        leaves = [x for x in inputs if x.requires_grad]
        # a constant gradient would hide an order of summation
        weight = torch.linspace(-1, 1, y.numel()).view(y.shape).to(y.dtype)
        return [y.detach(), *torch.autograd.grad(y, leaves, weight)]

    return run


def optimizer(**options: Any) -> Operator:
    """Return five steps of AdamW, clipped."""

    def run() -> list[Tensor]:
        parameters = [nn.Parameter(drawn(*s, grad=False)) for s in ((512, 512), (2048, 64), (512,))]
        adam = torch.optim.AdamW(parameters, lr=1e-2, **options)
        for step in range(5):
            for parameter in parameters:
                parameter.grad = parameter.detach() * (step + 1) + 0.1
            nn.utils.clip_grad_norm_(parameters, 1.0)
            adam.step()
        return [p.detach() for p in parameters]

    return run


def seeded_dropout() -> list[Tensor]:
    torch.manual_seed(0)
    return [F.dropout(torch.ones(512, 512), 0.1)]


def of_torch() -> Iterator[tuple[str, Operator]]:
    """Yield the operators of torch that the models, losses and optimizers here use."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        name = str(dtype).removeprefix("torch.")
        x, w = drawn(1024, 512, dtype=dtype), drawn(768, 512, dtype=dtype)
        yield f"linear, {name}", both(F.linear, x, w)
    q = drawn(4, 8, 128, 64)
    yield (
        "attention, causal",
        both(lambda q: F.scaled_dot_product_attention(q, q, q, is_causal=True), q),
    )
    tokens = torch.randint(50, (4096,), generator=torch.Generator().manual_seed(0))
    yield "embedding, backward", both(lambda w: F.embedding(tokens, w), drawn(50, 512))
    logits = drawn(4096, 50)
    yield "cross-entropy", both(lambda x: F.cross_entropy(x, tokens, reduction="sum"), logits)
    image = drawn(4, 64, 32)
    pixels = torch.randint(64, (4, 32), generator=torch.Generator().manual_seed(0))
    yield (
        "negative log-likelihood in 2-D",
        both(lambda x: F.nll_loss(x.log_softmax(1), pixels), image),
    )
    wide = drawn(1024, 512)
    affine = drawn(512), drawn(512)
    yield "layer norm", both(lambda x, w, b: F.layer_norm(x, (512,), w, b), wide, *affine)
    yield "rms norm", both(lambda x, w: F.rms_norm(x, (512,), w), wide, affine[0])
    yield "softmax", both(lambda x: x.softmax(-1), wide)
    yield "gelu", both(F.gelu, wide)
    maps = drawn(8, 32, 32, 32)
    yield "convolution", both(lambda x, w: F.conv2d(x, w, padding=1), maps, drawn(64, 32, 3, 3))
    yield "batch norm", both(lambda x: F.batch_norm(x, None, None, training=True), maps)
    yield "sum and mean", lambda: [wide.detach().sum(), wide.detach().mean(0)]
    yield "cumsum", both(lambda x: x.cumsum(-1), wide)
    yield "sort and topk", lambda: [*wide.detach().sort(-1), *wide.detach().topk(8, -1)]
    index = torch.randint(50, (1024,), generator=torch.Generator().manual_seed(1))
    rows = wide.detach()
    yield "index_add", lambda: [torch.zeros(50, 512).index_add(0, index, rows)]
    spread = index[:, None].expand_as(rows)
    yield "scatter_add", lambda: [torch.zeros(50, 512).scatter_add(0, spread, rows)]
    yield (
        "index_put, accumulating",
        lambda: [torch.zeros(50, 512).index_put((index,), rows, accumulate=True)],
    )
    yield "gather, backward", both(lambda x: x.gather(0, spread), wide)
    yield "index_select, backward", both(lambda x: x.index_select(0, index), wide)
    yield "dropout, seeded", seeded_dropout
    yield "AdamW, foreach, clipped", optimizer(foreach=True)
    yield "AdamW, fused, clipped", optimizer(fused=True)


def ours(case: KernelCase, backend: str) -> Operator:
    """Return a kernel on inputs that are drawn once; operations in place get copies."""
    inputs = case.make(SHAPE, torch.device("cpu"))

    def run() -> list[Tensor]:
        copies = fresh(inputs)
        result = case.run(backend, *copies)
        found: list[Tensor] = []
        torch.utils._pytree.tree_map_only(Tensor, found.append, (result, copies))
        return found

    return run


def bits(tensors: list[Tensor]) -> list[bytes]:
    flat = [t.detach().contiguous().view(-1) for t in tensors]
    return [t.view(torch.uint8).numpy().tobytes() for t in flat]


def repeat(operator: Operator) -> dict[str, Any]:
    """Return if bits repeat with each number of threads, and are equal for all of them.

    Where they do not repeat, they have to with ``deterministic=true``.
    """
    first: list[list[bytes]] = []
    result: dict[str, Any] = {}
    for threads in THREADS:
        torch.set_num_threads(threads)
        runs = [bits(operator()) for _ in range(REPEATS)]
        result[f"{threads} threads"] = all(run == runs[0] for run in runs)
        first.append(runs[0])
    repeats = all(result.values())
    result["any threads"] = repeats and first[0] == first[1]
    if not repeats:
        torch.use_deterministic_algorithms(True)
        runs = [bits(operator()) for _ in range(REPEATS)]
        torch.use_deterministic_algorithms(False)
        repeats = result["deterministic=true"] = all(run == runs[0] for run in runs)
    return {**result, "passed": repeats}


def collectives() -> dict[str, dict[str, Any]]:
    """Repeat the collectives of gloo in four ranks, each a fork of this process."""
    names = ("all-reduce (gloo)", "reduce-scatter (gloo)", "all-to-all (gloo)")
    with tempfile.TemporaryDirectory() as folder:
        children = []
        for rank in range(4):
            child = os.fork()
            if child == 0:
                code = 1
                try:
                    code = 0 if collective(rank, f"{folder}/store", folder, names) else 3
                finally:
                    sys.stderr.flush()
                    os._exit(code)
            children.append(child)
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        if any(codes):
            raise SystemExit(f"collectives: exit codes {codes}")
        found: list[dict[str, bool]] = []
        for rank in range(4):
            with open(f"{folder}/{rank}.json", encoding="utf-8") as file:
                found.append(json.load(file))
    return {
        name: {
            "1 threads": all(own[name] for own in found),
            "passed": all(own[name] for own in found),
        }
        for name in names
    }


def collective(rank: int, store: str, folder: str, names: tuple[str, ...]) -> bool:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, 4), rank=rank, world_size=4)
    own = torch.randn(2**16, generator=torch.Generator().manual_seed(rank))

    def all_reduce() -> list[Tensor]:
        total = own.clone()
        dist.all_reduce(total)
        return [total]

    def reduce_scatter() -> list[Tensor]:
        part = torch.empty(2**14)
        scatter: Any = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
        scatter(part, own)
        return [part]

    def all_to_all() -> list[Tensor]:
        received = torch.empty_like(own)
        dist.all_to_all_single(received, own)
        return [received]

    result = {}
    for name, function in zip(names, (all_reduce, reduce_scatter, all_to_all), strict=True):
        runs = [bits(function()) for _ in range(REPEATS)]
        result[name] = all(run == runs[0] for run in runs)
    with open(f"{folder}/{rank}.json", "w", encoding="utf-8") as file:
        json.dump(result, file)
    dist.barrier()
    dist.destroy_process_group()
    return True


def main() -> None:
    """Print name -> result for all operators."""
    found = {name: {"of": "torch", **result} for name, result in collectives().items()}
    busy = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(2)]
    try:
        for name, operator in of_torch():
            found[name] = {"of": "torch", "cuda": on_cuda(name), **repeat(operator)}
        for case in kernel_cases():
            for backend in ("cpu", "reference"):
                try:
                    operator = ours(case, backend)
                    operator()
                except (ValueError, RuntimeError, NotImplementedError, TypeError):
                    continue  # there is no such implementation
                found[f"{case.name}, {backend}"] = {"of": "sparsepretrain", **repeat(operator)}
    finally:
        for process in busy:
            process.kill()
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
