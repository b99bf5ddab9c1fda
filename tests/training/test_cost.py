"""Costs of runs before they start."""

import pytest

from sparsepretrain import config
from sparsepretrain.training.cost import run_cost

MICRO = ["experiment=claims_lm", "steps=100"]


@pytest.mark.parametrize(
    ("words", "sparse_steps", "matmuls", "nonzero", "average"),
    [
        (["sparsity=dense"], (), 0.0, 1.0, 1.0),
        (["sparsity=ste"], range(100), 1.0, 0.5, 0.5),
        (["sparsity=ste", "sparsity.n=1"], range(100), 1.0, 0.25, 0.25),
        (["sparsity=ste", "sparsity.window.stop=0.7"], range(70), 0.7, 1.0, 0.65),
        (["sparsity=asp", "sparsity.at=0.5"], range(50, 100), 0.5, 0.5, 0.75),
        # trains through scaled weights first, which are not 2:4
        (["sparsity=mdgf", "sparsity.until=0.5"], range(100), 0.5, 0.5, 0.75),
        (["sparsity=tsrste", "sparsity.dense_tail=0.2"], range(80), 2.4, 1.0, 0.6),
        # the second mask is on gradients alone: the weights stay dense
        (["sparsity=sdgp"], range(100), 1.0, 1.0, 1.0),
    ],
)
def test_the_schedule_gives_the_cost_that_the_record_gives(
    words, sparse_steps, matmuls, nonzero, average
):
    run = config.load([*MICRO, *words])
    cost = run_cost(run)
    ffn = 2 * 2 * 32 * 128
    assert cost.sparse_matmuls == pytest.approx(matmuls)
    assert cost.entries - cost.nonzero == round((1 - nonzero) * ffn)
    assert cost.entries - cost.average == pytest.approx((1 - average) * ffn)
    assert cost.parameters - cost.entries == (256 + 64) * 32  # token and position embeddings
    lines = [{"step": step, "sparse": float(step in sparse_steps)} for step in range(100)]
    assert run_cost(run, lines) == pytest.approx(cost)
