"""Who watches the steps of a session. Without torch, so that options are checked without it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar


class Observer:
    """One of ``Session.observers``; a subclass has the hooks it needs.

    It may keep what it sees, but leaves the model, its gradients, the optimizer and the global
    generators as they are: a run is the same with and without it. ``session`` is a
    :class:`~sparsepretrain.training.session.Session`.
    """

    def before_step(self, session: Any) -> None:
        """Before the batches of a step are fetched."""

    def after_backward(self, session: Any) -> None:
        """Gradients are those of the global batch, unscaled and not yet clipped."""

    def after_step(self, session: Any, step: Any) -> None:
        """After an optimizer step, or one that was skipped; gradients are gone.

        ``step`` is a :class:`~sparsepretrain.training.step.Step`, whose ``loss`` and ``grad_norm``
        may wait for the device: where one rank reads them, all have to. ``session.step`` counts it
        already.
        """

    def at_log(self, session: Any, *, per_layer: bool) -> dict[str, Any]:
        """Entries of the line of the record that is due after this step."""
        return {}


@dataclass(slots=True, kw_only=True)
class ProbeOptions:
    """What every probe is asked."""

    every: Annotated[int, "> 0"] = 10
    """Optimizer steps between two lines of probes.jsonl."""


class Probe(Observer):
    """An observer that ``probe.<name>`` of the configuration turns on.

    Its class is registered as a ``probe`` and must not import torch at the top of its file. What it
    measures are lines of ``probes.jsonl``; metrics.jsonl is the same without it.
    """

    name: ClassVar[str]
    """What it is registered as, and the ``probe`` of its lines."""
    Options: ClassVar[type] = ProbeOptions

    def __init__(self, options: Any, session: Any) -> None:
        self.options = options

    def due(self, session: Any) -> bool:
        """Whether the step that is being taken is one to measure; not in ``after_step``."""
        return bool((session.step + 1) % self.options.every == 0)

    def write(self, session: Any, values: Mapping[str, Any]) -> None:
        """A line about the last step; numbers, and tensors with one element."""
        session.log_probe({"step": session.step, "probe": self.name, **values})

    def state_dict(self) -> dict[str, Any]:
        """What a continued run needs: tensors, numbers, and lists and dicts of these."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
