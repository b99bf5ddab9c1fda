"""Page of a pruned checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sparsepretrain.sparsity.coverage import collapsed

PAGE = "prune.md"


def summary(results: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return rows of key and value."""
    settings = results["settings"]
    options = ", ".join(f"{key}={value}" for key, value in settings["options"].items())
    rows = [
        ("checkpoint", settings["checkpoint"]),
        ("method", settings["method"] + (f" ({options})" if options else "")),
        ("pattern", f"{settings['pattern']} in {results['layers']} layers"),
    ]
    share = results["nonzeros"] / max(1, results["weights"])
    rows.append(("weights", f"{results['weights']:,} outside embeddings, {share:.1%} are not zero"))
    text = settings.get("text")
    if text is not None and text["sequences"]:
        rows.append(
            (
                "calibration",
                f"{text['sequences']} sequences of {text['sequence_length']} tokens of "
                f"{text['data']}, seed {text['seed']}",
            )
        )
    for when, entries in results["perplexity"].items():
        for entry in entries:
            value = entry.get("reason") or (
                f"{entry['perplexity']:.4f} over {entry['predicted']:,} predicted tokens in "
                f"windows of {entry['window']}"
            )
            rows.append((f"perplexity {when}", value))
    moved = sum(len(facts.get("permuted", ())) for facts in results["blocks"].values())
    if moved:
        rows.append(("permuted", f"input channels of {moved} layers, folded into those before"))
    return rows


def as_markdown(results: Mapping[str, Any]) -> str:
    """Return the page."""
    lines = ["# Pruned checkpoint", "", "| | |", "| --- | --- |"]
    lines += [f"| {key} | {value} |" for key, value in summary(results)]
    blocks = results["blocks"]
    remarks = [
        f"- {layer}: {fact['remark']}"
        for facts in blocks.values()
        for layer, fact in facts.get("layers", {}).items()
        if "remark" in fact
    ]
    remarks += [
        f"- {layer}: the order of its inputs does not fold into the layers before"
        for facts in blocks.values()
        for layer in facts.get("not_folded", ())
    ]
    if remarks:
        lines += ["", "## Remarks", "", *remarks]
    if any("output_change" in facts for facts in blocks.values()):
        lines += ["", "## Blocks", ""]
        lines += ["Change of the output: ‖pruned − before‖ / ‖before‖ on the first batch.", ""]
        lines += ["| block | change of the output |", "| --- | --- |"]
        lines += [
            f"| {name} | {facts['output_change']:.3f} |"
            for name, facts in blocks.items()
            if "output_change" in facts
        ]
    lines += ["", "## Layers", ""]
    lines += ["Dropped: norm of the dropped weights over that of all, before kept ones change.", ""]
    lines += ["| layer | shape (out, in) | dropped |", "| --- | --- | --- |"]
    rows = [
        [layer, " × ".join(map(str, fact["shape"])), f"{fact['dropped']:.3f}"]
        for facts in blocks.values()
        for layer, fact in facts.get("layers", {}).items()
    ]
    lines += [f"| {' | '.join(row)} |" for row in collapsed(rows)]
    lines += ["", "`masks.safetensors` has the masks: `init.mask=` takes this directory."]
    return "\n".join(lines) + "\n"
