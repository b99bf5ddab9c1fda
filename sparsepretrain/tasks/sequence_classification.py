"""Classes, or a number, of a text or a pair of texts: the tasks of GLUE."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from sparsepretrain.data.sources.labelled_texts import LABELLED
from sparsepretrain.errors import ConfigError
from sparsepretrain.registry import register
from sparsepretrain.tasks import Batch, Observation, averages
from sparsepretrain.tasks._encoded import EncodedOptions, EncodedTask, Sample

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from sparsepretrain.data.encoding import Codec

CORRELATIONS = ("pearson", "spearman")


@dataclass(slots=True, kw_only=True)
class SequenceClassificationOptions(EncodedOptions):
    """Options of the task."""

    name: Literal["sequence_classification"]
    metrics: list[Literal["accuracy", "f1", "mcc", "pearson", "spearman"]]
    """What is reported; ``score`` is their mean, as GLUE has it."""
    parts: list[str]
    """Names of the parts of the evaluation split; several are reported one by one as well."""

    def problems(self) -> Iterator[tuple[str, str]]:
        """Range errors as (key, message)."""
        yield from EncodedOptions.problems(self)
        if not self.metrics:
            yield "metrics", "must name at least one metric"


@register("task", "sequence_classification")
class SequenceClassification(EncodedTask):
    """Cross entropy of the class; squared error where the label is a real number."""

    Options = SequenceClassificationOptions
    holds = LABELLED
    head = "labels"
    metric = "score"

    def __init__(self, options: Any, model: Any, data: Any, seed: int) -> None:
        super().__init__(options, model, data, seed)
        for metric in options.metrics:
            if (metric in CORRELATIONS) != self.regression:
                wants = "numbers, data.labels=[]" if metric in CORRELATIONS else "classes"
                raise ConfigError(f"task.metrics: {metric} is for labels that are {wants}")
        if "f1" in options.metrics and len(data.labels) != 2:
            raise ConfigError(f"task.metrics: f1 is for two classes, data has {len(data.labels)}")

    @property
    def regression(self) -> bool:
        """Whether the label is a real number."""
        return not self.data_options.labels

    @property
    def outputs(self) -> int:
        """Classes; 1 for a real number."""
        return len(self.data_options.labels) or 1

    def encode(self, records: list[dict[str, Any]], codec: Codec) -> list[Sample]:
        """The texts in the tokenizer's template; of two that are too long, the longer is cut."""
        import numpy as np

        template = codec.template()
        columns = zip(*(record["texts"] for record in records), strict=True)
        encoded = list(zip(*(codec.encode(column) for column in columns), strict=True))
        samples = []
        for record, (first, *others) in zip(records, encoded, strict=True):
            second = others[0] if others else None
            ends = template.middle + template.suffix if others else template.end
            room = self.options.max_length - len(template.prefix) - len(ends)
            if second is None:
                parts = [template.prefix, first[:room], template.end]
                begin = len(template.prefix) + len(parts[1]) + len(template.end)
            else:
                first, second = _cut(first, second, room)
                parts = [template.prefix, first, template.middle, second, template.suffix]
                begin = sum(map(len, parts[:3]))
            ids = np.concatenate([np.asarray(part, dtype=np.int64) for part in parts])
            samples.append(Sample(ids, begin, record["label"], record["part"]))
        return samples

    def targets(self, samples: list[Sample]) -> torch.Tensor:
        """(batch,) int64 classes or fp32 numbers."""
        import torch

        kind = torch.float32 if self.regression else torch.int64
        return torch.tensor([sample.target for sample in samples], dtype=kind)

    def example(self, size: int, device: torch.device) -> Batch:
        """Zeros of the shapes of :meth:`batch`."""
        import torch

        kind = torch.float32 if self.regression else torch.int64
        targets = torch.zeros(size, dtype=kind, device=device)
        return {**self._blank(size, device), "targets": targets, "about": [0] * size}

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
        """(Σ negative log likelihood in nats, or Σ squared errors; number of examples)."""
        return self._loss(self._scores(model, batch), batch), self.count(batch)

    def observe(self, model: nn.Module, batch: Batch, *, final: bool) -> Observation:
        """Loss, predictions and labels."""
        scores = self._scores(model, batch)
        predicted = scores[:, 0] if self.regression else scores.argmax(dim=1)
        return {
            "loss": (float(self._loss(scores, batch)), self.count(batch)),
            "predicted": predicted.tolist(),
            "labels": batch["targets"].tolist(),
            "parts": batch["about"],
        }

    def metrics(self, observations: Iterable[Observation]) -> dict[str, float]:
        """The task's metrics in percent, of each part too where there are several.

        ``score`` is the number that a GLUE average counts: the mean of the metrics.
        """
        observations = list(observations)
        rows = [
            row
            for o in observations
            for row in zip(o["predicted"], o["labels"], o["parts"], strict=True)
        ]
        result = averages(observations)
        found = sorted({part for _, _, part in rows})
        scores = {}
        for part in found:
            chosen = [(a, b) for a, b, p in rows if p == part]
            scores[part] = {
                metric: 100 * _measure(metric, [a for a, _ in chosen], [b for _, b in chosen])
                for metric in self.options.metrics
            }
        names = self.options.parts
        for metric in self.options.metrics:
            result[metric] = sum(scores[part][metric] for part in found) / len(found)
            for part in found if len(names) > 1 else ():
                result[f"{metric}_{names[part]}"] = scores[part][metric]
        wanted = [result[metric] for metric in self.options.metrics]
        return {**result, "score": sum(wanted) / len(wanted)}

    def _scores(self, model: nn.Module, batch: Batch) -> Tensor:
        scores: Tensor = self.recipe.scores(model, batch["tokens"], batch["mask"], batch["second"])
        return scores.float()

    def _loss(self, scores: Tensor, batch: Batch) -> Tensor:
        import torch.nn.functional as F

        if self.regression:
            return F.mse_loss(scores[:, 0], batch["targets"], reduction="sum")
        return F.cross_entropy(scores, batch["targets"], reduction="sum")


def _cut(first: Any, second: Any, room: int) -> tuple[Any, Any]:
    """Cut the longer of two texts until both fit, then both equally."""
    excess = max(0, len(first) + len(second) - room)
    longer = min(excess, abs(len(first) - len(second)))
    half = excess - longer
    cuts = [half - half // 2, half // 2]
    cuts[0 if len(first) >= len(second) else 1] += longer
    return first[: len(first) - cuts[0]], second[: len(second) - cuts[1]]


def _measure(metric: str, predicted: list[float], labels: list[float]) -> float:
    """One metric; a correlation with a constant is 0."""
    try:
        from scipy import stats
        from sklearn import metrics
    except ImportError as error:
        raise ConfigError(
            "GLUE's metrics need the packages scikit-learn and scipy: "
            "pip install 'sparsepretrain[eval]'"
        ) from error
    if metric in CORRELATIONS:
        if len(set(predicted)) < 2 or len(set(labels)) < 2:
            return 0.0
        correlate = stats.pearsonr if metric == "pearson" else stats.spearmanr
        return float(correlate(predicted, labels).statistic)
    if metric == "f1":
        return float(metrics.f1_score(labels, predicted, zero_division=0))
    if metric == "mcc":
        return float(metrics.matthews_corrcoef(labels, predicted))
    return float(metrics.accuracy_score(labels, predicted))
