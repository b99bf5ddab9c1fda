"""``sparsepretrain train``, from the command line to the report."""

from sparsepretrain.cli import main


def test_train_writes_a_report_and_is_then_finished(tiny, capfd):
    argv = ["train", *tiny.overrides()]
    assert main(argv) == 0
    out, err = capfd.readouterr()
    assert not err
    directory = tiny.directory()
    assert (directory / "report.md").is_file() and list((directory / "plots").glob("*.png"))
    assert "train loss" in out and str(directory / "plots") in out
    assert main(argv) == 0
    assert "is finished (6 steps)" in capfd.readouterr().out


def test_python_source_trains_with_bpe(tiny, tmp_path):
    root = tmp_path / "code"
    root.mkdir()
    for i in range(9):
        (root / f"m{i}.py").write_text(f"def f{i}(x):\n    return x + {i}\n" * 20)
    data = [o for o in tiny.overrides() if not o.startswith("data")]
    data += ["data=python_source", f"data.roots=['{root}']", "data.tokenizer=bpe"]
    assert main(["train", *data, "data.vocab_size=300", "model.vocab_size=304"]) == 0
