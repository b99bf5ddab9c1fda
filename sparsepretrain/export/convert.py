"""Conversion of a checkpoint to a class of transformers or timm, and the files written."""

from __future__ import annotations

import copy
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sparsepretrain.errors import CheckpointError
from sparsepretrain.export.about import grouped
from sparsepretrain.export.audit import audit
from sparsepretrain.export.tokenizer import make_tokenizer
from sparsepretrain.models.pretrained import quiet
from sparsepretrain.runs.origin import GENERATION
from sparsepretrain.runs.weights import WeightSource
from sparsepretrain.sparsity import Method, densify
from sparsepretrain.sparsity.coverage import Proof
from sparsepretrain.sparsity.patterns import Pattern
from sparsepretrain.sparsity.sparsifier import residual_weight
from sparsepretrain.tasks import Task
from sparsepretrain.training import derive
from sparsepretrain.training.assembly import evaluated_model
from sparsepretrain.training.classes import class_names

WEIGHTS = "model.safetensors"
TOLERANCE = 1e-4
"""Maximum difference relative to the largest logit: transformers' transposed weights change the
order of summation."""


@dataclass(slots=True)
class Converted:
    """Model for other libraries, with its origin."""

    source: WeightSource
    task: Task
    title: str
    """Method and patterns."""
    methods: list[Method]
    """Methods of the sparse layers, one for each pattern."""
    proof: Proof
    """Sparsity check of the evaluated weights without low-rank adapters."""
    model: nn.Module
    """Dense layers with exact zeros, on the CPU, in eval mode."""
    tokenizer: Any
    """Tokenizer of transformers; None: the model is timm's."""
    trained: dict[str, Pattern]
    """Sparse layer -> (N, M) that the method trained."""
    left_dense: list[str]
    """Names of the layers that ``sparsity.patterns`` left dense."""
    inputs: dict[str, Tensor]
    """Random batch of two samples; the second one of a classifier is padded."""
    logits: Tensor
    """fp32 logits of the evaluated model on ``inputs``."""
    merged: bool
    """True if adapters were added to the weights, which are then dense."""

    @property
    def method(self) -> Method:
        """Method of the first sparse layer."""
        return self.methods[0]

    @property
    def layers(self) -> list[str]:
        """Names of the sparse layers."""
        return list(self.trained)

    @property
    def patterns(self) -> dict[str, Pattern]:
        """Sparse layer -> (N, M) that its weight has; empty: the weights are dense."""
        return self.trained if self.proof.holds and not self.merged else {}

    @property
    def is_timm(self) -> bool:
        """True for models of timm, False for transformers."""
        return not hasattr(self.model, "save_pretrained")


def convert(source: WeightSource) -> Converted:
    """Rebuild the model of a run's checkpoint in a class of another library."""
    task, model, sparsifier = evaluated_model(source)
    proof = sparsifier.prove()
    if proof.violations:
        raise CheckpointError(f"{source.path}: the weights are {proof}; nothing was exported")
    layers = sparsifier.layers
    merged = any(residual_weight(layer) is not None for layer in layers.values())
    dense = densify(copy.deepcopy(model))
    stock = task.recipe.stock(dense, task.model_options, getattr(task, "head", None))
    if names := class_names(task):
        stock.config.id2label = dict(enumerate(names))
        stock.config.label2id = {name: row for row, name in enumerate(names)}
    tokenizer = None
    if hasattr(stock, "save_pretrained"):
        checkpoint = None if source.run is None else source.run.pretrained
        tokenizer = make_tokenizer(derive.tokenizer_file(source), checkpoint, task, stock)
    inputs = small_batch(task, stock)
    logits = evaluated_logits(task, model, inputs)
    return Converted(
        source=source,
        task=task,
        title=sparsifier.title,
        methods=sparsifier.methods,
        proof=proof,
        model=stock,
        tokenizer=tokenizer,
        trained=sparsifier.patterns,
        left_dense=sparsifier.left_dense_in(model),
        inputs=inputs,
        logits=logits,
        merged=merged,
    )


@torch.no_grad()
def evaluated_logits(task: Task, model: Any, inputs: dict[str, Tensor]) -> Tensor:
    """Return fp32 logits of a batch as evaluation computes them; see :func:`run`."""
    if not hasattr(task, "head"):
        return run(model, inputs)
    tokens = inputs["input_ids"]
    mask = inputs.get("attention_mask", torch.ones_like(tokens)).bool()
    scores: Tensor = task.recipe.scores(model, tokens, mask, torch.zeros_like(mask))
    return scores.float()


@torch.no_grad()
def run(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    """Return fp32 logits of a batch, (…, classes), or (…, 2) for spans."""
    output = model(**inputs)
    if hasattr(output, "start_logits"):
        return torch.stack([output.start_logits, output.end_logits], -1).float()
    return getattr(output, "logits", output).float()


def small_batch(task: Task, model: Any) -> dict[str, Tensor]:
    """Return two random samples under other libraries' input names.

    Args:
        task: decides their kind.
        model: the exported one: its embedding and its token ids bound the tokens.
    """
    options = task.model_options
    generator = torch.Generator().manual_seed(0)
    if task.kind == "images":
        shape = (2, 3, options.image_size, options.image_size)
        return {"x": torch.randn(shape, generator=generator)}
    config = model.config
    allowed = torch.ones(model.get_input_embeddings().num_embeddings)
    end: Any = getattr(config, "eos_token_id", None)
    ends = end if isinstance(end, list) else [end]
    pad: Any = getattr(config, "pad_token_id", None)
    # transformers' classifiers look for these in the tokens
    allowed[[i for i in (pad, *ends) if i is not None and i < len(allowed)]] = 0
    ids = allowed.multinomial(32, replacement=True, generator=generator).reshape(2, 2, 8)
    inputs = {"input_ids": ids[0]}
    if task.kind == "pairs":
        return inputs | {"decoder_input_ids": ids[1]}
    if getattr(task, "head", None) == "labels":
        lengths = (8, 5)
        inputs["attention_mask"] = torch.zeros_like(ids[0])
        for row, length in enumerate(lengths):
            inputs["attention_mask"][row, :length] = 1
            if config.is_encoder_decoder:  # BART and T5 classify at their end-of-text token
                ids[0, row, length - 1] = ends[0]
            if pad is not None:
                ids[0, row, length:] = pad
    return inputs


def write(converted: Converted, directory: Path) -> float:
    """Write weights, configuration and tokenizer, reload and compare.

    Return the largest difference of a logit from evaluation's.
    """
    task = converted.task
    model = converted.model
    if converted.is_timm:
        from timm.models import save_for_hf

        options = task.options
        seen = {"mean": options.mean, "std": options.std, "crop_pct": options.eval_crop}
        seen |= {"input_size": [3, options.image_size, options.image_size]}
        seen |= {"interpolation": options.eval_interpolation}
        arguments = task.recipe.arguments(task.model_options)
        save_for_hf(
            model, str(directory), model_config=seen, model_args=arguments, safe_serialization=True
        )
    else:
        converted.tokenizer.save_pretrained(directory)
        with quiet():
            model.save_pretrained(directory)  # type: ignore[operator]
        _copy_generation(converted, directory)
    for pattern, layers in grouped(converted.patterns).items():
        result = audit(directory, require=pattern, layers=layers)
        if result.fails:
            wrong = next(finding for finding in result.findings if not finding.is_note)
            raise CheckpointError(f"{wrong.where} was not written as it is: {wrong.text}")
    loaded = load(converted, directory)
    written, read = (dict(m.named_parameters()) for m in (model, loaded))
    for name in converted.layers:
        key = name if name in written else f"{name}.weight"  # a bank is a Parameter
        if not torch.equal(written[key], read[key]):
            raise CheckpointError(f"the weight of {name} changed when it was written and loaded")
    logits = run(loaded, converted.inputs)
    difference = float((logits - converted.logits).abs().max())
    if not difference <= TOLERANCE * max(1.0, float(converted.logits.abs().max())):
        raise CheckpointError(f"logits of the written model differ from evaluation's: {difference}")
    return difference


def _copy_generation(converted: Converted, directory: Path) -> None:
    """Copy the settings of generation of the checkpoint that the run started from."""
    run = converted.source.run
    if run is None or hasattr(converted.task, "head"):
        return
    settings = run.pretrained / GENERATION
    if settings.is_file():
        shutil.copyfile(settings, directory / GENERATION)


def load(converted: Converted, directory: Path) -> nn.Module:
    """Load the written model with its library."""
    if converted.is_timm:
        import timm

        options = converted.task.model_options
        path = str(directory / WEIGHTS)
        arguments = converted.task.recipe.arguments(options)
        return timm.create_model(options.architecture, checkpoint_path=path, **arguments).eval()
    with quiet(str(directory)):
        cls: Any = type(converted.model)
        return cls.from_pretrained(directory, dtype=torch.float32).eval()
