"""Weights & Biases, online or offline, in ``run_dir/wandb``."""

from __future__ import annotations

import importlib.util
import netrc
import os
import secrets
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from sparsepretrain.config.groups import Tracker
from sparsepretrain.config.schema import Run
from sparsepretrain.errors import ConfigError

INIT_SECONDS = 20
"""Timeout of wandb.init; the default of 90 s delays a run without network."""

FINISH_SECONDS = 8
"""Timeout of the last upload; unsent data stays on disk for `wandb sync`."""

BY_STEP = {"step_metric": "step"}

METRICS: dict[str, dict[str, Any]] = {
    "step": {"hidden": True},
    "tokens": {"hidden": True},
    "time": {"hidden": True},
    "train/*": BY_STEP,
    "validation/*": BY_STEP | {"summary": "min,max,last"},
    "sparsity/*": BY_STEP,
    "layers/*": BY_STEP,
    "speed/*": BY_STEP,
    "train/loss": BY_STEP | {"summary": "min,last"},
    "sparsity/flip_rate": BY_STEP | {"summary": "max,last"},
}
"""Metric or glob -> arguments of W&B's ``define_metric``.

The first three are axes, without panels; panels show metrics by ``step``. The summary of a run has
the last value of each metric, or the aggregates that are named here. The best validation score is a
minimum or a maximum, by metric. W&B applies one definition to a metric: globs must not overlap.
"""

MOST_OF_A_TAG = 64
"""Characters; W&B refuses a run with a longer tag."""


@dataclass(frozen=True)
class Place:
    """Place of a run among the others of a W&B project."""

    name: str
    """``NAME/HASH-sSEED``, the end of the path of its directory."""
    group: str | None
    job_type: str
    tags: tuple[str, ...]

    @classmethod
    def of(cls, run: Run, directory: str) -> Place:
        """Return the place of ``run``, whose directory has this name."""
        tracker = run.tracker
        parts = tracker.group.split("/") if tracker.group else []
        method = run.sparsity
        own = (*parts, method.name, f"{method.n}:{method.m}", f"seed {run.seed}")
        tags = tuple(dict.fromkeys(tag[:MOST_OF_A_TAG] for tag in (*tracker.tags, *own) if tag))
        job_type = tracker.job_type or ("train" if run.init.path is None else "finetune")
        return cls(f"{run.name}/{directory}", tracker.group, job_type, tags)


@dataclass
class WeightsAndBiases:
    """W&B as a :class:`~sparsepretrain.tracking.stream.Mirror`.

    ``run_dir/wandb/run_id`` holds the W&B run id: a resumed run continues the same W&B run, a fresh
    start gets a new one. A resumed offline run has a new directory that holds the whole run, since
    a killed process may have left lines in memory: sync ``wandb/latest-run`` alone.
    """

    run_dir: Path
    tracker: Tracker
    config: dict[str, Any]
    place: Place
    resume_step: int | None
    earlier: Callable[[], Iterable[tuple[int, dict[str, float]]]] = tuple
    """See :data:`~sparsepretrain.tracking.stream.Earlier`."""
    name: str = "W&B"

    def open(self) -> str | None:
        # Without a reachable server, online mode falls back to offline.
        import wandb

        # without this, init prints the login
        wandb.setup(wandb.Settings(silent=True))
        run_id = self._run_id()
        if self.tracker.mode == "online" and logged_in():
            try:
                self._run = self._init("online", run_id)
                return None
            except Exception:
                # the id of a failed attempt stays in use in this process
                run_id += "-offline"
        self._run = self._init("offline", run_id)
        for step, values in self.earlier():
            self.log(step, values)
        if self.tracker.mode == "offline":
            return None
        directory = Path(self._run.dir).parent
        return f"is not reachable and records offline: upload with `wandb sync {directory}`"

    def log(self, step: int, values: dict[str, float]) -> None:
        self._run.log({"step": step, **values}, step=step)  # rows of one step are merged

    def close(self, exit_code: int, summary: dict[str, Any]) -> None:
        self._run.summary.update(summary)
        self._run.finish(exit_code=exit_code)

    def _init(self, mode: Literal["online", "offline"], run_id: str) -> Any:
        import wandb

        settings: dict[str, Any] = {"silent": True, "console": "off", "init_timeout": INIT_SECONDS}
        if "finish_timeout" in wandb.Settings.model_fields:
            settings["finish_timeout"] = FINISH_SECONDS
        run = wandb.init(
            project=self.tracker.project,
            entity=self.tracker.entity,
            name=self.place.name,
            group=self.place.group,
            job_type=self.place.job_type,
            tags=self.place.tags,
            id=run_id,
            resume="allow" if mode == "online" else None,
            mode=mode,
            dir=str(self.run_dir),
            config=self.config,
            settings=wandb.Settings(**settings),
        )
        for metric, arguments in METRICS.items():
            run.define_metric(metric, **arguments)
        return run

    def _run_id(self) -> str:
        """Read or write the run id; writing fails early if the directory is not writable."""
        path = self.run_dir / "wandb" / "run_id"
        if self.resume_step is not None and path.is_file():
            return path.read_text().strip()
        path.parent.mkdir(parents=True, exist_ok=True)
        run_id = secrets.token_hex(4)
        path.write_text(run_id + "\n")
        return run_id


def check_login(tracker: Tracker) -> None:
    """Reject ``mode=online`` without an API key, before a run touches anything; no network."""
    installed = importlib.util.find_spec("wandb") is not None
    if tracker.mode == "online" and installed and not logged_in():
        raise ConfigError(
            "tracker.mode=online needs a W&B login: run `wandb login`, set WANDB_API_KEY, "
            "or use tracker.mode=offline"
        )


def logged_in() -> bool:
    """Return True if wandb finds credentials: environment, netrc, or its settings files."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    import wandb

    settings = wandb.setup(wandb.Settings(silent=True)).settings
    return bool(settings.api_key) or _in_netrc(urlsplit(settings.base_url).netloc)


def _in_netrc(host: str) -> bool:
    try:
        known = netrc.netrc(os.environ.get("NETRC"))
    except (OSError, netrc.NetrcParseError):
        return False
    # wandb also accepts the entry of api.wandb.ai for newer addresses of its public server
    return any(known.authenticators(name) for name in (host, "api.wandb.ai"))
