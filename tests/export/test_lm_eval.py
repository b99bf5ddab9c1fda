"""A stage of a table that lm-evaluation-harness measures, on a task of our own: no network."""

import io
import json
import os
import signal
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from sparsepretrain.config import validate
from sparsepretrain.console import Console
from sparsepretrain.errors import ConfigError
from sparsepretrain.runs import weights
from sparsepretrain.runs.directory import RunDirectory
from sparsepretrain.studies.cells import Cell, Part
from sparsepretrain.studies.engine import Study
from sparsepretrain.studies.reproduce import check
from sparsepretrain.studies.stages import Harness, commands, run_command
from sparsepretrain.studies.tables import Size, Stage, Table
from sparsepretrain.training.assembly import evaluated_model
from support.export_cases import write_run

pytest.importorskip("lm_eval")

CHOICES = [" return x", " zzzz"]
QUESTIONS = [{"question": f"def f{i}(x):", "choices": CHOICES, "answer": i % 2} for i in range(4)]
TASK = """
task: tiny_choice
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
output_type: multiple_choice
test_split: test
doc_to_text: "{{question}}"
doc_to_choice: choices
doc_to_target: answer
target_delimiter: ""
metric_list:
  - {metric: acc, aggregation: mean, higher_is_better: true}
  - {metric: acc_norm, aggregation: mean, higher_is_better: true}
metadata: {version: 2.0}
"""


@pytest.fixture
def tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    directory = tmp_path / "tasks"
    directory.mkdir()
    file = directory / "tiny.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in QUESTIONS))
    (directory / "tiny.yaml").write_text(TASK.replace("FILE", str(file)))
    return directory


def expected(run: Path) -> tuple[float, float]:
    """Accuracies by hand, from the model as the method evaluates it."""
    task, model, _ = evaluated_model(weights.find(run))
    hits = []
    for row in QUESTIONS:
        scores = []
        for choice in row["choices"]:
            prompt, text = row["question"].encode(), choice.encode()
            tokens = torch.tensor([[*prompt, *text]])
            with torch.no_grad():
                chances = task.recipe.logits(model, tokens)[0].log_softmax(-1)
            places = range(len(prompt) - 1, len(prompt) + len(text) - 1)
            total = sum(float(chances[i, tokens[0, i + 1]]) for i in places)
            scores.append((total, total / len(choice)))
        hits.append([int(np.argmax(kind) == row["answer"]) for kind in zip(*scores, strict=True)])
    return tuple(np.mean(hits, axis=0))


@pytest.mark.slow
@pytest.mark.parametrize("method", ["sste", "slope"])
def test_a_stage_measures_what_the_method_evaluates(method, tasks, tmp_path):
    slope = ("sparsity.adapters.rank=2", "sparsity.adapters.start=0.5") * (method == "slope")
    directory = RunDirectory(write_run(tmp_path, "gpt2", f"sparsity={method}", *slope))
    run = validate(directory.config())
    run.parallel.device = "cpu"
    stage = Stage(name="zero_shot", lm_eval="tiny_choice", overrides=[f"--include_path={tasks}"])
    cell = Harness("x", run, stage=stage, stage_of=(directory, stage.name))
    assert cell.left == "to run"
    with Study("harness", Console(io.StringIO())) as study:
        study.run([cell])
    assert cell.state == "finished", directory.console_log.read_text()
    assert cell.left == "finished", "the same stage has nothing to do"
    found = directory.harness_result(cell.end, stage.name)
    assert found is not None
    values = found["tiny_choice/acc"], found["tiny_choice/acc_norm"]
    assert values == expected(directory.path)
    assert directory.harness_result(cell.end, "other") is None
    assert directory.evaluation("validation") is None


def test_the_lines_for_a_shell_export_and_measure(tmp_path):
    run = validate(RunDirectory(write_run(tmp_path, "gpt2")).config())
    cell, stage = Cell("row", "", 0, (), run), Stage(name="zero_shot", lm_eval="piqa,race")
    export, measure = commands(Part("t", Table(title="t"), None, [cell]), cell, stage)
    place = RunDirectory.of(run).path
    assert export == ("sparsepretrain", "export", str(place))
    words = dict(zip(measure[1::2], measure[2::2], strict=True))
    length = run.task.sequence_length
    assert words["--model_args"] == f"pretrained={place}/export/hf,max_length={length}"
    assert words["--tasks"] == "piqa,race"


def test_only_language_models_are_measured(tmp_path):
    run = validate(RunDirectory(write_run(tmp_path, "bert")).config())
    stage = Stage(name="zero_shot", lm_eval="piqa")
    table = Table(title="t", scales={"nano": Size(stages=[stage])})
    part = Part("t", table, "nano", [Cell("row", "", 0, (), run)])
    with pytest.raises(ConfigError, match="task=causal_lm"):
        check([part], Console(io.StringIO()))


def test_the_harness_is_a_process_of_its_own_that_a_signal_ends_too():
    """A stage that replaced the process of a job would end the stages after it."""
    assert run_command([sys.executable, "-c", "raise SystemExit(3)"]) == 3
    asked = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: asked.append(number))
    threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGTERM)).start()
    try:
        assert run_command([sys.executable, "-c", "import time; time.sleep(60)"]) == 143
    finally:
        assert signal.signal(signal.SIGTERM, before) is not before
    assert asked == [signal.SIGTERM], "the handler of the job has seen it"
