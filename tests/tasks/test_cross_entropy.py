"""The cross-entropy of language models: in parts, and compiled with its backward."""

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch._inductor.graph import GraphLowering
from torch.utils._python_dispatch import TorchDispatchMode

from sparsepretrain import tasks

GPT2 = {"ignore_index": -1}
TRANSLATION = {"label_smoothing": 0.1}


def test_chunked_loss_is_bit_exact(monkeypatch):
    """Gradients keep their bits, and nothing wide is larger than a part."""

    class Widest(TorchDispatchMode):
        elements = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and out.dtype == torch.float32:
                self.elements = max(self.elements, out.numel())
            return out

    torch.manual_seed(0)
    targets = torch.randint(50, (4, 9))
    targets[0, :3] = -100
    found = []
    for at_once in (2**24, 500):
        monkeypatch.setattr(tasks, "LOGITS_AT_ONCE", at_once)
        logits = torch.randn(4, 9, 50, generator=torch.Generator().manual_seed(1)).bfloat16()
        logits.requires_grad_()
        with Widest() as widest:
            loss = tasks.cross_entropy(logits, targets, label_smoothing=0.1)
            (loss / 33).backward()
        found.append((loss.item(), logits.grad, widest.elements))
    (whole, expected, all_), (parts, gradient, part) = found
    assert parts == pytest.approx(whole, rel=1e-6) and torch.equal(gradient, expected)
    assert (all_, part) == (4 * 9 * 50, 500)


def problem(rows, classes, dtype, ignored):
    draw = torch.Generator().manual_seed(rows)
    logits = (3 * torch.randn(rows, classes, generator=draw)).to(dtype)
    targets = torch.randint(classes, (rows,), generator=draw)
    targets[::5] = ignored
    return logits, targets


def loss_and_gradient(logits, targets, **options):
    leaf = logits.detach().clone().requires_grad_()
    loss = tasks.cross_entropy(leaf, targets, **options)
    loss.backward()
    return loss.detach(), leaf.grad


def assert_compiled_equals_fp64(logits, targets, **options):
    compiled = loss_and_gradient(logits, targets, compiled=True, **options)
    parts = loss_and_gradient(logits, targets, **options)
    exact = loss_and_gradient(logits.double(), targets, **options)
    assert compiled[0].dtype == parts[0].dtype and compiled[1].dtype == logits.dtype
    torch.testing.assert_close(compiled[0].double(), exact[0], rtol=1e-6, atol=0)
    torch.testing.assert_close(compiled[0], parts[0], rtol=1e-6, atol=0)
    bound = {"rtol": 2**-7, "atol": 2**-7 / 50}  # one bf16 ulp; small entries are differences
    torch.testing.assert_close(compiled[1].double(), exact[1], **bound)
    torch.testing.assert_close(compiled[1], parts[1], **bound)


def test_loss_compiles_at_most_twice(monkeypatch):
    torch._dynamo.reset()
    counter = CompileCounter()
    compiled = torch.compile(tasks._total, backend=counter)
    monkeypatch.setattr(tasks, "_compiled_total", lambda: compiled)
    for rows in (8, 9, 12, 40, 7):
        loss_and_gradient(*problem(rows, 16, torch.float32, -100), compiled=True)
    assert counter.frame_count <= 2
    with torch.no_grad():
        tasks.cross_entropy(*problem(3, 16, torch.float32, -100), compiled=True)
    assert counter.frame_count <= 2
    torch._dynamo.reset()


def eager_bytes(logits, targets, **options):
    """Bytes that the operators of forward and backward read and write."""
    aliases = {"view", "t", "split", "detach", "alias", "_unsafe_view", "expand", "empty_like"}

    class Count(TorchDispatchMode):
        total = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            if function.overloadpacket.__name__ not in aliases:
                tensors = torch.utils._pytree.tree_leaves((args, kwargs or {}, out))
                self.total += sum(x.nbytes for x in tensors if isinstance(x, torch.Tensor))
            return out

    with Count() as count:
        loss_and_gradient(logits, targets, **options)
    return count.total


def compiled_bytes(logits, targets, monkeypatch, **options):
    """Bytes that the fused loops of forward and backward read and write, by inductor's account."""
    counts, codegen = [], GraphLowering.codegen

    def counted(graph):
        made = codegen(graph)
        counts.append(graph.count_bytes()[0])
        return made

    monkeypatch.setattr(GraphLowering, "codegen", counted)
    torch._dynamo.reset()
    with torch._inductor.config.patch(force_disable_caches=True):
        loss_and_gradient(logits, targets, compiled=True, **options)
    assert len(counts) == 2, "a forward and a backward"
    return sum(counts)


@pytest.mark.parametrize(("options", "most"), [(GPT2, 8.1), (TRANSLATION, 10.1)])
@pytest.mark.slow
def test_compiled_loss_equals_fp64_and_moves_few_bytes_per_logit(monkeypatch, options, most):
    logits, targets = problem(640, 5030, torch.bfloat16, options.get("ignore_index", -100))
    assert compiled_bytes(logits, targets, monkeypatch, **options) / logits.numel() < most
    assert_compiled_equals_fp64(logits, targets, **options)  # reuses the compiled code
    if options == GPT2:  # the second compilation takes any number of rows
        assert_compiled_equals_fp64(logits[:37], targets[:37], **options)
    monkeypatch.setattr(tasks, "LOGITS_AT_ONCE", 64 * 5030)
    assert eager_bytes(logits, targets, **options) / logits.numel() > 50
