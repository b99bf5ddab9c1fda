"""One optimizer step: what is averaged, clipped, decayed, scaled, and when nothing is updated."""

import copy
import io
import math

import pytest
import torch

from sparsepretrain.console import Console
from sparsepretrain.errors import DivergedError
from sparsepretrain.tasks.causal_lm import CausalLM
from sparsepretrain.training import loop
from sparsepretrain.training.guard import MAX_OVERFLOWS, MAX_SKIPS
from sparsepretrain.training.loop import train_step
from sparsepretrain.training.trainer import train
from sparsepretrain.training.validation import evaluate
from support.tiny_runs import METHODS, assert_equal_bits, final_state, metrics


def losses(tiny, *overrides):
    return [line["loss"] for line in metrics(tiny.train(*overrides).directory)]


def test_gradients_of_accumulation_are_exact_in_double(tiny):
    grads = []
    for micro in (8, 4, 2, 1):
        t = tiny.build("batch.size=8", f"batch.micro={micro}", "clip=null")
        t.model.double()
        seen = []

        def pre_hook(optimizer, args, kwargs, t=t, seen=seen):
            seen += [p.grad.clone() for p in t.model.parameters()]
            raise StopIteration

        t.optimizer.register_step_pre_hook(pre_hook)
        with pytest.raises(StopIteration):
            train_step(t)
        grads.append(seen)
    for other in grads[1:]:
        for a, b in zip(grads[0], other, strict=True):
            assert a.dtype == torch.float64
            # the loss itself is formed in fp32, as design 7 says
            torch.testing.assert_close(a, b, rtol=0, atol=1e-7)


def test_loss_is_the_mean_over_all_target_tokens(tiny):
    t = tiny.build("batch.micro=1", "sparsity=dense")
    reference = copy.deepcopy(t.model)
    batch = t.task.batch("train", 0, range(4), 4)
    logits = reference(input_ids=batch["tokens"]).logits.double()
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten())
    values = train_step(t)
    assert values.loss == pytest.approx(expected.item(), abs=1e-6)
    assert values.items == 4 * 16 and t.counters.tokens == 64 and t.step == 1


def test_clip_limits_the_update_and_records_the_unclipped_norm(tiny):
    norms = {}
    for clip in ("null", "0.25", "1e6"):
        t = tiny.build(f"clip={clip}", "optim=sgd", "optim.weight_decay=0", "optim.momentum=0")
        before = [p.detach().clone() for p in t.model.parameters()]
        values = train_step(t)
        moves = [a - b for a, b in zip(t.model.parameters(), before, strict=True)]
        moved = torch.nn.utils.get_total_norm(moves).item()
        norms[clip] = (values.grad_norm, moved / values.lr)
    unclipped = norms["null"][0]
    assert unclipped > 0.5
    assert norms["null"] == pytest.approx((unclipped, unclipped), rel=1e-4)
    assert norms["1e6"] == norms["null"]  # multiplied by exactly 1
    assert norms["0.25"] == pytest.approx((unclipped, 0.25), rel=1e-4)  # the norm before clipping


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_weight_decay_on_matrices_only(tiny, optimizer):
    t = tiny.build(f"optim={optimizer}", "optim.weight_decay=0.3", "model.bias=true")
    decay = {id(p): g["weight_decay"] for g in t.optimizer.param_groups for p in g["params"]}
    names = {name: decay[id(p)] for name, p in t.model.named_parameters()}
    assert len(names) == len(decay) == len(list(t.model.parameters()))
    assert {v for k, v in names.items() if k.endswith("bias") or ".ln_" in k} == {0.0}
    assert names["transformer.h.0.mlp.c_fc.weight"] == names["transformer.wte.weight"] == 0.3


def test_recorded_learning_rate_is_the_one_used(tiny):
    t = tiny.build("schedule=linear", "schedule.warmup=0", "optim=sgd", "optim.lr=0.6")
    for step in range(6):
        values = train_step(t)
        assert values.lr == pytest.approx(0.6 * (1 - step / 6))
        assert {g["lr"] for g in t.optimizer.param_groups} == {values.lr}


@pytest.mark.parametrize(
    ("precision", "optimizer"), [("bf16", "adamw"), ("fp16", "sgd"), ("fp8_sim", "adamw")]
)
def test_precisions_train_with_fp32_masters(tiny, precision, optimizer):
    changes = (f"optim={optimizer}", "optim.lr=1e-2", "schedule=constant")
    full, half = losses(tiny, *changes), losses(tiny, *changes, f"precision={precision}")
    assert half != full and half == pytest.approx(full, abs=0.05)
    weights = final_state(tiny.directory(*changes, f"precision={precision}"))["model"]
    assert {w.dtype for w in weights.values() if w.is_floating_point()} == {torch.float32}


@pytest.mark.parametrize(
    "words",
    [
        "optim=adamw precision=fp16",
        "optim=sgd precision=fp16",
        # S-STE's published GPT-2 runs
        "precision=fp8_sim precision.dtype=fp16 precision.recipe=reference",
    ],
)
def test_overflow_skips_the_update_and_halves_the_scale(tiny, words):
    t = tiny.build(*words.split(), "precision.init_scale=1e30")
    before = copy.deepcopy(t.model.state_dict())
    calls = []
    t.optimizer.register_step_post_hook(lambda *_: calls.append(1))
    train_step(t)
    assert (t.step, t.guard.skipped, t.guard.skips_in_a_row, calls) == (1, 1, 1, [])
    assert t.scaler.get_scale() == pytest.approx(5e29)
    assert t.sparsifier.completed_steps == 0
    assert_equal_bits(before, t.model.state_dict())
    assert not any(state for state in t.optimizer.state.values())


def test_overflows_are_recorded_without_stale_flip_rates(tiny):
    t = tiny.build("precision=fp16", "precision.init_scale=1e12")
    while t.guard.skips_in_a_row or not t.step:
        train_step(t)
    assert 0 < t.guard.skipped == t.step - 1 < MAX_OVERFLOWS
    assert t.sparsifier.completed_steps == 1
    outcome = tiny.train("precision=fp16", "precision.init_scale=1e30", "guard=stop")
    lines = [line for line in metrics(outcome.directory) if "split" not in line]
    assert [line["skipped"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert all("flip_rate" not in line for line in lines)


LAYER = "transformer.h.0.mlp.c_fc.weight"


def poison(t, value=math.nan):
    """Let one entry of the gradient of ``LAYER`` be ``value`` from now on."""

    def hook(grad):
        grad = grad.clone()
        grad.view(-1)[7] = value
        return grad

    t.model.get_parameter(LAYER).register_hook(hook)


def trained(t):
    """All that a step updates, without the step counters, which nothing saves after an error."""
    model = {k: v for k, v in t.model.state_dict().items() if k != "sparsity_counters"}
    return [model, t.optimizer.state_dict()["state"]]


@pytest.mark.parametrize(("value", "clip"), [(math.nan, "1.0"), (math.inf, "null")])
def test_guard_stop_names_the_parameter_and_updates_nothing(tiny, value, clip):
    t = tiny.build(f"clip={clip}")
    train_step(t)
    before = copy.deepcopy(trained(t))
    poison(t, value)
    with pytest.raises(DivergedError) as caught:
        train_step(t)
    message = str(caught.value)
    assert caught.value.exit_code == 5 and "\n" not in message
    assert message.startswith(f"step 2: the gradient of {LAYER} ")
    assert "guard=skip" in message
    assert_equal_bits(before, trained(t))


@pytest.mark.parametrize("method", ["tsrste", "slope"])
@pytest.mark.parametrize("line", ["log", "checkpoint"])
def test_nan_in_a_pruned_weight_stops_the_run(tiny, monkeypatch, method, line):
    """The loss stays finite, so only the weights themselves show it."""

    def poisoned_step(t):
        values = train_step(t)
        if t.step == 3:
            layer = next(iter(t.sparsifier.layers.values()))
            with torch.no_grad():
                layer.weight[~t.sparsifier.masks()["transformer.h.0.mlp.c_fc"]] = float("nan")
        assert math.isfinite(values.loss)
        return values

    monkeypatch.setattr(loop, "train_step", poisoned_step)
    every = 1 if line == "log" else 100
    words = (f"sparsity={method}", f"log.every={every}", "log.layers_every=0", "guard=skip")
    with pytest.raises(DivergedError, match=LAYER) as caught:
        tiny.train(*words)
    assert caught.value.exit_code == 5
    assert str(caught.value).startswith(f"step {3 if line == 'log' else 4}: ")
    assert final_state(tiny.directory(*words))["step"] == 2


def test_signal_in_a_step_is_agreed_on_with_its_losses(tiny):
    t, undisturbed = tiny.build(), tiny.build()
    t.stop.signals.exit_code = 143
    assert train_step(t).loss == train_step(undisturbed).loss
    assert (t.stop.agreed, undisturbed.stop.agreed) == (143, None)


def test_guard_names_the_layer_of_a_nan(tiny):
    """Everything before the layer has a NaN too; the layer itself is the one to name."""
    t = tiny.build()
    layer = t.model.transformer.h[0].mlp.c_fc
    layer.register_full_backward_hook(lambda m, gi, go: (gi[0] * float("nan"),))
    with pytest.raises(DivergedError, match=r"ln_2.weight .*\d+ parameters"):
        train_step(t)


def test_guard_skip_stops_after_max_skips(tiny):
    t = tiny.build("guard=skip", "steps=100", "precision=fp32")
    before = copy.deepcopy([t.model.state_dict(), t.optimizer.state_dict()["state"]])
    poison(t)
    for k in range(1, MAX_SKIPS + 1):
        values = train_step(t)
        assert (t.step, t.guard.skipped, t.guard.skips_in_a_row) == (k, k, k)
        assert math.isnan(values.grad_norm)
    with pytest.raises(DivergedError, match=f"{MAX_SKIPS + 1} steps in a row") as caught:
        train_step(t)
    assert "guard=skip" not in str(caught.value)
    assert_equal_bits(before, [t.model.state_dict(), t.optimizer.state_dict()["state"]])


def test_nan_under_loss_scaling_stops_after_max_overflows(tiny):
    t = tiny.build("precision=fp16", "steps=200")
    poison(t)
    with pytest.raises(DivergedError, match=f"{LAYER} is not finite, {MAX_OVERFLOWS + 1} steps"):
        for _ in range(200):
            train_step(t)


@pytest.fixture
def multiply_losses(monkeypatch):
    """``multiply_losses(nan, 1, 4)``: the training losses of these calls are multiplied."""
    original = CausalLM.loss

    def start(factor, *numbers):
        calls = []

        def loss(self, model, batch):
            calls.append(model.training)
            total, count = original(self, model, batch)
            return total * (factor if sum(calls) in numbers else 1.0), count

        monkeypatch.setattr(CausalLM, "loss", loss)

    return start


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_guard_skips_a_nan_loss(tiny, multiply_losses, precision):
    """Also under loss scaling, where the scaler must not be left half way through its step."""
    multiply_losses(math.nan, 1, 4)
    outcome = tiny.train("guard=skip", f"precision={precision}")
    lines = [line for line in metrics(outcome.directory) if "split" not in line]
    assert outcome.code == 0 and "skipped steps" in outcome.output
    assert [line["loss"] is None for line in lines] == [True, False, False, True, False, False]
    assert lines[-1]["skipped"] == 2


def test_divergence_keeps_the_last_checkpoint(tiny, multiply_losses):
    multiply_losses(math.inf, 4)
    with pytest.raises(DivergedError, match="step 4: the loss is inf"):
        tiny.train()
    state = final_state(tiny.directory())
    assert state["step"] == 2
    assert all(torch.isfinite(v).all() for v in state["model"].values() if v.is_floating_point())
    multiply_losses(1.0)
    assert "step 2" in tiny.train().output


def test_evaluation_leaves_the_session_unchanged(tiny):
    t = tiny.build("model.dropout=0.5", "sparsity.beta_update=step", "batch.micro=2")
    train_step(t)

    def everything():
        states = [part.state_dict() for part in (t.model, t.optimizer, t.sparsifier)]
        return copy.deepcopy([*states, torch.get_rng_state(), t.step, t.counters.tokens])

    before, flips = everything(), t.sparsifier.metrics(per_layer=True)
    first = evaluate(t, "validation", 1, final=False)
    assert evaluate(t, "validation", 1, final=False) == first and first["loss"] > 0
    assert_equal_bits(before, everything())
    assert t.sparsifier.metrics(per_layer=True) == flips
    assert all(p.grad is None for p in t.model.parameters())


def test_evaluations_do_not_change_training(tiny):
    def training(*overrides):
        directory = tiny.train(*overrides, "model.dropout=0.2").directory
        return [line for line in metrics(directory) if "split" not in line]

    assert training("eval.every=1", "eval.batches=3") == training("eval.batches=0")


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("mode", ["model", "blocks"])
def test_compiled_losses_equal_eager_ones(tiny, method, mode):
    changes = (f"sparsity={method}", "batch.micro=2", "model.n_layer=2")
    eager = losses(tiny, *changes)
    # elsewhere: here it is the same run, and finished
    other = (f"runs_dir='{tiny.root / mode}'", f"compile={mode}")
    assert losses(tiny, *changes, *other) == pytest.approx(eager, abs=1e-4)


def test_a_closed_console_does_not_stop_a_run(tiny):
    closed = io.StringIO()
    closed.close()
    assert train(tiny.load(), Console(closed)) == 0
