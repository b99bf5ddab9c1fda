"""The arithmetic of ``roofline`` and the page that shows it."""

import pytest

import roofline
from support import ROOT

PAGE = (ROOT / "docs" / "gpu.md").read_text(encoding="utf-8")


def test_the_page_shows_what_the_script_prints():
    for row in roofline.expected():
        assert row in PAGE
    for change, share in roofline.gains().items():
        assert f"| {change} | {share:.1%} |" in PAGE


def test_parameters_are_those_of_the_recipes():
    sizes = [model.parameters / 1e6 for model in roofline.MODELS]
    assert sizes == pytest.approx([124, 124, 774, 134, 1340, 1340], rel=0.02)


def test_a_sparse_matmul_that_saves_nothing_leaves_the_price_of_sampling():
    model = roofline.Model(**{**vars(roofline.GPT2), "sparse": 1.0})
    found = model.ratios()
    assert model.saved == 0 and found["sste:auto"] == found["sste"] > found["ste"]


def test_parts_add_up_and_larger_micro_batches_share_the_weights():
    small, large = roofline.MODELS[:2]
    assert small.seconds == pytest.approx(sum(small.parts().values()))
    assert large.parts()["weights"] == small.parts()["weights"]
    assert large.seconds < 4 * small.seconds and large.mfu > small.mfu
