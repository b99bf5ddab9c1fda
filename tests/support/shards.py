"""What every process of test_sharded_loops.py runs: the library in a plain training loop."""

import functools
import json
import os
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from omegaconf import OmegaConf
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from transformers.pytorch_utils import Conv1D

import sparsepretrain as sp
from sparsepretrain.optim import AdamS, ASTAdamW, StepAdamW
from sparsepretrain.sparsity.fsdp.sharding import part_of, plain, whole
from support.mutants import mistaken
from support.ranks import VARIANTS
from support.torch_checkpoints import LOADS, save

STEPS, SAMPLES, WIDTH = 8, 2, 16


class Block(nn.Module):
    """A residual block of two layers of one kind."""

    def __init__(self, kind: str, inner: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(1, WIDTH) if kind == "conv2d" else nn.LayerNorm(WIDTH)
        self.up, self.down = layer(kind, WIDTH, inner), layer(kind, inner, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class BankBlock(nn.Module):
    """A residual block of four experts; each token goes to one by its place in the sample."""

    def __init__(self, kind: str, inner: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.experts = Experts(kind == "bank_in_out", inner)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.experts(self.norm(x))


class Experts(nn.Module):
    """Two banks, as transformers has them."""

    has_gate = False

    def __init__(self, is_transposed: bool, inner: int) -> None:
        super().__init__()
        self.is_transposed = is_transposed
        up, down = (4, inner, WIDTH), (4, WIDTH, inner)
        shapes = [(s[0], s[2], s[1]) if is_transposed else s for s in (up, down)]
        self.up_proj, self.down_proj = (nn.Parameter(torch.randn(s) / 4) for s in shapes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.reshape(-1, WIDTH)
        chosen = (torch.arange(len(tokens)) * 5 // 3) % 4
        y = torch.zeros_like(tokens)
        for expert in range(4):
            own = torch.where(chosen == expert)[0]
            hidden = self.multiply(tokens[own], self.up_proj[expert]).relu()
            y = y.index_add(0, own, self.multiply(hidden, self.down_proj[expert]))
        return y.view(x.shape)

    def multiply(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x @ weight if self.is_transposed else nn.functional.linear(x, weight)


def layer(kind: str, inputs: int, outputs: int) -> nn.Module:
    if kind == "conv2d":
        return nn.Conv2d(inputs, outputs, 3, padding=1)
    if kind == "conv1d":
        return Conv1D(outputs, inputs)
    return nn.Linear(inputs, outputs)


def model_of(kind: str, inner: int, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    made = BankBlock if kind.startswith("bank") else Block
    return nn.Sequential(made(kind, inner), made(kind, inner)).double()


def options(name: str) -> tuple[str, dict[str, Any]]:
    """The method of one of ``VARIANTS``, or with its defaults, and its options for the library."""
    prefix = "sparsity."
    words = [w.removeprefix(prefix) for w in VARIANTS.get(name, ()) if w.startswith(prefix)]
    given: Any = OmegaConf.to_container(OmegaConf.from_dotlist(words))
    return name.partition(" ")[0], {k: v for k, v in given.items() if k != "targets"}


def optimizer(method: str, model: nn.Module, fused: bool) -> torch.optim.Optimizer:
    if method == "step":
        return StepAdamW(model.parameters(), lr=3e-3, eps=1e-6, clipping=(2, 4))
    if method in ("ast", "cast"):
        return {"ast": ASTAdamW, "cast": AdamS}[method](model.parameters(), lr=3e-3)
    return torch.optim.AdamW(model.parameters(), lr=3e-3, fused=fused)


def sparse_model(name: str, kind: str, inner: int, patterns: dict[str, str], seed: int = 0) -> Any:
    """A whole model, and the method of one of ``VARIANTS`` in it."""
    method, given = options(name)
    model = model_of(kind, inner, seed)
    targets = ["*.experts"] if kind.startswith("bank") else ["*.up", "*.down"]
    given |= {"patterns": patterns, "seed": 3, "total_steps": STEPS}
    return model, sp.sparsify(model, method, targets=targets, **given)


@torch.no_grad()
def misaligned(model: Any, sparsifier: sp.Sparsifier, state: dict[str, Any], *rest: Any) -> int:
    """Entries whose mask, or operand as FSDP gathers it, is not that of the gathered weights.

    Args:
        state: of the model, gathered.
        rest: name, kind, inner width and patterns, for a whole model that takes ``state``.
    """
    other, alone = sparse_model(*rest)
    other.load_state_dict(state, strict=False)  # without what is empty
    masks, count = sparsifier.masks(), 0
    blocks = [block for block in model if isinstance(block, FSDPModule)]
    for block in blocks:
        block.unshard()
    for name, layer in sparsifier.layers.items():
        whole_layer = alone.layers[name]
        forward = whole_layer.operands.project(whole_layer.weight, training=True).forward
        if forward is None or whole_layer.operands.method.differentiable:  # it gathers W itself
            forward = whole_layer.weight
        forward = whole_layer.operands.rows.stored(forward)
        count += int((layer.weight != forward).sum())
        count += int((masks[name] != alone.masks()[name]).sum())
    for block in blocks:
        block.reshard()
    return count


@contextmanager
def shared_directory() -> Iterator[str]:
    """A temporary directory of rank 0, which all ranks are told of."""
    with tempfile.TemporaryDirectory() as own:
        names = [own]
        if dist.is_initialized():
            dist.broadcast_object_list(names)
        yield names[0]
        if dist.is_initialized():
            dist.barrier()


def own_losses(
    model: nn.Module,
    sparsifier: sp.Sparsifier,
    parts: list[tuple[torch.Tensor, torch.Tensor]],
    rank: int,
    world: int,
    counted: bool,
) -> Iterator[torch.Tensor]:
    """The share of each micro-batch of this process in the mean loss of the batch."""
    entries = sum(x.numel() for x, _ in parts)
    for index in range(len(parts) // world):
        if not counted:
            sparsifier.micro_batch(index, rank, world)
        x, wanted = parts[index * world + rank]
        yield (model(x) - wanted).square().sum() / entries


def train(
    name: str,
    kind: str = "linear",
    *,
    shards: bool,
    inner: int = 32,
    replicas: int = 1,
    reshard: bool | None = True,
    counted: bool = False,
    evaluates: bool = False,
    fused: bool = True,
    micro_batches: int = 4,
    resume: str = "",
    meta: str = "",
    patterns: dict[str, str] | None = None,
) -> dict[str, Any]:
    """Losses, flips and metrics of every step; masks, proof and weights at the end.

    ``resume``: halfway all is saved, and another model loads it with this function of
    ``torch_checkpoints`` and goes on. ``meta``: the model is made on the meta device, and its
    shards are ``loaded`` from rank 0 or ``initialized`` on each rank.
    """
    rank, world = (dist.get_rank(), dist.get_world_size()) if shards else (0, 1)
    # FSDP averages gradients; a method that adds a constant to their norms needs sums
    sums = float(options(name)[1].get("epsilon", 0)) > 0

    def start(seed: int = 0) -> tuple[nn.Sequential, sp.Sparsifier, torch.optim.Optimizer]:
        with torch.device("meta") if meta and shards else nullcontext():
            model, sparsifier = sparse_model(name, kind, inner, patterns or {}, seed)
        if shards:
            sparsifier.prepare_sharding()
            names, sizes = ("replicate", "shard"), (replicas, world // replicas)
            mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
            mesh = mesh if replicas > 1 else mesh["shard"]
            for block in model:
                fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
            fully_shard(model, mesh=mesh, reshard_after_forward=reshard)
            for module in model.modules():
                if sums and isinstance(module, FSDPModule):
                    module.set_gradient_divide_factor(1.0)
                    module.set_force_sum_reduction_for_comms(True)
        if meta and shards:
            model.to_empty(device="cpu")
            weights = model_of(kind, inner, seed).state_dict()
            if meta == "initialized":  # torchtitan's order
                with torch.no_grad():
                    for key, value in weights.items():
                        own = model.get_parameter(key)
                        plain(own).copy_(plain(part_of(value, own)))
            else:
                whole_on_0 = {"full_state_dict": True, "broadcast_from_rank0": True}
                options = StateDictOptions(**whole_on_0, strict=False)
                set_model_state_dict(model, {} if rank else weights, options=options)
        steps = optimizer(sparsifier.method.options.name, model, fused)
        sparsifier.attach(steps)
        if meta == "initialized" and shards:
            sparsifier.reset()
        return model, sparsifier, steps

    model, sparsifier, steps = start()
    shape = (WIDTH, 4, 4) if kind == "conv2d" else (8, WIDTH)
    losses, numbers = [], []
    for step in range(STEPS):
        if resume and step == STEPS // 2:
            with shared_directory() as directory:
                save(model, steps, directory, resume)
                model, sparsifier, steps = start(seed=1)
                LOADS[resume](model, steps, directory)
        torch.manual_seed(100 + step)
        x = torch.randn(micro_batches * SAMPLES, *shape, dtype=torch.float64)
        parts = list(zip(x.split(SAMPLES), x.roll(1, -1).split(SAMPLES), strict=True))
        own = functools.partial(own_losses, model, sparsifier, parts, rank, world, counted)
        if sparsifier.method.follows_policy:
            # the mean over the processes counts, as that of gradients
            total = sparsifier.policy_step(lambda own=own: sum(own()) * world) / world
        else:
            total = torch.zeros((), dtype=torch.float64)
            for loss in own():
                (loss if sums else loss * world).backward()
                total += loss.detach()
        if shards:
            dist.all_reduce(total)
        trained = [p for p in model.parameters() if p.grad is not None]
        norm = whole(nn.utils.get_total_norm([p.grad for p in trained]))
        nn.utils.clip_grads_with_norm_(trained, 1.0, norm)
        steps.step()
        steps.zero_grad()
        losses.append(float(total))
        numbers.append(sparsifier.metrics(per_layer=True))
        if evaluates:
            model.eval()
            with torch.no_grad():
                losses.append(float((model(parts[0][0]) - parts[0][1]).square().sum()))
            model.train()
    state = {key: whole(value) for key, value in model.state_dict().items() if value.numel()}
    given = name, kind, inner, patterns or {}
    off = misaligned(model, sparsifier, state, *given) if shards else 0
    dense = sparsifier.dense_state_dict()
    rows = sparsifier.dense_state_dict(full=False)
    fits = all([torch.equal(whole(rows[key]), value) for key, value in dense.items()])
    state |= {f"dense {key}": value for key, value in dense.items()}
    return {
        "losses": losses,
        "metrics": numbers,
        "misaligned": off,
        "fits": fits,
        "masks": {k: v.tolist() for k, v in sparsifier.masks().items()},
        "proof": str(sparsifier.prove()),
        "state": state,
        "stored": sum(plain(p).numel() for p in model.parameters()),
    }


def compare(case: dict[str, Any]) -> dict[str, Any]:
    """What differs between shards and one process."""
    only = {"replicas", "reshard", "counted", "resume", "meta"}
    with mistaken(case.pop("mutant", "")):
        mine = train(shards=True, **case)
    alone = train(shards=False, **{k: v for k, v in case.items() if k not in only})
    found: dict[str, Any] = {
        "loss": max(abs(a - b) for a, b in zip(mine["losses"], alone["losses"], strict=True)),
        "state": 0.0,
        "share": mine["stored"] / alone["stored"],
        "equal": all(mine[k] == alone[k] for k in ("masks", "proof", "fits")),
        "misaligned": mine["misaligned"],
        "flips": True,
        "metrics": 0.0,
        "learned": alone["losses"][-1] != alone["losses"][0],
    }
    for a, b in zip(mine["metrics"], alone["metrics"], strict=True):
        assert a.keys() == b.keys()
        found["flips"] &= all(a[k] == b[k] for k in a if k.startswith("flip"))
        found["metrics"] = max(found["metrics"], *(abs(a[k] - b[k]) for k in a))
    for key, value in mine["state"].items():
        assert not isinstance(value, DTensor)
        theirs = alone["state"][key]
        if value.is_floating_point():
            found["state"] = max(found["state"], float((value - theirs).abs().max()))
        else:
            found["equal"] &= torch.equal(value, theirs)
    return found


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    results = []
    for case in json.loads(sys.argv[1]):
        results.append(compare(case))
        if os.environ.get("SHOW") and dist.get_rank() == 0:
            print(case, results[-1], flush=True)
    if dist.get_rank() == 0:
        print(json.dumps(results))
    dist.destroy_process_group()
