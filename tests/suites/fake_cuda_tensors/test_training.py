"""The trainer on a device that says cuda:0: numbers of a CPU run, no mixup, no needless wait."""

from collections import Counter

import pytest
import torch
from torch.utils._pytree import tree_map

from sparsepretrain import densify, registry
from sparsepretrain.runs.writer import Writer
from sparsepretrain.sparsity import coverage
from sparsepretrain.sparsity.matmuls import fp8, policy
from sparsepretrain.sparsity.matmuls.fp8 import FP8
from sparsepretrain.sparsity.methods.bimask import BiMask
from sparsepretrain.sparsity.methods.proxsparse import ProxSparse
from sparsepretrain.training import loop, session_state, validation
from support.fake_cuda import RECORD, Pretended, fake_cuda
from support.finetune_cases import build, glue, squad
from support.tiny_runs import Tiny, assert_equal_bits, assert_same_run, interrupted
from support.tiny_translation import TinyTranslation

METHODS = sorted(registry.names("method"))
WAITS = {
    ("event", "training/step.py:judge"),  # loss and gradient norm of the step before
    ("tolist", "optim/_step_adamw.py:step"),  # STEP's dense phase: the change of second moments
    ("tolist", "sparsity/methods/asp.py:take_remarks"),  # at the step that chooses a fixed mask
}
"""Of an optimizer step, each at most once."""

DESCENT = {("item", "sparsity/methods/proxsparse.py:_descend"): 64}
"""Of a step of ProxSparse: one for each pass of its coordinate descent, of which few are needed."""

AT_FIRST = {("tolist", "sparsity/engine/attachments.py:read_together"): 2}
"""Of the first step: weights that changed before it, and those that something else reads."""

TIMED = ("tokens_per_second", "data_wait", "mfu_dense")
"""Of a line of the record, what depends on the clock."""

IMAGES = (
    "batch.size=4", "batch.micro=2", "steps=6", "eval.every=3", "eval.batches=1", "workers=0",
    "log.every=1", "tracker.mode=disabled",
)  # fmt: skip
RECIPES = {
    "fp16": ("sparsity=sste", "precision=fp16"),
    "fp8_sim": ("sparsity=tsrste", "precision=fp8_sim"),
    "fp8": ("sparsity=sste", "precision=fp8"),
    "fp8 e4m3": (
        *("sparsity=tsrste", "precision=fp8", "precision.recipe=e4m3"),
        *("sparse_matmuls=semi_structured", "model.n_embd=128"),
    ),
    "ema": ("sparsity=sste", "ema=0.9"),
    "refresh": ("sparsity=tsrste", "sparsity.refresh=1", "sparsity.decay=1e-3"),
    "act24": ("sparsity=act24", "model=bert_nano"),
    "bert": ("sparsity=sste", "model=bert_nano", "precision=bf16"),
    "vit": (*IMAGES, "model=vit_nano", "sparsity=sste"),
    "resnet": (*IMAGES, "model=resnet_nano", "model.width=[8,8,8,16]", "sparsity=tsrste"),
    "weight": ("sparsity=sste", "sparsity.mvue=weight", "sparsity.beta_update=step"),
}
SPARSE = {
    **dict.fromkeys(("ast", "bimask", "slope", "srste", "ste"), ()),
    "asp": ("sparsity.at=0.0",),
    "mdgf": ("sparsity.until=0.0",),
    "sdgf": ("sparsity.until=0.0",),
    "sdgp": (),
    "sste": (),
    "step": ("sparsity.clipping=[0.0,0.0]",),
    "ternary": (),
    "tsrste": ("sparsity.dense_tail=0",),
}
"""Methods with a 2:4 operand -> with what the first steps have it."""
PACKS = {"sdgp": (0, 1), "slope": (2, 0), "sste": (1, 1), "tsrste": (2, 1)}
"""Operands of a layer that are packed per step, and per micro-batch; of the others one and none."""


def host(value):
    """Nested values with their tensors on the CPU, without a wait that is recorded."""
    return tree_map(lambda x: x.raw if isinstance(x, Pretended) else x, value)


def three_steps(tiny, words, *, watched=False):
    """What three steps and all that looks at a model come to, as values of the CPU."""
    session = tiny.build(*words)
    sparsifier, found, compiled = session.sparsifier, [], []
    variants = RECORD.variants
    for number in range(3):
        RECORD.clear()
        values = loop.train_step(session)
        found.append((values.loss, values.grad_norm))
        if watched:
            allowed = dict.fromkeys(WAITS, 1) | (AT_FIRST if number == 0 else {})
            allowed |= DESCENT if isinstance(sparsifier.method, ProxSparse) else {}
            assert RECORD.waits <= Counter(allowed), RECORD.waits
            method = sparsifier.method
            compiled.append(
                (method.phase.row, method.pattern, {k: len(v) for k, v in variants.items()})
            )
    same_phase = [step[:2] for step in compiled[1:2]] == [step[:2] for step in compiled[2:]]
    if same_phase and not isinstance(tiny, TinyTranslation):  # whose micro-batches differ in size
        assert compiled[1:2] == compiled[2:], "a step of the same phase compiled kernels anew"
    RECORD.clear()
    line = [watch.at_log(session, per_layer=True) for watch in session.observers]
    metrics = [{k: v for k, v in each.items() if k not in TIMED} for each in line]
    assert not watched or sum(RECORD.waits.values()) <= 1, RECORD.waits
    masks = host(sparsifier.masks())
    RECORD.clear()
    evaluated = validation.evaluate(session, "validation", 2, final=False)
    if watched:
        # for the numbers and the counters, of the averaged weights too
        assert sum(RECORD.waits.values()) <= 2 + 2 * (session.ema is not None), RECORD.waits
    RECORD.clear()
    proof = str(sparsifier.prove()) if session.sparsifier.sparse else ""
    assert not watched or sum(RECORD.waits.values()) <= 2, RECORD.waits
    state = host(session_state.state_dict(session))
    dense = host(densify(session.model).state_dict())
    return found, metrics, masks, evaluated, proof, state, dense


def compare(tiny, words):
    words = (*words, "batch.micro=2")
    expected = three_steps(tiny, (*words, "parallel.device=cpu"))
    with fake_cuda():
        found = three_steps(tiny, (*words, "parallel.device=cuda"), watched=True)
        assert RECORD.mixups == []
    assert_equal_bits(expected, found)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("method", METHODS)
def test_every_method_gives_the_numbers_of_a_cpu(tiny, method, precision):
    model = ("model=bert_nano",) if method == "act24" else ()
    compare(tiny, (f"sparsity={method}", f"precision={precision}", *model))


@pytest.mark.parametrize("words", RECIPES.values(), ids=RECIPES)
def test_other_recipes_do_too(tiny, words, monkeypatch):
    if words[: len(IMAGES)] == IMAGES:
        runs = f"runs_dir='{tiny.root / 'runs'}'"
        monkeypatch.setattr(tiny, "overrides", lambda *more: [*more, runs])
    if "sparse_matmuls=semi_structured" in words:  # with the reference in place of cuSPARSELt
        monkeypatch.setattr(policy, "unsupported", lambda device, *_: None)
        monkeypatch.setattr(coverage, "version", lambda: "0.8.1")
    if "precision=fp8_sim" in words:  # whose products CPUs multiply scaled, and GPUs as they are
        monkeypatch.setattr(FP8, "dequantizes", lambda *_: False)
    if "precision=fp8" in words:  # with torch's scaled products of a CPU
        monkeypatch.setattr(fp8, "no_fp8_matmuls", lambda device: "")
    compare(tiny, words)


@pytest.mark.parametrize("method", SPARSE)
def test_sparse_products_do_too(tiny, method, monkeypatch):
    """With the reference in place of cuSPARSELt; packs are counted."""
    monkeypatch.setattr(policy, "unsupported", lambda device, *_: None)
    monkeypatch.setattr(coverage, "version", lambda: "0.8.1")
    step = loop.train_step

    def counted(session):
        values = step(session)
        packs = RECORD.operators["compress_24"]
        weights, gradients = PACKS.get(method, (1, 0))
        micro_batches = session.run.batch.size // session.run.batch.micro
        if session.device.type == "cuda":
            layers = len(session.sparsifier.layers)
            assert packs == layers * (weights + gradients * micro_batches)
        return values

    monkeypatch.setattr(loop, "train_step", counted)
    words = ("precision=bf16", "sparse_matmuls=semi_structured", "model.n_embd=64", *SPARSE[method])
    compare(tiny, (f"sparsity={method}", *words))


def test_translation_does_too(tiny):
    compare(TinyTranslation(tiny.root, tiny.corpus), ("sparsity=sste",))


@pytest.mark.parametrize("files", [squad, glue])
def test_records_are_evaluated_in_one_wait(tiny, tmp_path, files):
    source = tiny.train("steps=1", "sparsity=dense").directory
    words = (*files(tmp_path), "compile=none")
    session = build(source, *words)
    expected = validation.evaluate(session, "validation", None, final=True)
    with fake_cuda():
        session = build(source, *words, "parallel.device=cuda")
        RECORD.clear()
        assert validation.evaluate(session, "validation", None, final=True) == expected
        counters = RECORD.waits.pop(("tolist", "sparsity/engine/model_state.py:sync"), 0)
        assert counters <= 1, "read once, when layers change their mode"
        assert RECORD.waits.total() == 1 and RECORD.mixups == [], RECORD.waits


@pytest.mark.parametrize("method", ["sste", "step", "bimask"])
def test_a_run_that_is_stopped_and_continued(tiny, stop_after, method):
    """The whole path of the command: evaluations, checkpoints, resume, record."""
    words = (f"sparsity={method}", "batch.micro=2")
    expected = tiny.train(*words, "parallel.device=cpu").directory
    other = Tiny(tiny.root / "cuda", tiny.corpus)
    with fake_cuda():
        found = interrupted(other, stop_after, (3,), *words, "parallel.device=cuda", "compile=none")
    assert_same_run(expected, found)


def test_a_tensor_that_was_left_behind_stops_a_run(tiny, monkeypatch):
    """A defect that only a second device shows."""

    def left_behind(self, weight, layer):
        return {"permutation": torch.arange(weight.shape[1 - layer.dim])}

    monkeypatch.setattr(BiMask, "initial_state", left_behind)
    tiny.build("sparsity=bimask", "parallel.device=cpu")
    with fake_cuda(), pytest.raises(RuntimeError, match=r"same device.*sparsity/"):
        tiny.build("sparsity=bimask", "parallel.device=cuda", "compile=none")


def test_a_snapshot_waits_for_the_device_once(tmp_path):
    parts = {"a": torch.arange(6.0), "b": {"c": torch.ones(3, 4).t(), "number": 3}}
    writer = Writer(tmp_path, background=True)
    with fake_cuda():
        for _ in range(2):  # into new memory, and into that of the last snapshot
            here = tree_map(lambda x: Pretended(x) if isinstance(x, torch.Tensor) else x, parts)
            RECORD.clear()
            state = writer._snapshot(here)
            assert RECORD.waits.total() == 1 and not RECORD.mixups
            assert_equal_bits(parts, state)
    writer.close(pytest.fail)
