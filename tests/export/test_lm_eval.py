"""The bridge to lm-evaluation-harness, on a task of our own: no network."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import torch
from export_cases import write_run

from sparsepretrain import cli
from sparsepretrain.config import validate
from sparsepretrain.config.tables import Stage
from sparsepretrain.runs import weights
from sparsepretrain.runs.directory import RunDirectory
from sparsepretrain.studies.stages import Evaluation
from sparsepretrain.tracking.console import Console
from sparsepretrain.training.assembly import evaluated_model

pytest.importorskip("lm_eval")

QUESTIONS = [
    {"question": f"def f{i}(x):", "choices": [" return x", " zzzz"], "answer": i % 2}
    for i in range(5)
]
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
    import datasets
    import huggingface_hub
    from lm_eval import tasks as harness

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
    # indexing the harness's own 13,000 files takes seconds
    original = harness.TaskManager
    only = lambda include_path: original(include_path=include_path, include_defaults=False)  # noqa: E731
    monkeypatch.setattr(harness, "TaskManager", only)
    directory = tmp_path / "tasks"
    directory.mkdir()
    file = directory / "tiny.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in QUESTIONS))
    (directory / "tiny.yaml").write_text(TASK.replace("FILE", str(file)))
    return directory


def expected(run: Path) -> tuple[float, float]:
    """Accuracies by hand, from the model as the method evaluates it."""
    task, model, _ = evaluated_model(weights.find(run))
    hits = [0, 0]
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
        for k in range(2):
            hits[k] += int(max((0, 1), key=lambda c: scores[c][k]) == row["answer"])
    return hits[0] / len(QUESTIONS), hits[1] / len(QUESTIONS)


@pytest.mark.parametrize("method", ["sste", "slope"])
def test_a_task_on_a_run(method: str, tasks: Path, tmp_path: Path, recwarn) -> None:
    slope = ("sparsity.adapters.rank=2", "sparsity.adapters.start=0.5") * (method == "slope")
    run = write_run(tmp_path, "gpt2", f"sparsity={method}", *slope)
    words = ["lm_eval=tiny_choice", f"lm_eval_path={tasks}", "batch.micro=2"]
    assert cli.main(["eval", str(run), *words]) == 0
    (line,) = map(json.loads, (run / "eval.jsonl").read_text().splitlines())
    acc, acc_norm = expected(run)
    assert line["metrics"]["tiny_choice/acc@128"] == acc
    assert line["metrics"]["tiny_choice/acc_norm@128"] == acc_norm
    assert {"tiny_choice/acc_stderr@128", "tiny_choice/acc_norm_stderr@128"} < {*line["metrics"]}
    assert (line["task"], line["data"], line["samples"]) == ("lm_eval", "tiny_choice", 5)
    assert line["lm_eval"]["tasks"] == {"tiny_choice": 2.0}
    assert line["step"] == 3 and line["pattern_holds"]


def test_a_stage_of_a_table_is_done_once(
    tasks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lm_eval import tasks as harness

    only = harness.TaskManager
    monkeypatch.setattr(harness, "TaskManager", lambda include_path: only(include_path=tasks))
    directory = RunDirectory(write_run(tmp_path, "gpt2"))
    stage = Stage(name="harness", lm_eval="tiny_choice", overrides=["batch.micro=2"])
    cell = Evaluation("x", validate(directory.config()), stage=stage)
    assert cell.left == "to run" and cell.work()(Console(io.StringIO())) == 0
    assert cell.left == "finished"
    line = directory.evaluation(None, stage.overrides, lm_eval="tiny_choice")
    assert (
        line is not None and line["metrics"]["tiny_choice/acc@128"] == expected(directory.path)[0]
    )
    assert directory.evaluation("validation") is None
    assert directory.evaluation(None, lm_eval="tiny_choice") is None


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["lm_eval=tiny_choic"], "no task 'tiny_choic' (did you mean 'tiny_choice'?)"),
        (["lm_eval=tiny_choice", "data=text_files"], "data=text_files: with lm_eval only"),
        (["lm_eval=tiny_choice", "average=2"], "lm_eval does not go together with split"),
        (["limit=3"], "limit needs lm_eval=TASK"),
    ],
)
def test_refusals(words: list[str], message: str, tasks: Path, tmp_path: Path, capsys) -> None:
    run = write_run(tmp_path, "gpt2")
    known = [f"lm_eval_path={tasks}"] * ("lm_eval" in words[0])
    assert cli.main(["eval", str(run), *words, *known]) == 2
    assert message in capsys.readouterr().err
    assert not (run / "eval.jsonl").exists()


def test_other_models_are_refused(tasks: Path, tmp_path: Path, capsys) -> None:
    run = write_run(tmp_path, "bert")
    assert cli.main(["eval", str(run), "lm_eval=tiny_choice", f"lm_eval_path={tasks}"]) == 2
    assert "this run is of task=masked_lm" in capsys.readouterr().err
