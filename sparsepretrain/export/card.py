"""Model card: weights, training, and loading."""

from __future__ import annotations

import contextlib
import math
from pathlib import Path
from typing import Any

from sparsepretrain.errors import ConfigError, DataError
from sparsepretrain.export.convert import TOLERANCE, WEIGHTS, Converted
from sparsepretrain.sparsity.operand_table import COLUMNS
from sparsepretrain.sparsity.patterns import texts_of

AUTO = {
    "ForCausalLM": ("AutoModelForCausalLM", "text-generation"),
    "LMHeadModel": ("AutoModelForCausalLM", "text-generation"),
    "ForMaskedLM": ("AutoModelForMaskedLM", "fill-mask"),
    "MTModel": ("AutoModelForSeq2SeqLM", "translation"),
    "ForSequenceClassification": ("AutoModelForSequenceClassification", "text-classification"),
    "ForQuestionAnswering": ("AutoModelForQuestionAnswering", "question-answering"),
}
"""Suffix of a transformers class -> class that loads it, and the Hub's task."""


def write(converted: Converted, about: dict[str, Any], directory: Path) -> None:
    """Write ``README.md``."""
    source = converted.source
    task = converted.task
    method = converted.method
    config: dict[str, Any] = source.config or {}
    name = type(converted.model).__name__
    auto, pipeline = next(
        (v for k, v in AUTO.items() if name.endswith(k)), ("AutoModel", "image-classification")
    )
    library = "timm" if converted.is_timm else "transformers"
    lines = ["---", f"library_name: {library}", f"pipeline_tag: {pipeline}", "tags:"]
    lines += ["- sparsepretrain", f"- {method.options.name}"]
    lines += [f'- "{text} sparsity"' for text in texts_of(converted.patterns.values())]
    lines += ["---", "", f"# {config['name']}, {converted.title}", ""]
    lines += [*_weights(converted, about), ""]
    lines += ["## Use", "", "```python", *_use(converted, auto), "```", ""]
    lines += ["## Method", "", f"{method.summary}. {method.paper}".replace(". –", "."), ""]
    rows = [[str(operand) for operand in each.sparse_row] for each in converted.methods]
    for row in (COLUMNS.values(), ["---"] * len(COLUMNS), *rows):
        lines.append(f"| {' | '.join(row)} |")
    lines += ["", "fprop Y = Xf(X)·A(W)ᵀ, dgrad dX = P(G)·B(W), wgrad dW = U(G)ᵀ·Xw(X)", ""]
    lines += ["## Training", "", "| | |", "| --- | --- |"]
    lines += [f"| {key} | {value} |" for key, value in _training(converted, about).items()]
    lines += ["", f"The resolved configuration is in `config.yaml`. Task: {task.options.name}."]
    (directory / "README.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _weights(converted: Converted, about: dict[str, Any]) -> list[str]:
    count = len(converted.layers)
    patterns = {*converted.patterns.values()}
    if len(patterns) == 1:
        ((n, m),) = patterns
        text = (
            f"The weights of {count} layers are {about['weights']}: in every group of "
            f"{m} consecutive weights along in_features (input channels) "
            f"at most {n} are not zero; all zeros are +0.0."
        )
    elif patterns:
        text = (
            f"The weights of {count} layers are {about['weights']}: N:M means that in every group "
            "of M consecutive weights along in_features (input channels) at most N are not zero; "
            "all zeros are +0.0. `sparsity.json` has the pattern of each layer."
        )
    else:
        text = f"The method trained {count} layers; their final weights are dense: "
        text += f"{about['weights'].removeprefix('dense: ')}."
    if converted.left_dense:
        text += f" {len(converted.left_dense)} layers were left dense."
    difference = about["largest_logit_difference"]
    equal = "equal to the bit" if not difference else f"equal to within {difference:.1e}"
    checked = (
        f"They are the weights of evaluation, scales folded in, in fp32. After reloading they are "
        f"bit-identical, and logits of a random batch are {equal} (tolerance: {TOLERANCE:g} of the "
        "largest logit)."
    )
    lines = [text, "", checked]
    if onnx := about.get("onnx"):
        same = f"ONNX Runtime on the CPU computes the same to {onnx['largest_difference']:.1e}"
        lines += ["", f"`model.onnx` has the same weights; {same}."]
    return lines


def _use(converted: Converted, auto: str) -> list[str]:
    if converted.is_timm:
        options = converted.task.model_options
        arguments = converted.task.recipe.arguments(options)
        words = "".join(f", {key}={value!r}" for key, value in arguments.items())
        call = f'timm.create_model("{options.architecture}", checkpoint_path="DIR/{WEIGHTS}"'
        return ["import timm", "", f"model = {call}{words})"]
    lines = [f"from transformers import AutoTokenizer, {auto}", ""]
    lines += [f'model = {auto}.from_pretrained("DIR")']
    lines += ['tokenizer = AutoTokenizer.from_pretrained("DIR")']
    if auto in ("AutoModelForCausalLM", "AutoModelForSeq2SeqLM"):
        lines += ['inputs = tokenizer("Some text", return_tensors="pt")']
        lines += ["print(tokenizer.decode(model.generate(**inputs, max_new_tokens=40)[0]))"]
    return lines


def _training(converted: Converted, about: dict[str, Any]) -> dict[str, str]:
    source = converted.source
    run = converted.source.run
    config: dict[str, Any] = source.config or {}
    environment = {}
    lines = []
    if run is not None:
        with contextlib.suppress(ConfigError, DataError):  # a checkpoint moved without its record
            environment = run.environment()
            lines = run.record()
    step = source.step or 0
    seen = [line for line in lines if line["step"] <= step]
    scores = [line for line in seen if line.get("split") == "validation"]
    # the record has no loss of an average
    loss = scores[-1].get("loss") if scores and not source.averaged else None
    rows = {
        "command": f"`{environment['command']}`" if environment.get("command") else None,
        "configuration": f"`{about['config_hash']}`, seed {config['seed']}",
        "commit": environment.get("commit"),
        "steps": f"{step} of {config['steps']}",
        "weights": f"mean of the checkpoints of steps {', '.join(map(str, source.averaged_steps))}"
        if source.averaged
        else None,
        "data": config["data"].get("name"),
        "precision": config["precision"]["name"],
        "validation loss": None
        if loss is None or not math.isfinite(loss)
        else f"{loss:.4f} at step {scores[-1]['step']} (nats; eval.batches="
        f"{config['eval']['batches']})",
    }
    return {key: value for key, value in rows.items() if value is not None}
