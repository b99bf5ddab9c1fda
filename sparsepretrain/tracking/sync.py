"""A W&B run rebuilt from the record of a run, once however often it is asked for."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from sparsepretrain.config import strict
from sparsepretrain.config.groups import Tracker
from sparsepretrain.errors import ConfigError, SparsePretrainError, reason
from sparsepretrain.files import read_json, write_atomic
from sparsepretrain.runs.directory import RunDirectory
from sparsepretrain.tracking.console import Console
from sparsepretrain.tracking.stream import values_of
from sparsepretrain.tracking.wandb import WeightsAndBiases, check_login, logged_in

SYNCED = "synced.json"
"""In the run's wandb/: what was sent, and the offline run that holds it."""


def sync(
    run: RunDirectory,
    *,
    mode: Literal["online", "offline"] | None = None,
    project: str | None = None,
    entity: str | None = None,
    report: Path | None = None,
    console: Console | None = None,
) -> bool:
    """Send the record to W&B under the id of the run, which follows from its directory's name.

    Online only steps that W&B does not have are sent. Offline the whole record is written anew when
    it has grown, in place of what an earlier call wrote.

    Args:
        run: a run directory.
        mode: None: online where there is a login, else offline.
        project, entity: None: those of the run's configuration.
        report: directory of a report; its pictures, pages and tables are sent too.
        console: told what was done.

    Returns:
        whether there was anything new.

    Raises:
        ConfigError: no record or report there, or online without a login.
        DataError: the record is damaged.
        SparsePretrainError: W&B failed.
    """
    console = console or Console()
    config, lines = run.config(), run.record()
    tracker = strict.build(Tracker, config["tracker"], "tracker")
    tracker = replace(
        tracker,
        mode=mode or ("online" if logged_in() else "offline"),
        project=project or tracker.project,
        entity=entity or tracker.entity,
    )
    check_login(tracker)
    files = [] if report is None else _report_files(report)
    directory = run.path / "wandb"
    name = f"{config['name']}/{run.path.resolve().name}"
    mirror = WeightsAndBiases(run.path, tracker, config, name, resume_step=0)
    run_id = _keep_id(directory / "run_id", name)
    digest = _digest([run.record_file, *files], repr(tracker))
    before = _read(directory / SYNCED)
    earlier = directory / before.get("offline", "")
    if before.get("digest") == digest and earlier.is_dir():
        console.info(f"{run}: W&B has everything already (run {run_id})")
        return False
    try:
        if note := mirror.open():
            console.warn(f"W&B {note}")
        for line in lines:
            if line["step"] >= mirror.first_step:
                mirror.log(line["step"], values_of(line))
        mirror.show(dict(_media(files)))
        mirror.close(0, {})
    except Exception as error:  # of a third party
        raise SparsePretrainError(f"W&B failed: {type(error).__name__}: {reason(error)}") from error
    written = mirror.directory
    offline = written.name.startswith("offline-run")
    if before.get("offline") and earlier != written:
        shutil.rmtree(earlier, ignore_errors=True)
    now = {"digest": digest, "offline": written.name if offline else ""}
    write_atomic(directory / SYNCED, json.dumps(now) + "\n")
    told = f"upload with `wandb sync {written}`" if offline else "online"
    console.info(f"{run}: {len(lines)} lines as W&B run {run_id}, {told}")
    return True


def _keep_id(file: Path, name: str) -> str:
    """The id that training gave to the run, or else one that follows from its name."""
    if not file.is_file():
        file.parent.mkdir(exist_ok=True)
        file.write_text(hashlib.sha256(name.encode()).hexdigest()[:8] + "\n")
    return file.read_text().strip()


def _report_files(directory: Path) -> list[Path]:
    """The pictures and pages of a report."""
    kinds = ("*.md", "*.html", "*.png", "plots/*.png")
    found = [file for kind in kinds for file in sorted(directory.glob(kind))]
    if not found:
        raise ConfigError(f"{directory} has no report: give a directory that `report` wrote")
    return found


def _media(files: list[Path]) -> Iterator[tuple[str, Any]]:
    """What W&B shows of a report: (key, picture, page or table)."""
    import wandb

    for file in files:
        key = f"report/{file.stem}"
        if file.suffix == ".png":
            yield key, wandb.Image(str(file))
        elif file.suffix == ".html":
            yield key, wandb.Html(file.read_text(encoding="utf-8"), inject=False)
        else:
            for title, (header, *rows) in tables(file.read_text(encoding="utf-8")).items():
                yield f"report/{title}", wandb.Table(columns=[*header], data=rows)


def tables(text: str) -> dict[str, list[list[str]]]:
    """Heading -> rows, the header first, of each table of a Markdown page."""
    found: dict[str, list[list[str]]] = {}
    title, name = "table", None
    for line in text.splitlines():
        if line.startswith("#"):
            title = line.lstrip("# ")
        if not line.startswith("|"):
            name = None
            continue
        if name is None:
            name = title if title not in found else f"{title} {len(found) + 1}"
            found[name] = []
        cells = re.split(r"(?<!\\)\|", line.strip().strip("|"))
        row = [cell.strip().replace("\\|", "|") for cell in cells]
        if any(row) and not all(re.fullmatch(r":?-+:?", cell) for cell in row):
            found[name].append(row)
    return found


def _digest(files: list[Path], more: str) -> str:
    digest = hashlib.sha256(more.encode())
    for file in files:
        digest.update(file.read_bytes())
    return digest.hexdigest()


def _read(file: Path) -> dict[str, str]:
    try:
        return read_json(file, dict)
    except (OSError, ValueError):
        return {}
