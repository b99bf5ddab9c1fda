"""Published numbers of papers, looked up by table and cell."""

from __future__ import annotations

import functools
from typing import Any

from sparsepretrain.config.places import shipped
from sparsepretrain.config.tables import Published
from sparsepretrain.errors import ConfigError

PUBLISHED = "table/_published.yaml"
"""File of published numbers with sources, in the shipped directory."""


@functools.cache
def published() -> dict[tuple[str, str], dict[str, Any]]:
    """Return (paper, table) -> entry of ``_published.yaml``: status, source, note, rows."""
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    with open(shipped() / PUBLISHED, encoding="utf-8") as stream:
        entries = yaml.load(stream, Loader=loader)["tables"]
    return {(entry["paper"], str(entry["table"])): entry for entry in entries}


def printed(source: Published, row: str, column: str) -> dict[str, Any] | None:
    """Return the published row of a cell with ``status``, ``source`` and ``note``, or None."""
    entry = published().get((source.paper, source.table))
    if entry is None:
        raise ConfigError(f"{PUBLISHED} has no table {source.table!r} of {source.paper!r}")
    if row not in source.rows or (source.columns and column not in source.columns):
        return None
    wanted = {**source.match, **source.columns.get(column, {}), **source.rows[row]}
    fits = [r for r in entry["rows"] if all(r.get(k) == v for k, v in wanted.items())]
    if len(fits) > 1:
        raise ConfigError(f"{len(fits)} rows of {source.table!r} ({source.paper}) fit {wanted}")
    about = {key: entry.get(key, "") for key in ("status", "source", "note")}
    return {**about, **fits[0]} if fits else None
