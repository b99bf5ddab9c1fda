"""Pages of an audit: Markdown for readers, JSON for programs."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from sparsepretrain.export.audit import Audit, AuditedLayer, Finding
from sparsepretrain.files import write_atomic
from sparsepretrain.sparsity.coverage import collapsed

PAGE = "audit.md"
DATA = "audit.json"


def write(audit: Audit, directory: Path) -> list[Path]:
    """Write both pages; return their paths."""
    directory.mkdir(parents=True, exist_ok=True)
    page, data = directory / PAGE, directory / DATA
    write_atomic(data, json.dumps(as_json(audit), indent=1) + "\n")
    write_atomic(page, as_markdown(audit))
    return [page, data]


def as_json(audit: Audit) -> dict[str, Any]:
    """Return the audit as plain values."""
    return {
        "checkpoint": audit.path,
        "require": _words(audit.required),
        "fails": audit.fails,
        "weights": audit.entries,
        "nonzeros": audit.nonzeros,
        "embeddings": audit.embeddings,
        "findings": [_finding(f) for f in audit.findings if not f.is_note],
        "notes": [_finding(f) for f in audit.findings if f.is_note],
        "claims": [
            {
                "source": claim.source,
                "pattern": _words(claim.pattern),
                "layers": None if claim.layers is None else len(claim.layers),
                "zeros": claim.zeros,
            }
            for claim in audit.claims
        ],
        "perplexity": audit.perplexity,
        "layers": [_layer(layer) for layer in audit.layers],
    }


def _words(pattern: tuple[int, int] | None) -> str | None:
    return None if pattern is None else "{}:{}".format(*pattern)


def _finding(finding: Finding) -> dict[str, str]:
    return {"kind": finding.kind, "where": finding.where, "text": finding.text}


def _layer(layer: AuditedLayer) -> dict[str, Any]:
    counts = layer.counts
    values: dict[str, Any] = {
        "name": layer.name,
        "class": layer.kind,
        "shape": list(counts.shape),
        "dtype": counts.dtype,
        "nonzeros": counts.entries - counts.zeros,
        "negative_zeros": counts.negative_zeros,
        "required": _words(layer.required),
    }
    for place, axis in zip(("reduction_axis", "other_axis"), layer.axes, strict=True):
        found = {
            f"groups_of_{m}_by_nonzeros": groups
            for (along, m), groups in counts.groups.items()
            if along == axis
        }
        values[place] = {"axis": axis, "pattern": _words(counts.pattern(axis)), **found}
    return values


def _judgment(layer: AuditedLayer) -> list[str]:
    """Return pattern, groups above and below N, and the share of non-zeros of a layer."""
    counts = layer.counts
    axis = layer.axes[0]
    pattern = layer.pattern
    density = f"{counts.density:.1%}"
    if pattern is None:
        return ["dense" if not counts.zeros else "no pattern", "", "", density]
    n, m = pattern
    if not counts.divides(axis, m):
        return [f"{n}:{m}", "width", "", density]
    return [f"{n}:{m}", f"{counts.above(axis, n, m):,}", f"{counts.below(axis, n, m):,}", density]


def summary(audit: Audit) -> list[tuple[str, str]]:
    """Return rows of the summary."""
    exact: Counter[str] = Counter()
    of: Counter[str] = Counter()
    for layer in audit.layers:
        if (pattern := layer.pattern) and layer.counts.holds(layer.axes[0], *pattern):
            exact[f"{pattern[0]}:{pattern[1]}"] += layer.counts.entries
            of[f"{pattern[0]}:{pattern[1]}"] += 1
    rows = [("checkpoint", audit.path)]
    rows += [
        (name, f"{of[name]} layers, {entries / max(1, audit.entries):.1%} of the weights")
        for name, entries in exact.items()
    ]
    share = audit.nonzeros / max(1, audit.entries)
    rows.append(("weights", f"{audit.entries:,} outside embeddings, {share:.1%} are not zero"))
    rows.append(("embeddings", f"{audit.embeddings:,}"))
    for entry in audit.perplexity:
        text = entry.get("reason") or (
            f"{entry['perplexity']:.4f} over {entry['predicted']:,} predicted tokens in "
            f"{entry['windows']:,} windows"
        )
        rows.append((f"perplexity at {entry['window']}", text))
    rows.append(("findings", str(sum(not f.is_note for f in audit.findings))))
    if audit.required:
        state = "FAILED" if audit.fails else "passed"
        count = sum(layer.required is not None for layer in audit.layers)
        rows.append((f"require {_words(audit.required)}", f"{state}, {count} layers"))
    return rows


def as_markdown(audit: Audit) -> str:
    """Return the page."""
    lines = ["# Audit", "", "| | |", "| --- | --- |"]
    lines += [f"| {key} | {value} |" for key, value in summary(audit)]
    for title, notes in (("Findings", False), ("Notes", True)):
        found = [f for f in audit.findings if f.is_note is notes]
        if found:
            lines += ["", f"## {title}", "", "| where | kind | |", "| --- | --- | --- |"]
            rows = collapsed([[f.where, f.kind, f.text] for f in found])
            lines += [f"| {' | '.join(row)} |" for row in rows]
    if audit.claims:
        lines += ["", "## Declared", "", "| file | pattern | zeros |", "| --- | --- | --- |"]
        for claim in audit.claims:
            zeros = "" if claim.zeros is None else f"{claim.zeros:.1%}"
            lines.append(f"| {claim.source} | {_words(claim.pattern) or 'none'} | {zeros} |")
    lines += ["", "## Layers", ""]
    lines += ["Groups run along the axis that the forward matmul sums over.", ""]
    lines += ["| layer | class | shape | pattern | groups above N | below N | non-zeros |"]
    lines += ["| --- | --- | --- | --- | --- | --- | --- |"]
    rows = [
        [layer.name, layer.kind, " × ".join(map(str, layer.counts.shape)), *_judgment(layer)]
        for layer in audit.layers
    ]
    lines += [f"| {' | '.join(row)} |" for row in collapsed(rows)]
    return "\n".join(lines) + "\n"
