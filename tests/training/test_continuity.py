"""S-STE's claim on a run: the loss changes as predicted, which a hard threshold prevents."""

import io

import numpy as np
import pytest

from sparsepretrain import config
from sparsepretrain.console import Console
from sparsepretrain.training.assembly import build_session
from sparsepretrain.training.loop import train_step


def changes(*words, epsilon):
    """Predicted and actual changes along a part of the updates of 50 steps, from step 150 on."""
    base = ["experiment=claims_regression", "seed=7", "parallel.device=cpu", "tracker=jsonl"]
    probe = ["probe=descent", "probe.descent.every=1", f"probe.descent.epsilons=[{epsilon}]"]
    t = build_session(config.load([*base, *probe, *words]), Console(io.StringIO()))
    found = []
    t.log_probe = found.append
    observers, t.observers = t.observers, []
    for step in range(200):
        if step == 150:
            t.observers = observers
        train_step(t)
    predicted = np.array([epsilon * line["predicted"] for line in found])
    return predicted, np.array([line[f"actual_{epsilon:g}"] for line in found])


@pytest.mark.parametrize("method", ["sste", "ste"])
def test_loss_changes_are_predictable_for_soft_thresholds_only(method):
    mvue = ["sparsity.mvue=none"] if method == "sste" else []
    predicted, actual = changes(f"sparsity={method}", *mvue, epsilon=0.01)
    correlation = np.corrcoef(predicted, actual)[0, 1]
    if method == "sste":
        assert correlation > 0.95 and (actual < 0).all()
    else:
        assert correlation < 0.7
