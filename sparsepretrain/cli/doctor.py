"""Verb ``doctor``: versions, devices, and sparse matmuls of this machine."""

from __future__ import annotations

import argparse

from sparsepretrain.cli._verb import ConfiguredVerb, UsageError
from sparsepretrain.registry import register


@register("verb", "doctor")
class Doctor(ConfiguredVerb):
    summary = "show versions, devices and sparse matmuls of this machine"

    def run(self, args: argparse.Namespace) -> int:
        from sparsepretrain.tracking.console import Console

        if other := [word for word in args.overrides if not word.startswith("plugins=")]:
            raise UsageError(
                f"doctor takes no overrides except plugins=[…], got {other[0]!r}. The bound of the "
                f"speed-up of a run: `sparsepretrain train {other[0]} --dry-run`"
            )
        if args.overrides:
            from sparsepretrain.config.validate import load

            load(args.overrides, args.config_dir)  # registers the methods of the plug-ins
        console = Console()
        console.loading("doctor")
        from sparsepretrain.cli._machine import MATMULS, here, machine, method_rows

        console.table("this machine", machine(), lines=False)
        console.info("")
        title = (
            "products that can be sparse: linear layers with features that 64 divides, fp16 or bf16"
        )
        console.table(title, method_rows(), ["method", *MATMULS, "why not"], lines=False)
        console.info(f"\n{here()}")
        return 0
