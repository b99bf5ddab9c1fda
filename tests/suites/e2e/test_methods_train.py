"""Methods, patterns and layers of tiny runs; phase switches in record and console."""

import pytest

from sparsepretrain.reports.runs import load
from support.tiny_runs import metrics

BOTH = 'sparsity.targets=["*.mlp.*","*.attn.*"]'


@pytest.mark.parametrize(("n", "m"), [(1, 4), (4, 8)])
def test_any_pattern_trains_on_all_layers(tiny, n, m):
    overrides = ["sparsity=srste", f"sparsity.n={n}", f"sparsity.m={m}", BOTH, "steps=4"]
    out = tiny.train(*overrides, "schedule.warmup=1").output
    assert f"srste {n}:{m} on 4 layers" in out
    assert f"4: {n}:{m} in all" in out and f"{1 - n / m:.1%} exact zeros" in out


@pytest.mark.parametrize(
    "overrides",
    [
        ("sparsity=srste", "sparsity.decay_ramp=0.5"),
        ("sparsity=tsrste", "sparsity.dense_tail=0.2", BOTH),
        ("sparsity=sdgp", "sparsity.n=4", "sparsity.m=16"),
        ("sparsity=bimask", "sparsity.every=2", "sparsity.candidates=3"),
        ("sparsity=mdgf", "sparsity.n=1"),
        ("sparsity=sdgf", "sparsity.n=1", "sparsity.m=8"),
        ("sparsity=slope", "sparsity.mask=random"),
        ("sparsity=dense", "sparsity.flip_rule=transposable", "sparsity.refresh=2"),
        ("experiment=half",),
    ],
)
def test_method_options_train(tiny, overrides):
    outcome = tiny.train(*overrides)
    assert outcome.code == 0 and "warning" not in outcome.output
    lines = [line for line in metrics(outcome.directory) if "split" not in line]
    assert len(lines) == 6 and lines[-1]["loss"] < lines[0]["loss"]


@pytest.mark.parametrize(
    ("overrides", "switches"),
    [
        (("sparsity=tsrste", "sparsity.dense_tail=0.34"), [(4, "sparse → dense")]),
        (("sparsity=asp", "sparsity.at=0.5"), [(3, "dense → sparse")]),
        (
            ("sparsity=ste", "sparsity.window.start=0.34", "sparsity.window.stop=0.67"),
            [(2, "dense → sparse"), (4, "sparse → dense")],
        ),
        (("sparsity=step", "sparsity.clipping=[0.2,0.4]"), [(3, "dense → sparse")]),
        (("sparsity=sste",), []),
    ],
)
def test_phase_switch_is_in_record_and_console(tiny, overrides, switches):
    overrides = (*overrides, "log.every=100", "log.layers_every=0")
    outcome = tiny.train(*overrides)
    assert load(outcome.directory).switches() == switches
    steps = [line["step"] for line in metrics(outcome.directory) if "split" not in line]
    assert steps == sorted({1, 6, *(step for step, _ in switches)})
    lines = [text for text in outcome.output.splitlines() if "from here on" in text]
    assert len(lines) == len(switches)
    for text, (step, change) in zip(lines, switches, strict=True):
        assert text.startswith(f"step {step}/6  {change.rpartition(' ')[2]} from here on")
    if "sparsity=step" in overrides:
        assert "AutoSwitch: Z̄ " in lines[0] and "ε 1.00e-08" in lines[0]
        record = [line for line in metrics(outcome.directory) if "autoswitch_z" in line]
        assert [line["step"] for line in record] == [1, 3]


def test_early_switch_of_step_warns_in_every_run(tiny, recwarn):
    overrides = ("sparsity=step", "sparsity.clipping=[0.2,0.4]")
    for seed in (1, 2):  # Python's default filter shows a warning once per location
        lines = tiny.train(*overrides, f"seed={seed}").output.splitlines()
        (warning,) = [line for line in lines if line.startswith("warning: ")]
        assert "StepAdamW switched at step 3" in warning
    assert not recwarn.list
