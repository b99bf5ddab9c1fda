"""Finding checkpoints of runs and of Hugging Face, and reading them."""

import os
import shutil

import pytest

from sparsepretrain.data import hub
from sparsepretrain.errors import CheckpointError
from sparsepretrain.runs import weights
from support.tiny_runs import Tiny, assert_equal_bits, final_state


@pytest.fixture(scope="module")
def run(tmp_path_factory, small_corpus, prepared_cache):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPARSEPRETRAIN_CACHE_DIR", str(prepared_cache))
        tiny = Tiny(tmp_path_factory.mktemp("weights"), small_corpus)
        return tiny.train("checkpoint.keep_last=3").directory


def test_a_run_directory_means_its_newest_checkpoint(run):
    source = weights.find(str(run))
    assert source.step == 6 and source.checkpoint is not None
    assert source.path == run / "checkpoints/step_00000006" and source.run.path == run
    assert source.config["sparsity"]["name"] == "sste"
    assert_equal_bits(source.checkpoint.part("model"), final_state(run)["model"])
    assert source.checkpoint.part("sparsifier")["completed_steps"] == 6


def test_single_checkpoints_are_found(run, tmp_path):
    assert weights.find(run / "checkpoints/step_00000002").step == 2
    copy = tmp_path / "kept"
    shutil.copytree(run / "checkpoints/step_00000004", copy)
    assert weights.find(copy).step == 4 and weights.find(copy).run is None
    with pytest.raises(CheckpointError, match="not in a run directory"):
        weights.find(copy, average=2)


def test_an_average_needs_a_run(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert weights.find(tmp_path).config is None
    with pytest.raises(CheckpointError, match="expected a run, got a Hugging Face checkpoint"):
        weights.find(tmp_path, average=2)


def test_damaged_checkpoint_is_skipped_with_a_warning(run, tmp_path):
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    (copy / "checkpoints/step_00000006/state.json").write_bytes(b"torn")
    said = []
    assert weights.find(copy, said.append).step == 4
    assert "step_00000006 is damaged" in said[0]
    with pytest.raises(CheckpointError, match="damaged"):
        weights.find(copy / "checkpoints/step_00000006")


def test_missing_checkpoints_are_named(tmp_path):
    cases = [(tmp_path / "absent", "no such directory"), (tmp_path, "neither a run directory nor")]
    trained = tmp_path / "trained"  # by a Trainer of transformers
    for name in ("checkpoint-500", "checkpoint-1000"):
        (trained / name).mkdir(parents=True)
        (trained / name / "config.json").write_text("{}")
    os.utime(trained / "checkpoint-500/config.json", (0, 0))
    cases.append(
        (trained, "it has 2 checkpoints in subdirectories: give one, such as .*checkpoint-1000")
    )
    for path, message in cases:
        with pytest.raises(CheckpointError, match=message) as caught:
            weights.find(path)
        assert "\n" not in str(caught.value)
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(CheckpointError, match="no whole checkpoint"):
        weights.find(tmp_path)


def test_an_unknown_name_without_network_is_one_short_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(hub, "_reachable", lambda: False)
    with pytest.raises(CheckpointError) as caught:
        weights.find("no-such-checkpoint")
    (line,) = caught.value.messages
    assert line.startswith("no-such-checkpoint: no such directory; the hub cannot be reached")


def test_mistyped_run_is_refused_without_asking_the_hub(tmp_path, monkeypatch):
    run = tmp_path / "runs/default/1a2b3c4d-s0"
    (run / "checkpoints/step_00000020").mkdir(parents=True)
    monkeypatch.setattr(hub, "_reachable", lambda: pytest.fail("the hub was asked"))
    for name, why in {
        "runs/default/1a2b3c4d-s1": "there is no such directory",
        "./runs/default/1a2b-s0": "there is no such directory",
        f"{run}/checkpoints/step_00000002": "there is no such directory",
        "runs/x": "there is no such directory",
        "runs/default": "has no checkpoints/",
        "other/default/1a2b3c4d-s0": "there is no such directory",
    }.items():
        with pytest.raises(CheckpointError) as caught:
            weights.find(name)
        assert why in str(caught.value) and "hub" not in str(caught.value)
    for name, meant in {
        "runs/default/1a2b3c4d-s1": "runs/default/1a2b3c4d-s0",
        "runs/xdefault/1a2b3c4d-s0": "runs/default",
        f"{run}/checkpoints/step_00000002": f"{run}/checkpoints/step_00000020",
        "runs/x": None,
    }.items():
        with pytest.raises(CheckpointError) as caught:
            weights.find(name)
        hint = f"(did you mean {meant!r}?)"
        assert hint in str(caught.value) if meant else "did you mean" not in str(caught.value)
    monkeypatch.setattr(hub, "_reachable", lambda: False)
    with pytest.raises(CheckpointError, match=r"^gpt2x: .*hub"):
        weights.find("gpt2x")
