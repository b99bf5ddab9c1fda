"""Steps of a training loop, everything they change, and loops that are compiled or recomputed."""

import copy
import io

import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

import sparsepretrain as sp
from sparsepretrain.errors import SparsePretrainWarning
from sparsepretrain.sparsity.engine.weights import SparseWeight


def attached(sparsifier, optimizer):
    sparsifier.attach(optimizer)
    return optimizer


def accumulate(model, step, *, micro=8, **shape):
    """Add the gradients of one step in micro-batches; the data depend on the step only."""
    inner = getattr(model, "module", model)
    x, gy = getattr(inner, "block", inner).example(step, **shape)
    sparse = next((m for m in model.modules() if isinstance(m, SparseWeight)), None)
    if sparse is not None and sparse.sparse_model.method.follows_policy:
        sp.sparsifier_of(model).policy_step(lambda: (model(x) * gy).sum())
        return
    for i in range(0, len(x), micro):
        (model(x[i : i + micro]) * gy[i : i + micro]).sum().backward()


def train(model, optimizer, first, last, **shape):
    for step in range(first, last):
        accumulate(model, step, **shape)
        optimizer.step()
        optimizer.zero_grad()


def everything(model, optimizer, sparsifier):
    parts = (model.state_dict(), optimizer.state_dict(), sparsifier.state_dict())
    return copy.deepcopy(parts)


def through_disk(state, weights_only=True):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=weights_only)


def gradients(model):
    return {k: p.grad.clone() for k, p in model.named_parameters() if p.grad is not None}


def said(recwarn):
    """Messages of this library's warnings."""
    return [str(w.message) for w in recwarn if w.category is SparsePretrainWarning]


def eager_and_compiled(run, backend="aot_eager"):
    """(eager result, compiled result, number of graphs) of ``run``.

    ``run`` receives a function and calls it with the module that has to become one graph.
    """
    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)
    eager = run(lambda module: None)
    compiled = run(lambda module: module.compile(backend=counter, fullgraph=True))
    torch._dynamo.reset()
    return eager, compiled, counter.frame_count


def recomputed(net, reentrant):
    """``net`` with activation checkpointing."""

    class Recomputed(net):
        def body(self, x):
            return checkpoint(super().body, x, use_reentrant=reentrant)

    return Recomputed
