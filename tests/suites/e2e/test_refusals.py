"""Bad input of the command: exit code, one line, no traceback, nothing written."""

import pytest

from sparsepretrain.cli import main


@pytest.fixture
def refused(tiny, tmp_path, monkeypatch, capfd):
    """``refused(code, words, *overrides)`` checks for one line on stderr and no files."""
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    monkeypatch.setenv("SPARSEPRETRAIN_CACHE_DIR", str(tmp_path / "cache"))

    def check(code: int, words: list[str], *overrides: str):
        capfd.readouterr()
        assert main(["train", *tiny.overrides("runs_dir=runs", *overrides)]) == code
        out, err = capfd.readouterr()
        lines = err.splitlines()
        assert len(lines) == 1 and lines[0].startswith("sparsepretrain: "), err
        assert all(word in lines[0] for word in words), lines[0]
        assert "Traceback" not in out + err and len(lines[0]) < 400
        assert not list(work.iterdir())

    return check


def test_corpus_shorter_than_a_sequence_is_refused(refused, tmp_path):
    (tmp_path / "short.txt").write_text("ten bytes.")
    words = ["data error", "needs 17", "task.sequence_length"]
    refused(3, words, f"data.files=['{tmp_path / 'short.txt'}']")


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("model.n_inner=66", ["'transformer.h.0.mlp.c_proj': in_features = 66 is not a multiple"]),
        ("parallel.device=cuda", ["parallel.device=cuda"]),
    ],
)  # fmt: skip
def test_wrong_layers_are_refused_before_data_is_prepared(
    refused, tmp_path, monkeypatch, override, words
):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    refused(2, ["config error", *words], override)
    assert not (tmp_path / "cache").exists()


def test_published_run_without_its_data_names_the_command(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SPARSEPRETRAIN_CACHE_DIR", str(tmp_path / "cache"))
    assert main(["train", "model=gpt2_124m", "sparsity=sste"]) == 3
    err = capfd.readouterr().err
    assert err.startswith("sparsepretrain: data error: ") and err.count("\n") == 1
    assert "sparsepretrain prepare data=openwebtext" in err and "data=python_source" in err
    assert not list(tmp_path.iterdir())
