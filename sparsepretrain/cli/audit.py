"""Verb ``audit``: the zeros in anybody's checkpoint, against what is claimed of them."""

from __future__ import annotations

import argparse
from pathlib import Path

from sparsepretrain.cli._verb import Verb
from sparsepretrain.errors import ConfigError
from sparsepretrain.registry import register

DESCRIPTION = """\
Count the zeros of every weight in groups along both axes, and compare them with N:M and with what
the files declare. CHECKPOINT is a Hugging Face directory, one .safetensors file, or a run.
Files are read a few megabytes at a time. Exit code 1: a layer does not have the required pattern.
"""
SHOWN = 12
"""Maximum number of findings that are printed; the page has all of them."""


@register("verb", "audit")
class AuditVerb(Verb):
    summary = "count the zeros of a checkpoint and compare them with N:M and with its claims"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.description = DESCRIPTION
        text = "a Hugging Face directory, a .safetensors file, or a run"
        parser.add_argument("checkpoint", metavar="CHECKPOINT", help=text)
        text = "exit code 1 unless the layers are N:M: those of --layers, else those that "
        text += "sparsity.json names, else all linear layers of repeated blocks"
        parser.add_argument("--require", metavar="N:M", help=text)
        text = "globs of the layers that must be N:M"
        parser.add_argument("--layers", nargs="+", default=[], metavar="GLOB", help=text)
        text = "text files: also compute the perplexity, at windows of 1024, 2048 and 4096 tokens"
        parser.add_argument("--text", nargs="+", default=[], type=Path, metavar="FILE", help=text)
        text = "write audit.md and audit.json; default: audits/NAME"
        parser.add_argument("--out", type=Path, metavar="DIR", help=text)

    def run(self, args: argparse.Namespace) -> int:
        from sparsepretrain.export.claims import read_pattern

        require = None
        if args.require is not None:
            try:
                require = read_pattern(args.require)
            except ValueError as error:
                raise ConfigError(f"--require: {error}") from error
        from sparsepretrain.console import Console
        from sparsepretrain.errors import cannot_write
        from sparsepretrain.export import audit_page
        from sparsepretrain.export.audit import audit_any

        console = Console()
        console.loading(args.checkpoint)
        result = audit_any(
            args.checkpoint,
            require=require,
            layers=args.layers,
            texts=args.text,
            console=console,
        )
        console.table("audit", audit_page.summary(result))
        findings = [f for f in result.findings if not f.is_note]
        for finding in findings[:SHOWN]:
            console.warn(f"{finding.where}: {finding.text} ({finding.kind})")
        if len(findings) > SHOWN:
            console.info(f"{len(findings) - SHOWN} more findings are on the page")
        out = args.out or Path("audits") / (Path(args.checkpoint).resolve().name or "checkpoint")
        try:
            for path in audit_page.write(result, out):
                console.info(str(path))
        except OSError as error:
            raise cannot_write(out, error) from error
        return 1 if result.fails else 0
