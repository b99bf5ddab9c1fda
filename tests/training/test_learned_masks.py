"""Learned masks in the trainer: no backward, exact resume, masks to begin from, cost."""

import io

import pytest
import torch

from sparsepretrain import config
from sparsepretrain.cli import main
from sparsepretrain.console import Console
from sparsepretrain.export.run import export_run
from sparsepretrain.kernels import nm_mask
from sparsepretrain.runs import weights
from sparsepretrain.training import loop
from sparsepretrain.training.assembly import build_session
from sparsepretrain.training.plan import dry_run
from support.tiny_runs import assert_same_run, final_state, interrupted, metrics

SGD = ("optim=sgd", "optim.lr=5", "optim.momentum=0", "optim.weight_decay=0")
MASKPRO = ("sparsity=maskpro", "sparsity.logit=1", *SGD, "model.dropout=0.1")


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A dense run, whose masks are learned."""
    from support.tiny_runs import Tiny, write_corpus

    root = tmp_path_factory.mktemp("learned")
    (root / "corpus").mkdir()
    write_corpus(root / "corpus")
    tiny = Tiny(root, root / "corpus")
    return tiny.train("sparsity=dense", "steps=20").directory


@pytest.mark.parametrize("micro", [4, 2])
def test_resume_is_bit_exact(tiny, stop_after, source, micro):
    words = (*MASKPRO, f"init.path='{source}'", f"batch.micro={micro}")
    whole = tiny.train(*words, f"runs_dir='{tiny.root / 'whole'}'").directory
    assert_same_run(whole, interrupted(tiny, stop_after, (1, 3), *words))


def test_weights_stay_and_the_exported_model_has_learned_masks(tiny, source):
    near_ties = ("sparsity.logit=1e-3", f"init.path='{source}'")
    outcome = tiny.train(*MASKPRO, *near_ties)
    assert outcome.code == 0 and "2:4 in all" in outcome.output
    before, after = (final_state(run)["model"] for run in (source, outcome.directory))
    for name, weight in before.items():
        assert "sparsity" in name or torch.equal(after[name], weight), name
    learned = [name for name in after if name.endswith("sparsity.logits")]
    assert len(learned) == 4
    lines = metrics(outcome.directory)
    assert any(line.get("flip_rate", 0) > 0 for line in lines)
    exported = export_run(outcome.directory, console=Console.silent())
    assert main(["audit", str(exported), "--require", "2:4", "--layers", "*.mlp.*"]) == 0


@pytest.mark.parametrize("micro", [4, 2])
def test_gradients_are_those_of_the_two_losses(tiny, micro):
    """Of the global batch, whatever its micro-batches; dropout is the same in both forwards."""
    session = tiny.build(*MASKPRO, f"batch.micro={micro}")
    method, layers = session.sparsifier.method, session.sparsifier.layers
    batches = session.batches.step(0)
    items = loop._items(session, batches)
    with torch.no_grad():
        drawn = sum(loss for _, loss, *_ in loop._losses(session, 0, batches)) / items
        with session.sparsifier.first_masks():
            first = sum(loss for _, loss, *_ in loop._losses(session, 0, batches)) / items
    expected = {
        name: method.policy_gradient(
            layer.sparsity.logits.detach(), layer.sparsity, (drawn - first).double()
        )
        for name, layer in layers.items()
    }
    assert drawn != first
    for layer in layers.values():
        layer.sparsity.tracker.zero_()
    before = {name: layer.sparsity.logits.detach().clone() for name, layer in layers.items()}
    step = loop.train_step(session)
    assert step.loss == pytest.approx(float(drawn))
    for name, layer in layers.items():
        moved = before[name] - layer.sparsity.logits
        torch.testing.assert_close(moved, step.lr * expected[name], rtol=1e-3, atol=1e-7)


def test_init_mask_is_what_training_begins_from(tiny, source):
    run = tiny.load(*MASKPRO, f"init.path='{source}'", "init.mask=wanda")
    found = weights.find(source, print)
    session = build_session(run, Console.silent(), initial=found, fresh=True)
    masks = session.sparsifier.masks()
    differs = [
        not torch.equal(masks[name], nm_mask(layer.weight.detach(), dim=layer.in_dim))
        for name, layer in session.sparsifier.layers.items()
    ]
    assert any(differs), "Wanda is not magnitude"


def test_the_dry_run_counts_two_forwards_and_the_logits():
    def rows(*words):
        out = io.StringIO()
        dry_run(config.load(["model=gpt2_nano", *words]), Console(out))
        return " ".join(out.getvalue().split())

    dense, learned = rows("sparsity=dense"), rows("sparsity=maskpro", "optim=sgd")
    assert "forward and backward" in dense
    assert "two forwards without a backward" in learned
    entries = 786_432 * 16 * 128 * 2 * 2  # all linear layers of the blocks, twice
    assert f"sparse layers: fprop {entries / 1e9:.2f}G " in learned
    assert "0.00 KiB activations" in learned
