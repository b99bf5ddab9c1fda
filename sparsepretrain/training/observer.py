"""Callbacks around each training step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Generic, Protocol, TypeVar

from sparsepretrain.training.step import Step


class Observed(Protocol):
    """Parts of a session that every probe reads."""

    @property
    def step(self) -> int:
        """Completed steps."""

    def log_probe(self, line: dict[str, Any], /) -> object:
        """Write a line of a probe."""


S = TypeVar("S", bound=Observed, contravariant=True)
"""Type of a session: a variable, because ``session.py`` imports this file."""


class Observer(Generic[S]):
    """Base class of ``Session.observers``; a subclass overrides the callbacks it needs.

    An observer must not change the model, its gradients, the optimizer or the global generators: a
    run is the same with and without it. ``session`` is a
    :class:`~sparsepretrain.training.session.Session`: derive from ``Observer["Session"]``.
    """

    name: ClassVar[str] = ""
    """Key of its state in checkpoints; "": it has no state."""

    def before_step(self, session: S) -> None:
        """Run before the batches of a step are fetched."""

    def after_backward(self, session: S) -> None:
        """Run when gradients are those of the global batch, unscaled and not yet clipped."""

    def after_step(self, session: S, step: Step) -> None:
        """Run after a step, or after a skipped one; gradients are gone.

        ``step`` is a :class:`~sparsepretrain.training.step.Step`, whose ``loss`` and ``grad_norm``
        may wait for the device: if one rank reads them, all have to. ``session.step`` includes the
        step.
        """

    def at_log(self, session: S, *, per_layer: bool) -> dict[str, Any]:
        """Return entries for the record's line of this step."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Return the state for checkpoints: tensors, numbers, and lists and dicts of these."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore :meth:`state_dict`."""


@dataclass(slots=True, kw_only=True)
class ProbeOptions:
    """Options of every probe."""

    every: Annotated[int, "> 0"] = 10
    """Optimizer steps between two lines of probes.jsonl."""


class Probe(Observer[S]):
    """An observer that ``probe.<name>`` of the configuration turns on.

    Its class is registered as a ``probe``. It writes lines to ``probes.jsonl`` under its registered
    :attr:`name`; metrics.jsonl is the same without it.
    """

    Options: ClassVar[type] = ProbeOptions

    def __init__(self, options: Any, session: S) -> None:
        self.options = options

    def due(self, session: S) -> bool:
        """Return True if the present step is one to measure; not for ``after_step``."""
        return bool((session.step + 1) % self.options.every == 0)

    def write(self, session: S, values: Mapping[str, Any]) -> None:
        """Write a line about the last step; values are numbers or tensors with one element."""
        session.log_probe({"step": session.step, "probe": self.name, **values})
