"""The directory of a run: found, and read back."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from sparsepretrain.errors import ConfigError, SparsePretrainWarning
from sparsepretrain.runs.directory import RunDirectory, find_runs


def make_run(path: Path) -> Path:
    path.mkdir(parents=True)
    (path / "metrics.jsonl").write_text('{"step": 1}\n')
    return path


def test_find_runs_returns_each_run_once(tmp_path):
    runs = [make_run(tmp_path / "x" / name) for name in "ab"]
    assert [r.path for r in find_runs([tmp_path, runs[1]])] == runs
    assert [r.path for r in find_runs([runs[1], tmp_path])] == [runs[1], runs[0]]


def test_find_runs_warns_of_other_paths(tmp_path):
    run = make_run(tmp_path / "run")
    for name in ("none", "fresh"):
        (tmp_path / name).mkdir()
    (tmp_path / "fresh" / "metrics.jsonl").write_text("")
    (tmp_path / "notes.txt").write_text("")
    with pytest.warns(SparsePretrainWarning) as told:
        assert find_runs(sorted(tmp_path.iterdir())) == [RunDirectory(run)]
    words = ("fresh/metrics.jsonl has no records", "none has no", "notes.txt is not a directory")
    assert all(w in str(t.message) for w, t in zip(words, told, strict=True))


def test_runs_set_aside_are_found_only_alone(tmp_path):
    run, old = (make_run(tmp_path / name) for name in ("a-s0", "a-s0.old-1"))
    with pytest.warns(SparsePretrainWarning, match=r"a-s0\.old-1 .*resume=never"):
        assert find_runs([run, old]) == [RunDirectory(run)]
    assert find_runs([tmp_path]) == [RunDirectory(run)]
    assert find_runs([old]) == [RunDirectory(old)]


def test_a_mistyped_directory_is_answered_with_a_similar_one(tmp_path, monkeypatch):
    (tmp_path / "runs" / "gpt2_nano").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"\(did you mean 'runs/gpt2_nano'\?\)"):
        find_runs([Path("runs/gpt2_nan")])
    with pytest.raises(ConfigError, match=r"\(did you mean 'runs'\?\)"):
        find_runs([Path("rusn/gpt2_nano/1a2b3c4d-s0")])
    with pytest.raises(ConfigError) as caught:
        find_runs([Path("elsewhere")])
    assert "did you mean" not in str(caught.value)


def test_a_worker_that_outlives_its_run_does_not_keep_the_directory(tmp_path):
    """As workers that load data do, for seconds after SIGKILL."""
    code = f"""if True:
        import os, time
        from pathlib import Path
        from sparsepretrain.runs.directory import RunDirectory
        with RunDirectory(Path({str(tmp_path / "run")!r})).claim():
            worker = os.fork()
            if worker == 0:
                time.sleep(60)
                os._exit(0)
            print(worker, flush=True)
            time.sleep(60)
    """
    run = RunDirectory(tmp_path / "run")
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    worker = int(process.stdout.readline())
    try:
        with pytest.raises(ConfigError, match="another process is training"), run.claim():
            pass
        process.kill()
        process.wait()
        os.kill(worker, 0)  # it lives
        with run.claim():
            assert run.lock_file.exists()
    finally:
        process.kill()
        process.stdout.close()
        os.kill(worker, signal.SIGKILL)
