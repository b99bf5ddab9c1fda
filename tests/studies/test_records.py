"""Runs of a committed record count as finished, where asked for, and repeat."""

import gzip
import json
import os
import shutil
import subprocess
import sys

import pytest

from sparsepretrain import cli
from sparsepretrain.studies.results import read_record, write_record
from support import ROOT


@pytest.fixture
def record(tables, in_process, tmp_path):
    """Directory of the record of a finished table, whose runs are gone."""
    tables.write(nano={"seeds": 1})
    assert tables("small") == 0
    assert report(tables, "--record", "--out", str(tmp_path / "pages")) == 0
    shutil.rmtree(tables.tiny.root / "runs")
    return tmp_path / "pages" / "records"


def runs(tables):
    """Return the names of the run directories, without the hash."""
    directory = tables.tiny.root / "runs" / "small"
    found = tables.runs() if directory.is_dir() else []
    return sorted(run.name.rpartition("-")[2] for run in found)


def report(tables, *words):
    _, *rest = tables.words("small", *words)
    return cli.main(["report", *rest])


def test_recorded_runs_are_not_run_again(tables, record, capsys):
    assert tables("small", "--records", str(record)) == 0
    assert runs(tables) == []
    assert "all runs of small are in the record" in capsys.readouterr().out
    assert tables("small") == 0
    assert len(runs(tables)) == 2


def test_a_run_with_another_seed_or_setting_is_run(tables, record):
    assert tables("small", "--records", str(record), "--seeds", "2") == 0
    assert runs(tables) == ["s1", "s1"]
    tables.write(nano={"seeds": 1}, rows={"dense": ["sparsity=dense"], "γ = 0.2": []})
    assert tables("small", "--records", str(record)) == 0
    assert runs(tables) == ["s0", "s1", "s1"]


def test_an_unfinished_run_of_a_record_is_run(tables, record):
    file = record / "small.json.gz"
    found = read_record(file)
    found.cells[0].state = "partial"
    write_record(found, file)
    assert tables("small", "--records", str(record)) == 0
    assert len(runs(tables)) == 1


def test_a_report_joins_a_record_and_new_runs(tables, record, tmp_path):
    before = read_record(record / "small.json.gz")
    words = ("--records", str(record), "--seeds", "2")
    assert tables("small", *words) == 0
    assert report(tables, *words, "--record", "--out", str(tmp_path / "pages")) == 0
    joined = read_record(record / "small.json.gz")
    assert joined.seeds == [0, 1] and len(joined.cells) == 4
    assert all(cell.state == "finished" for cell in joined.cells)
    assert [cell for cell in joined.cells if cell.seed == 0] == before.cells
    assert joined.configs.keys() == before.configs.keys() and joined.unit == before.unit
    assert "4 of 4 runs are finished" in (tmp_path / "pages" / "small.md").read_text()


def test_tuning_runs_of_a_record_choose_the_settings(tables, in_process, tmp_path):
    nano = {"seeds": 1, "tune": {"seeds": [7], "grid": ["optim.lr=1e-3,1e-2"]}}
    tables.write(nano=nano, first_seed=1)
    assert tables("small") == 0
    assert report(tables, "--record", "--out", str(tmp_path)) == 0
    shutil.rmtree(tables.tiny.root / "runs")
    words = ("--records", str(tmp_path / "records"))
    assert tables("small", *words) == 0
    assert runs(tables) == []
    assert tables("small", *words, "--seeds", "2") == 0
    assert len(runs(tables)) == 2  # the judging runs of one more seed


@pytest.mark.parametrize("place", [".", "none", "records/small.json.gz"])
def test_a_directory_without_the_record_is_refused(place, tables, record, capsys):
    """A misspelt one would train a whole table again."""
    words = ("small", "--records", str(record.parent / place))
    assert tables(*words) == 2 and report(tables, *words[1:]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert all(" has no small.json.gz: expected the directory" in line for line in lines)
    assert len(lines) == 2 and runs(tables) == []


def test_runs_of_a_record_with_another_configuration_are_counted(tables, record, capsys):
    words = ("small", "--records", str(record), "--dry-run")
    assert tables(*words) == 0
    assert "another configuration" not in capsys.readouterr().out
    tables.write(nano={"seeds": 1, "overrides": ["experiment=smoke", "steps=3"]})
    assert tables(*words) == 0
    assert "small: 2 finished runs of the record have another" in capsys.readouterr().out


def flipped(text):
    middle = len(text) // 2
    return text[:middle] + bytes([text[middle] ^ 255]) + text[middle + 1 :]


def changed(**values):
    """Write a record back with other values of its first run, or of the table."""

    def change(text):
        plain = json.loads(gzip.decompress(text))
        for key, value in values.items():
            (plain if key in plain or key == "scale" else plain["cells"][0])[key] = value
        return gzip.compress(json.dumps(plain).encode())

    return change


def doubled(text):
    plain = json.loads(gzip.decompress(text))
    plain["cells"].append(plain["cells"][0])
    return gzip.compress(json.dumps(plain).encode())


@pytest.mark.parametrize(
    ("damage", "line"),
    [
        (lambda text: b"no record", "is not a record of a table: "),
        (lambda text: b"", "is not a record of a table: "),
        (lambda text: text[:-9], "is not a record of a table: "),
        (flipped, "is not a record of a table: "),
        (changed(configs={"0": "{"}), "small: the configuration 0 was changed"),
        (changed(name="other"), "it is that of 'other', expected 'small'"),
        (changed(curves={"loss": [[1, 2], [3]]}), "loss has lists of two lengths"),
        (changed(scale="paper"), "has runs at scale 'paper', which small has not"),
        (doubled, "seed 0 occurs twice"),
        (None, "there is no "),
    ],
)
def test_damaged_records_are_one_line_and_nothing_is_written(damage, line, tables, record, capsys):
    file = record / "small.json.gz"
    if damage is None:
        file.unlink()
    else:
        file.write_bytes(damage(file.read_bytes()))
    before = {path: path.stat().st_mtime_ns for path in record.parent.rglob("*")}
    assert report(tables, "--from-record", "--out", str(record.parent)) == 3
    (told,) = capsys.readouterr().err.splitlines()
    assert line in told and "small.json.gz" in told
    assert {path: path.stat().st_mtime_ns for path in record.parent.rglob("*")} == before


def test_damaged_records_and_tables_with_stages_are_refused(tables, record, capsys):
    (record / "small.json.gz").write_bytes(b"no record")
    assert tables("small", "--records", str(record)) == 3
    assert "is not a record of a table" in capsys.readouterr().err
    tables.write(nano={"stages": [{"name": "again", "evaluate": "validation"}]})
    assert tables("small", "--records", str(record)) == 2
    assert "the runs of small have stages" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("cell", ["SR-STE @ 25k, 5", "S-STE @ 25k, 5"])
def test_a_committed_run_repeats_its_digits(tmp_path, cell):
    """On the same CPU with the same versions; elsewhere its draws, and a loss close to its own.

    The text is downloaded with pip, once.
    """
    committed = read_record(ROOT / "results/records/scaling_lm.json.gz")
    seed = committed.seeds[-1]
    seeds = ["--seeds", f"{seed}..{seed}"]

    def run(*words):
        command = [sys.executable, "-m", "sparsepretrain", *words]
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        return subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)

    for words in (
        ["prepare", "data=python_wheels"],
        ["reproduce", "scaling_lm", "--only", cell, *seeds],
        ["report", "scaling_lm", "--record", "--out", "pages", *seeds],
    ):
        done = run(*words)
        assert done.returncode == 0, done.stderr
    found = read_record(tmp_path / "pages/records/scaling_lm.json.gz")
    again, before = (
        next(c for c in record.cells if (c.name, c.seed) == (cell, seed))
        for record in (found, committed)
    )
    assert (again.config, again.hashes) == (before.config, before.hashes)
    if (again.hardware, again.versions) == (before.hardware, before.versions):
        assert again.metrics == before.metrics and again.curves == before.curves
    else:
        assert again.metrics == pytest.approx(before.metrics, rel=0.01)
