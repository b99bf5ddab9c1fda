"""FLOPs of 2:4 matmuls in the dry run, and the bound of the speed-up."""

import io
import re
from collections import Counter

import pytest

from sparsepretrain import config
from sparsepretrain.console import Console
from sparsepretrain.training.cost import MatmulFlops, run_cost
from sparsepretrain.training.plan import dry_run


def rows(*overrides):
    """Return the dry run's lines about FLOPs and speed-up."""
    words = ["tracker.mode=disabled", "parallel.device=cpu", "precision=bf16", *overrides]
    out = io.StringIO()
    dry_run(config.load(words), Console(out))
    cells = [line.strip("│ ").split(" │ ") for line in out.getvalue().splitlines()]
    found = {cell[0].strip(): cell[1].strip() for cell in cells if len(cell) == 2}
    return found["FLOPs per step"], found["speed-up"]


def padded_lines(*overrides):
    """Return the dry run's lines about zero padding, and the bound of the speed-up."""
    words = ["tracker.mode=disabled", "parallel.device=cpu", "precision=bf16", *overrides]
    out = io.StringIO()
    dry_run(config.load(words), Console(out))
    lines = [line.strip("│ ") for line in out.getvalue().splitlines()]
    found = [line.removeprefix("zero padding").strip("│ ") for line in lines if "% work)" in line]
    (bound,) = re.findall(r"at most (\d\.\d+)×", out.getvalue())
    return found, float(bound)


def test_bound_follows_amdahls_law():
    def bound(zeros=0.0, **sparse):
        found = Counter(fprop=zeros)
        return MatmulFlops(10.0, Counter(), Counter(sparse), found, Counter(), []).bound

    assert bound(fprop=2.0, wgrad=2.0) == pytest.approx(1 / (0.6 + 0.4 / 2))
    assert bound() == 1
    assert bound(fprop=10.0) == 2
    # a padded matmul costs half of all that it multiplies
    assert bound(2.0, fprop=4.0) == pytest.approx(1 / (0.6 + 0.6 / 2))


def test_flops_per_matmul_and_the_bound():
    # 2 FLOPs per weight and token: 8 layers of 128 × 512 weights, 2,048 tokens in a step
    flops, bound = rows("sparsity=sste", "batch.size=16", "batch.micro=8")
    each = 2 * 8 * 512 * 128 * 2048
    assert each == 2_147_483_648
    assert flops == "sparse layers: fprop 2.15G (2.15G 2:4), dgrad 2.15G, wgrad 2.15G (2.15G 2:4)"
    assert bound.startswith("at most 1.") and "twice as fast at best (Amdahl)" in bound
    assert rows("sparsity=sste", "batch.size=16", "batch.micro=16") == (flops, bound)


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (["sparsity=dense"], "no matmul has an N:M operand"),
        (["sparsity=act24"], "the 2:4 operand is an activation"),
        (["precision=fp32"], "sparse matmuls exist in fp16 and bf16, not in float32"),
        (["sparsity=ste", "sparsity.n=1"], "1:4, not 2:4"),
    ],
)
def test_a_run_without_2_4_matmuls_names_the_reason(overrides, reason):
    assert rows(*overrides)[1] == f"none: {reason}"


@pytest.mark.parametrize(
    ("model", "least", "padding"),
    [
        ("llama_60m", 1.14, "fprop of 16 layers: 1376 × 512 to 1408 × 512 (+2.3% work)"),
        pytest.param(
            "llama_350m",
            1.23,
            "fprop of 48 layers: 2736 × 1024 to 2752 × 1024 (+0.6% work)",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "llama_1b",
            1.25,
            "fprop of 48 layers: 5464 × 2048 to 5504 × 2048 (+0.7% work)",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_widths_of_llama_are_padded_and_both_matmuls_of_sste_are_sparse(model, least, padding):
    found, bound = padded_lines(f"model={model}", "sparsity=sste")
    assert found[0] == padding and bound >= least
    assert any(line.startswith("wgrad") for line in found)


def test_widths_that_fit_are_not_padded():
    assert padded_lines("sparsity=sste", "batch.size=16", "batch.micro=8")[0] == []


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (
            ["model.n_embd=16", "model.n_head=2", "model.n_layer=1"],
            "padding 64 × 16 to 64 × 64 costs more than 2:4 saves",
        ),
        (
            ["batch.micro=2", "model.n_layer=1"],
            "padding 512 × 128 with 256 tokens to 512 × 128 with 512 costs more than 2:4 saves",
        ),
    ],
)
def test_padding_that_costs_more_than_2_4_saves_is_not_counted(overrides, reason):
    words = ["sparsity=ste", "sparsity.targets=[transformer.h.*.mlp.c_fc]", "batch.size=16"]
    lines = rows(*words, "batch.micro=8", *overrides)
    assert lines[1] == f"none: {reason}" and "2:4" not in lines[0]


def test_dense_matmuls_beside_sparse_ones_have_their_reason():
    words = ["sparsity=sste", "batch.size=16", "batch.micro=8", "model.n_embd=20", "model.n_head=2"]
    words += [
        "tracker.mode=disabled",
        "parallel.device=cpu",
        "precision=bf16",
        "model.n_inner=2048",
    ]
    out = io.StringIO()
    dry_run(config.load(words), Console(out))
    # 20 rows of a packed operand are padded to 64, 20 columns of a dense one to 24
    assert "8 of these matmuls: padding 20 × 2048 to 64 × 2048 costs more than" in out.getvalue()
    assert "wgrad of 4 layers: 2048 × 20 to 2048 × 24 (+20.0% work)" in out.getvalue()


@pytest.mark.parametrize(
    ("words", "sparse_lines", "matmuls"),
    [
        (["sparsity=dense"], 0, 0.0),
        (["sparsity=ste"], 10, 1.0),
        (["sparsity=sste"], 10, 2.0),
        (["sparsity=asp", "sparsity.at=0.5"], 5, 0.5),
        # the optimizer decides when STEP is sparse: the record has it
        (["sparsity=step"], 7, 0.7),
        (["sparsity=ste", "sparsity.n=3"], 10, 0.0),
    ],
)
def test_the_cost_of_a_run_counts_each_sparse_matmul_as_half(words, sparse_lines, matmuls):
    run = config.load(["experiment=claims_regression", "steps=100", *words])
    steps = [1, *range(10, 100, 10), 95, 98]  # not evenly spaced, as in a record with events
    lines = [{"step": i, "sparse": float(i >= 10 * (10 - sparse_lines))} for i in steps]
    lines[0]["sparse"] = float(sparse_lines == 10)
    lines.append({"step": 100, "split": "validation", "loss": 1.0})
    # per step: input and output 32×32 (no gradient of the input), FFNs 4 × 32 × 128
    samples, ffn = 128, 2 * 128 * 4 * 32 * 128
    dense = samples * 2 * (2 * 32 * 32 + 3 * 32 * 32) + 3 * ffn
    assert run_cost(run, lines)[:2] == pytest.approx((matmuls, 100 * (dense - matmuls * ffn / 2)))
