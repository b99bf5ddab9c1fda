"""The span of a context that answers a question: SQuAD v1.1."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

from sparsepretrain.data.sources.questions import QUESTIONS
from sparsepretrain.limits import Problems
from sparsepretrain.registry import register
from sparsepretrain.tasks import Batch, Observation, averages
from sparsepretrain.tasks._bases import RecordOptions, RecordTask, Sample, join

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor, nn

    from sparsepretrain.data.encoding import Codec

BEST = 20
"""Most likely starts that are tried, each with its best end; SQuAD's evaluations try as many."""
NEVER = float("-inf")


@dataclass(slots=True, kw_only=True)
class QuestionAnsweringOptions(RecordOptions):
    """Options of the task."""

    name: Literal["question_answering"]
    stride: int
    max_question: Annotated[int, "≥ 1"]
    max_answer: Annotated[int, "≥ 1"]
    end: Literal["last", "next"]

    def problems(self) -> Problems:
        yield from RecordOptions.problems(self)
        room = self.max_length - self.max_question - 4
        if not 0 <= self.stride < room:
            yield (
                "stride",
                "must lie in [0, max_length - max_question - 4), the shortest window "
                f"({room}), got {self.stride}",
            )


class About(NamedTuple):
    """What the metrics need to know of a window."""

    example: int
    context: str
    answers: list[str]
    spans: np.ndarray
    """(tokens, 2) characters of the window's context tokens."""
    behind: int
    """Tokens behind those, in every sample as many."""


@register("task", "question_answering")
class QuestionAnswering(RecordTask):
    """Start and end of the answer, each a choice among the positions of the sequence.

    Contexts that are too long come in windows; each is a sample. Windows without the whole answer
    have the first position as their target, and evaluation takes the best span over all windows.
    """

    Options = QuestionAnsweringOptions
    holds = QUESTIONS
    head = "spans"
    metric = "f1"
    outputs = 2
    target = (0, 0)

    def encode(self, records: list[dict[str, Any]], codec: Codec) -> list[Sample]:
        """The windows of every record, in order."""
        questions = codec.encode([record["question"].strip() for record in records])
        contexts = codec.encode_spans([record["context"] for record in records])
        return [
            sample
            for index, (record, question, context) in enumerate(
                zip(records, questions, contexts, strict=True)
            )
            for sample in self._windows(index, record, question, context, codec)
        ]

    def _windows(
        self,
        index: int,
        record: dict[str, Any],
        question: np.ndarray,
        context: tuple[np.ndarray, np.ndarray],
        codec: Codec,
    ) -> Iterator[Sample]:
        import numpy as np

        template = codec.template()
        ids, spans = context
        head = [template.prefix, question[: self.options.max_question], template.middle]
        first = sum(map(len, head))
        after = int(self.options.end == "next")
        # one place stays free behind the window, where a causal model says that the answer is over
        tail = template.suffix or template.middle or (0,)
        room = self.options.max_length - first - len(tail)
        answers = [text for text, _ in record["answers"]]
        text, start = record["answers"][0]
        for begin in range(0, max(1, len(ids) - self.options.stride), room - self.options.stride):
            part, places = ids[begin : begin + room], spans[begin : begin + room]
            inside = np.flatnonzero((places[:, 1] > start) & (places[:, 0] < start + len(text)))
            whole = (
                len(inside) > 0
                and places[inside[0], 0] <= start
                and places[inside[-1], 1] >= start + len(text)
            )
            target = (first + inside[0], first + inside[-1] + after) if whole else (0, 0)
            about = About(index, record["context"], answers, places, len(tail))
            yield Sample(join(*head, part, tail), first, tuple(map(int, target)), about)

    def scores(self, model: nn.Module, batch: Batch) -> Tensor:
        """(batch, length, 2); padding can be neither start nor end."""
        scores = super().scores(model, batch)
        return scores.masked_fill(~batch["mask"][..., None], NEVER)

    def total(self, scores: Tensor, batch: Batch) -> Tensor:
        """Σ over windows of the mean negative log likelihood of start and end."""
        import torch.nn.functional as F

        # classes in the middle, as cross_entropy wants them
        return F.cross_entropy(scores, batch["targets"], reduction="sum") / 2

    def predictions(self, scores: Tensor, batch: Batch) -> Observation:
        """The best valid span of every window: inside the context, not too long.

        ``score`` is -inf where there is none; ``first`` and ``last`` count the context's tokens.
        """
        import torch.nn.functional as F

        after, most = int(self.options.end == "next"), self.options.max_answer
        place = batch["second"].cumsum(1)  # from 1, in the context and behind it
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
        """``exact_match`` and ``f1`` in percent: of each question, the best over its answers."""
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
        exact = [max(float(exact_match(t, a)) for a in answers) for t, answers in pairs]
        overlap = [max(f1(t, a) for a in answers) for t, answers in pairs]
        return {
            **averages(observations),
            "exact_match": 100 * sum(exact) / len(exact),
            "f1": 100 * sum(overlap) / len(overlap),
        }


def normalise(answer: str) -> str:
    """An answer as SQuAD's official evaluation compares it.

    Lower case, without punctuation and articles, single spaces (evaluate-v1.1.py).
    """
    answer = "".join(c for c in answer.lower() if c not in set(string.punctuation))
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", answer).split())


def exact_match(answer: str, truth: str) -> bool:
    """Whether two answers are equal after normalisation."""
    return normalise(answer) == normalise(truth)


def f1(answer: str, truth: str) -> float:
    """Harmonic mean of precision and recall of the words of ``answer``, as SQuAD counts them."""
    left, right = normalise(answer).split(), normalise(truth).split()
    common = sum((Counter(left) & Counter(right)).values())
    if not common:
        return 0.0
    precision, recall = common / len(left), common / len(right)
    return 2 * precision * recall / (precision + recall)
