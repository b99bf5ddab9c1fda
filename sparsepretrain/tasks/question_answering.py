"""Extractive question answering: SQuAD v1.1."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
import torch.nn.functional as F
from torch import Tensor, nn

from sparsepretrain.data.encoding import Codec
from sparsepretrain.errors import Problems
from sparsepretrain.registry import register
from sparsepretrain.tasks import Batch, Observation, averages
from sparsepretrain.tasks._bases import RecordTask, RecordTaskOptions, Sample, join

BEST = 20
"""Number of most likely starts tried with their best ends, as in SQuAD's evaluations."""
NEVER = float("-inf")


@dataclass(slots=True, kw_only=True)
class QuestionAnsweringOptions(RecordTaskOptions):
    """Options of the task."""

    name: Literal["question_answering"]
    stride: int
    max_question: Annotated[int, "≥ 1"]
    max_answer: Annotated[int, "≥ 1"]
    end: Literal["last", "next"]

    def problems(self) -> Problems:
        yield from RecordTaskOptions.problems(self)
        room = self.max_length - self.max_question - 4
        if room <= 0:
            yield (
                "max_length",
                f"leaves no room for a context after max_question={self.max_question} and four "
                f"special tokens, got {self.max_length}: raise it, or lower max_question",
            )
        elif not 0 <= self.stride < room:
            yield (
                "stride",
                "must lie in [0, max_length - max_question - 4), the shortest window "
                f"({room}), got {self.stride}",
            )


class About(NamedTuple):
    """Information about a window for the metrics."""

    example: int
    context: str
    answers: list[str]
    spans: np.ndarray
    """(tokens, 2) character ranges of the window's context tokens."""
    behind: int
    """Number of tokens after the context, equal in all samples."""


@register("task", "question_answering")
class QuestionAnswering(RecordTask):
    """Classification of the answer's start and end among the positions of the sequence.

    A long context is split into windows, each a sample. The target of windows without the whole
    answer is the first position; evaluation takes the best span of all windows.
    """

    Options = QuestionAnsweringOptions
    kind = "questions"
    head = "spans"
    metric = "f1"
    outputs = 2
    target = (0, 0)
    has_classes = False  # the classes are positions, two for each item

    def encode(self, records: list[dict[str, Any]], codec: Codec) -> list[Sample]:
        questions = codec.encode([record["question"].strip() for record in records])
        contexts = codec.encode_spans([record["context"] for record in records])
        template = codec.template()
        stride = self.options.stride
        after = int(self.options.end == "next")
        # one position after the window lets a causal model mark the end of the answer
        tail = template.suffix or template.middle or (0,)
        samples = []
        for index, record in enumerate(records):
            ids, spans = contexts[index]
            question = questions[index][: self.options.max_question]
            head = [template.prefix, question, template.middle]
            first = sum(map(len, head))
            room = self.options.max_length - first - len(tail)
            answers = [text for text, _ in record["answers"]]
            text, start = record["answers"][0]
            stop = start + len(text)
            for begin in range(0, max(1, len(ids) - stride), room - stride):
                part = ids[begin : begin + room]
                places = spans[begin : begin + room]
                inside = np.flatnonzero((places[:, 1] > start) & (places[:, 0] < stop))
                target = 0, 0
                if len(inside) and places[inside[0], 0] <= start and places[inside[-1], 1] >= stop:
                    target = first + int(inside[0]), first + int(inside[-1]) + after
                about = About(index, record["context"], answers, places, len(tail))
                samples.append(Sample(join(*head, part, tail), first, target, about))
        return samples

    def scores(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return (batch, length, 2) with padding excluded."""
        scores = super().scores(model, batch)
        return scores.masked_fill(~batch["mask"][..., None], NEVER)

    def total(self, scores: Tensor, batch: Batch) -> Tensor:
        """Sum the mean negative log-likelihood of start and end over windows."""
        # cross_entropy expects classes in dimension 1
        return F.cross_entropy(scores, batch["targets"], reduction="sum") / 2

    def predictions(self, scores: Tensor, batch: Batch) -> Observation:
        """Find the best span of each window inside the context and not longer than allowed.

        ``score`` is -inf if there is none; ``first`` and ``last`` index the context's tokens.
        """
        after = int(self.options.end == "next")
        most = self.options.max_answer
        place = batch["second"].cumsum(1)  # 1-based position in the context and after it
        outside = (place == 0) | (place > place[:, -1:] - batch["about"][0].behind)
        starts = scores[..., 0].masked_fill(outside, NEVER)
        ends = F.pad(scores[:, after:, 1], (0, after)).masked_fill(outside, NEVER)
        ends, lengths = F.pad(ends, (0, most - 1), value=NEVER).unfold(1, most, 1).max(2)
        tried = (-starts).sort(dim=1, stable=True).indices[:, :BEST]
        sums = (starts + ends).gather(1, tried)
        score, rank = sums.masked_fill(sums.isnan(), NEVER).max(1, keepdim=True)
        start = tried.gather(1, rank)
        first = place.gather(1, start) - 1
        last = first + lengths.gather(1, start)
        return {"score": score, "first": first, "last": last, "about": batch["about"]}

    def metrics(self, observations: Iterable[Observation]) -> dict[str, float]:
        """Return ``exact_match`` and ``f1`` in percent, maximal over the answers of a question."""
        observations = list(observations)
        best: dict[int, tuple[float, int, int, About]] = {}
        for seen in observations:
            for window in zip(*(seen[k] for k in ("score", "first", "last", "about")), strict=True):
                example = window[-1].example
                best[example] = max(best.get(example, window), window, key=lambda each: each[0])
        pairs = [
            (a.context[a.spans[i, 0] : a.spans[j, 1]] if score > NEVER else "", a.answers)
            for score, i, j, a in best.values()
        ]
        exact = [any(normalize(t) == normalize(a) for a in answers) for t, answers in pairs]
        overlap = [max(f1(t, a) for a in answers) for t, answers in pairs]
        return {
            **averages(observations),
            "exact_match": 100 * sum(exact) / len(exact),
            "f1": 100 * sum(overlap) / len(overlap),
        }


def normalize(answer: str) -> str:
    """Remove case, punctuation, articles and extra spaces, as SQuAD's evaluate-v1.1.py does."""
    answer = "".join(c for c in answer.lower() if c not in set(string.punctuation))
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", answer).split())


def f1(answer: str, truth: str) -> float:
    """Return the harmonic mean of word precision and recall, as SQuAD's evaluation does."""
    left = normalize(answer).split()
    right = normalize(truth).split()
    common = sum((Counter(left) & Counter(right)).values())
    if not common:
        return 0.0
    precision = common / len(left)
    recall = common / len(right)
    return 2 * precision * recall / (precision + recall)
