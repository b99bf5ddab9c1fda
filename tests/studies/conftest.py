"""Studies without child processes, and tables of tiny runs."""

import os
import sys
import traceback
from pathlib import Path
from typing import Any

import pytest
import yaml

from sparsepretrain import cli
from sparsepretrain.console import Console
from sparsepretrain.errors import SparsePretrainError
from sparsepretrain.runs.directory import find_runs
from sparsepretrain.studies import engine
from support.tiny_runs import Tiny


class InProcess:
    """Stand-in for a child process that trains in this process, which saves the start-up."""

    def __init__(self, work: Any, *, command: Any, log: str, **_: Any) -> None:
        self.exitcode, self.pid = -1, 0
        self.sentinel = os.open(os.devnull, os.O_RDONLY)
        with open(log, "a") as output, pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", ["sparsepretrain", *command])
            try:
                self.exitcode = work(Console(output))
            except SparsePretrainError as error:
                print(f"{error.label}: {error}", file=output)
                self.exitcode = error.exit_code
            except Exception:
                traceback.print_exc(file=output)
                self.exitcode = 1

    def is_alive(self) -> bool:
        return False

    def join(self, timeout: float | None = None) -> None:
        os.close(self.sentinel)


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> type[InProcess]:
    monkeypatch.setattr(engine, "start_child", InProcess)
    monkeypatch.setattr("sparsepretrain.cli.train.illustrate", lambda directory: None)
    return InProcess


class Tables:
    """Tables of tiny runs, in a directory for ``--config-dir``."""

    def __init__(self, tiny: Tiny) -> None:
        self.tiny, self.root = tiny, tiny.root / "mine"
        (self.root / "table").mkdir(parents=True)

    def write(self, name: str = "small", **changes: Any) -> None:
        nano = {"overrides": self.tiny.overrides()[:-1], "seeds": 2, **changes.pop("nano", {})}
        table = {
            "title": "two methods",
            "rows": {"dense": ["sparsity=dense"], "γ = 0.2": ["sparsity.gamma=0.2"]},
            "metrics": {"loss": {"label": "loss", "key": "loss", "better": "lower"}},
            "scales": {"nano": nano},
            **changes,
        }
        self.write_file(name, table)

    def write_file(self, name: str, table: dict[str, Any]) -> None:
        (self.root / "table" / f"{name}.yaml").write_text(yaml.safe_dump(table, sort_keys=False))

    def words(self, *words: str) -> list[str]:
        runs = f"runs_dir='{self.tiny.root / 'runs'}'"
        return ["reproduce", words[0], "--config-dir", str(self.root), runs, *words[1:]]

    def __call__(self, *words: str) -> int:
        return cli.main(self.words(*words))

    def runs(self, name: str = "small") -> list[Path]:
        return sorted(run.path for run in find_runs([self.tiny.root / "runs" / name]))


@pytest.fixture
def tables(tiny: Tiny) -> Tables:
    made = Tables(tiny)
    made.write()
    return made
