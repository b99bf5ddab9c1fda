"""Learned masks in the trainer: exact resume, masks to begin from, export, cost."""

import io

import pytest
import torch
from safetensors.torch import load_file

from sparsepretrain import config
from sparsepretrain.cli import main
from sparsepretrain.console import Console
from sparsepretrain.errors import CheckpointError
from sparsepretrain.export.run import export_run
from sparsepretrain.kernels import nm_mask
from sparsepretrain.runs import weights
from sparsepretrain.training import loop
from sparsepretrain.training.assembly import build_session
from sparsepretrain.training.plan import dry_run
from support.tiny_runs import assert_same_run, final_state, interrupted, metrics

SGD = ("optim=sgd", "optim.lr=5", "optim.momentum=0", "optim.weight_decay=0")
MASKPRO = ("sparsity=maskpro", "sparsity.logit=1", *SGD, "model.dropout=0.1")
MASKLLM = ("sparsity=maskllm", "optim.lr=0.05", "sparsity.penalty=0.01", "model.dropout=0.1")
PROXSPARSE = ("sparsity=proxsparse", "optim.lr=0.01", "model.dropout=0.1")
METHODS = [MASKPRO, MASKLLM, PROXSPARSE]
every_method = pytest.mark.parametrize("method", METHODS, ids=["maskpro", "maskllm", "proxsparse"])


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A dense run, whose masks are learned."""
    from support.tiny_runs import Tiny, write_corpus

    root = tmp_path_factory.mktemp("learned")
    (root / "corpus").mkdir()
    write_corpus(root / "corpus")
    tiny = Tiny(root, root / "corpus")
    return tiny.train("sparsity=dense", "steps=20").directory


@every_method
def test_masks_of_random_weights_are_warned_of(tiny, source, method):
    def shown(*words):
        out = io.StringIO()
        dry_run(tiny.load(*method, *words), Console(out))
        return out.getvalue()

    warning = f"{method[0]} learns masks of weights that stay as they are"
    assert warning in " ".join(shown().split())
    assert "learns masks" not in shown(f"init.path='{source}'")
    assert warning in " ".join(tiny.train(*method).output.split())


@pytest.mark.parametrize("micro", [4, 2])
@every_method
def test_resume_is_bit_exact(tiny, stop_after, source, method, micro):
    words = (*method, f"init.path='{source}'", f"batch.micro={micro}")
    whole = tiny.train(*words, f"runs_dir='{tiny.root / 'whole'}'").directory
    assert_same_run(whole, interrupted(tiny, stop_after, (1, 3), *words))


@every_method
def test_weights_stay_and_the_exported_model_has_learned_masks(tiny, source, method):
    near_ties = ["sparsity.logit=1e-3"] if method is MASKPRO else []
    outcome = tiny.train(*method, *near_ties, f"init.path='{source}'")
    assert outcome.code == 0 and "2:4 in all" in outcome.output
    before, after = (final_state(run)["model"] for run in (source, outcome.directory))
    for name, weight in before.items():
        first = name.replace("weight", "sparsity.original")
        assert "sparsity" in name or torch.equal(after.get(first, after[name]), weight), name
    ends = ("sparsity.logits", "sparsity.gates", "sparsity.original")
    assert len([name for name in after if name.endswith(ends)]) == 4
    lines = metrics(outcome.directory)
    assert any(line.get("flip_rate", 0) > 0 for line in lines)
    exported = export_run(outcome.directory, console=Console.silent())
    assert main(["audit", str(exported), "--require", "2:4", "--layers", "*.mlp.*"]) == 0
    written = load_file(exported / "model.safetensors")
    assert len([name for name in written if "mlp" in name]) == 4
    for name, weight in written.items():
        if name in before and weight.dim() == 2:  # Conv1D stores (in, out)
            own = before[name].t() if "c_" in name else before[name]
            assert ((weight == 0) | (weight == own)).all(), name


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


def test_gates_of_masks_follow_loss_and_penalty(tiny):
    """In fp16 too, whose gradients contain the loss scale when the penalty is added."""
    found = []
    for precision in ("fp64", "fp16"):
        session = tiny.build(*MASKLLM, f"precision={precision}", "optim=sgd", "optim.lr=1e-3")
        layers = session.sparsifier.layers
        before = {name: layer.sparsity.gates.detach().clone() for name, layer in layers.items()}
        expected = {
            name: session.sparsifier.method.penalty_gradients(layer.weight, layer.sparsity)["gates"]
            for name, layer in layers.items()
        }
        session.run.clip = None
        loop.train_step(session)
        moved = {name: before[name] - layer.sparsity.gates for name, layer in layers.items()}
        found.append({name: value.double() for name, value in moved.items()})
        assert all(value.abs().max() > 0 for value in expected.values())
    for name, value in found[0].items():
        torch.testing.assert_close(
            found[1][name], value, rtol=0.05, atol=float(value.abs().max()) / 20
        )


@pytest.mark.parametrize("name", ["maskllm", "cast"])
def test_a_run_of_another_length_is_not_gone_on_with(tiny, stop_after, name):
    words = (f"sparsity={name}", "optim.lr=0.1", "checkpoint.every=2")
    stop_after(2)
    first = tiny.train(*words, "name=first").directory
    with pytest.raises(CheckpointError, match="another configuration: steps: 6 -> 20"):
        tiny.train(*words, "name=second", "steps=20", f"resume='{first}'")


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


def test_the_dry_run_says_that_training_is_dense_and_counts_the_bytes_of_a_weight():
    for name, learned, why in (
        ("maskllm", 4 + 3 * 6 + 2 + 4 + 1 / 8 + 4, "training multiplies by means of masks"),
        ("proxsparse", 4 + 4 + 4 + 8 + 4 + 1 / 8, "training multiplies by the learned weights"),
    ):
        out = io.StringIO()
        dry_run(config.load(["model=gpt2_nano", f"sparsity={name}"]), Console(out))
        text = " ".join(out.getvalue().split())
        assert f"none: {why}" in text and "fprop, in evaluation alone" in text
        assert f"({learned:.1f} bytes per weight)" in text, (name, learned, text)


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
