"""Cost of a training step, traced on the meta device before the model is sparse."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode

from sparsepretrain import registry
from sparsepretrain.config.schema import Run
from sparsepretrain.sparsity.method import Method
from sparsepretrain.tasks import Task
from sparsepretrain.training.compilation import blocks
from sparsepretrain.training.precision import compute_dtype
from sparsepretrain.training.recomputation import recompute_blocks

NOMINAL_FLOPS = 0.4 * 989.4e12
"""FLOP/s that :meth:`StepCost.eager_seconds` assumes: 40 % of the dense bf16 peak of an H100. One
rate for all GPUs and precisions: a run that moves to another GPU is compiled as before."""

LAUNCH_OVERHEAD = 1e-3
"""Seconds that the host needs for a block in a micro-batch, not compiled: 100 operators of 10 µs.
Forward and backward of a dense block under bf16 autocast call 39 operators that are not views in
`gpt2_nano`, 72 in `bert_nano` and 135 in `llama_nano`; methods and sums of gradients add some."""


class StepCost(NamedTuple):
    """Cost of an optimizer step of all ranks, counted dense."""

    flops: float
    saved: float
    """Bytes that a micro-batch saves for its backward."""
    largest: float
    """Bytes of the largest of these tensors; of a language model, the logits."""
    items: int
    blocks: int
    """Blocks of the model, as :func:`compilation.blocks` finds them."""

    def eager_seconds(self, run: Run, ranks: int) -> float:
        """Return the estimated seconds of all steps of ``run`` on ``ranks`` GPUs, not compiled.

        Device and host work at the same time, so the slower one counts. The estimate depends on the
        configuration alone: a session that resumes the run gets the same number.
        """
        micro_batches = run.batch.size / (run.batch.micro * ranks)
        device = self.flops / ranks / NOMINAL_FLOPS
        return run.steps * max(device, micro_batches * self.blocks * LAUNCH_OVERHEAD)


@contextmanager
def tracing(model: nn.Module) -> Iterator[FakeTensorMode]:
    """Run forward and backward of a model on the meta device, whoever wrote it.

    Code of models looks at values (is the attention mask causal, which experts have tokens), which
    meta tensors do not have. transformers leaves such checks out for fake tensors, as torch.compile
    traces with; experts are traced as batched matmuls, whose shapes depend on no value.
    """
    configs = {id(c): c for module in model.modules() if (c := getattr(module, "config", None))}
    key = "_experts_implementation"
    before: list[tuple[Any, Any]] = [
        (c, getattr(c, key)) for c in configs.values() if hasattr(c, key)
    ]
    try:
        for config, _ in before:
            setattr(config, key, "batched_mm")
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            yield mode
    finally:
        for config, value in reversed(before):  # the first entry of a shared one is the original
            setattr(config, key, value)


def step_cost(run: Run, task: Task, model: nn.Module) -> StepCost:
    """Trace one sample and scale: FLOPs, saved bytes and items are linear in the samples.

    ``model`` is on the meta device and not sparse; blocks are recomputed afterwards if the run
    recomputes them.
    """
    sizes: dict[int, int] = {}
    parameters: set[int] = set()  # storages
    parts = list(blocks(model))
    # batched matmuls, as traced, copy the weights of an expert for each token; grouped ones do not
    experts = {tuple(bank.shape[-2:]) for bank in model.parameters() if bank.dim() == 3}
    experts |= {(inputs, outputs) for outputs, inputs in experts}

    def pack(saved: Tensor) -> Tensor:
        storage = saved.untyped_storage()
        # one sample is traced, so that hidden states have 1 as their first axis
        is_copy = saved.dim() == 3 and len(saved) > 1 and tuple(saved.shape[-2:]) in experts
        if storage._cdata not in parameters and not is_copy:
            sizes[storage._cdata] = storage.nbytes()
            alive.append(saved)
        return saved

    def keep(block: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        pack(inputs[0])

    alive: list[Tensor] = []  # keeps storages, and so their identities, distinct
    counter = FlopCounterMode(display=False)
    hooks = saved_tensors_hooks(pack, lambda saved: saved)
    method: type[Method] = registry.get("method", run.sparsity.name)
    policy = method.follows_policy  # two forwards, no backward
    if run.activation_checkpointing:
        recompute_blocks(model)
        for block in parts:
            block.register_forward_pre_hook(keep)
    with tracing(model) as mode, counter, hooks:
        # autograd saves a Parameter itself, or a view of its fake tensor, which all operators share
        # while it is alive
        fakes = [mode.from_tensor(parameter) for parameter in model.parameters()]
        for tensor in (*model.parameters(), *fakes):
            parameters.add(tensor.untyped_storage()._cdata)
        with torch.set_grad_enabled(not policy):
            loss, items = task.loss(model, task.example(1, next(model.parameters()).device))
        if not policy:
            loss.backward()
    model.zero_grad(set_to_none=True)
    scale = run.batch.micro * compute_dtype(run.precision).itemsize / 4
    return StepCost(
        flops=float(counter.get_total_flops()) * run.batch.size * (2 if policy else 1),
        saved=sum(sizes.values()) * scale,
        largest=max(sizes.values(), default=0) * scale,
        items=items * run.batch.size,
        blocks=len(parts),
    )
