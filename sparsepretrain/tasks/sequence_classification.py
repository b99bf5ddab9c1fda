"""Classification or regression of one text or a pair of texts: the tasks of GLUE."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch.nn.functional as F
from torch import Tensor

from sparsepretrain.data.encoding import Codec, Template
from sparsepretrain.errors import ConfigError, DataError, Problems, needs
from sparsepretrain.registry import register
from sparsepretrain.tasks import Batch, Observation, averages, cross_entropy
from sparsepretrain.tasks._bases import RecordTask, RecordTaskOptions, Sample, join

CORRELATIONS = ("pearson", "spearman")


@dataclass(slots=True, kw_only=True)
class SequenceClassificationOptions(RecordTaskOptions):
    """Options of the task."""

    name: Literal["sequence_classification"]
    metrics: list[Literal["accuracy", "f1", "mcc", "pearson", "spearman"]]
    parts: list[str]

    def problems(self) -> Problems:
        yield from RecordTaskOptions.problems(self)
        if not self.metrics:
            yield "metrics", "must name at least one metric"


@register("task", "sequence_classification")
class SequenceClassification(RecordTask):
    """Cross-entropy of classes, or squared error of real labels."""

    Options = SequenceClassificationOptions
    kind = "labeled texts"
    head = "labels"
    loss_name = "per example"  # squared error for real numbers, cross-entropy for classes
    metric = "score"

    def __init__(self, options: Any, model: Any, data: Any, seed: int) -> None:
        super().__init__(options, model, data, seed)
        for metric in options.metrics:
            if (metric in CORRELATIONS) != self.regression:
                wants = "numbers, data.labels=[]" if metric in CORRELATIONS else "classes"
                raise ConfigError(f"task.metrics: {metric} is for labels that are {wants}")
        if "f1" in options.metrics and len(data.labels) != 2:
            raise ConfigError(f"task.metrics: f1 is for two classes, data has {len(data.labels)}")

    @staticmethod
    def conflicts(options: Any, model: Any, data: Any) -> Problems:
        yield from RecordTask.conflicts(options, model, data)
        named, entries = len(options.parts), len(getattr(data, "validation", ()))
        if 1 < named < entries:
            yield "task.parts", f"must name the {entries} entries of data.validation, got {named}"

    @property
    def regression(self) -> bool:
        """True if labels are real numbers."""
        return not self.data_options.labels

    @property
    def outputs(self) -> int:
        """Number of classes; 1 for real labels."""
        return len(self.data_options.labels) or 1

    @property
    def has_classes(self) -> bool:
        """True unless labels are real numbers."""
        return not self.regression

    def encode(self, records: list[dict[str, Any]], codec: Codec) -> list[Sample]:
        """Encode texts in the tokenizer's template; truncate the longer of a pair first."""
        template = codec.template()
        columns = zip(*(record["texts"] for record in records), strict=True)
        encoded = list(zip(*(codec.encode(column) for column in columns), strict=True))
        samples = []
        for record, (first, *others) in zip(records, encoded, strict=True):
            ends = template.middle + template.suffix if others else template.end
            room = self.options.max_length - len(template.prefix) - len(ends)
            if others:
                first, second = _cut(first, others[0], room)
                parts = [template.prefix, first, template.middle, second, template.suffix]
            else:
                parts = [template.prefix, first[:room], template.end]
            if not sum(map(len, parts)):
                parts = [_stand_in(template)]
            begin = sum(map(len, parts[:3]))
            samples.append(Sample(join(*parts), begin, record["label"], record["part"]))
        return samples

    def total(self, scores: Tensor, batch: Batch) -> Tensor:
        """Sum negative log-likelihoods in nats, or squared errors."""
        if self.regression:
            return F.mse_loss(scores[:, 0], batch["targets"], reduction="sum")
        return cross_entropy(scores, batch["targets"])

    def predictions(self, scores: Tensor, batch: Batch) -> Observation:
        predicted = scores[:, 0] if self.regression else scores.argmax(dim=1)
        return {"predicted": predicted, "labels": batch["targets"], "parts": batch["about"]}

    def require_metrics(self) -> None:
        _libraries(self.options.metrics[0])

    def metrics(self, observations: Iterable[Observation]) -> dict[str, float]:
        """Return the task's metrics in percent, also per part if there are several.

        ``score``, the task's contribution to a GLUE average, is the mean of its metrics.
        """
        observations = list(observations)
        result = averages(observations)
        names = self.options.parts
        parts: defaultdict[int, list[Any]] = defaultdict(list)
        for seen in observations:
            columns = (seen[key] for key in ("parts", "predicted", "labels"))
            for part, *pair in zip(*columns, strict=True):
                parts[part].append(pair)
        for metric in self.options.metrics:
            by_part = {
                part: 100 * _measure(metric, *zip(*pairs, strict=True))
                for part, pairs in sorted(parts.items())
            }
            result[metric] = sum(by_part.values()) / len(by_part)
            if len(names) > 1:
                # the test split may have more parts than that of validation, which are named
                name = dict(enumerate(names))
                result |= {f"{metric}_{name.get(part, part)}": by_part[part] for part in by_part}
        wanted = [result[metric] for metric in self.options.metrics]
        return {**result, "score": sum(wanted) / len(wanted)}


def _stand_in(template: Template) -> tuple[int, ...]:
    """Return the token of a text without any, so that the head has a position to read."""
    if not template.middle:
        raise DataError(
            "a record has no text, and the tokenizer has no end-of-text token to stand for it: "
            "leave such records out"
        )
    return template.middle


def _cut(first: Any, second: Any, room: int) -> tuple[Any, Any]:
    """Truncate the longer text to the other's length, then both equally, until they fit."""
    length = min(len(first), max(room // 2, room - len(second)))
    return first[:length], second[: room - length]


def _libraries(metric: str) -> tuple[Any, Any]:
    """Import ``scipy.stats`` and ``sklearn.metrics``."""
    with needs(f"task.metrics: {metric}", "scikit-learn", "eval", error=ConfigError):
        from scipy import stats
        from sklearn import metrics
    return stats, metrics


def _measure(metric: str, predicted: Sequence[float], labels: Sequence[float]) -> float:
    """Compute one metric; a correlation with a constant is 0."""
    stats, metrics = _libraries(metric)
    if metric in CORRELATIONS:
        if len(set(predicted)) < 2 or len(set(labels)) < 2:
            return 0.0
        correlate = stats.pearsonr if metric == "pearson" else stats.spearmanr
        return float(correlate(predicted, labels).statistic)
    measures = {
        "accuracy": metrics.accuracy_score,
        "f1": functools.partial(metrics.f1_score, zero_division=0),
        "mcc": metrics.matthews_corrcoef,
    }
    return float(measures[metric](labels, predicted))
