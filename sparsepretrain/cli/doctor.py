"""Verb ``doctor``: versions and devices of this machine, and if it can run sparse matmuls."""

from __future__ import annotations

import argparse

from sparsepretrain.cli._verb import Verb
from sparsepretrain.registry import register


@register("verb", "doctor")
class Doctor(Verb):
    summary = "show versions and devices, and if this machine can run sparse matmuls"

    def run(self, args: argparse.Namespace) -> int:
        from sparsepretrain.console import Console

        console = Console()
        from sparsepretrain.cli._machine import here, machine

        console.table("this machine", machine(), lines=False)
        console.info(f"\n{here()}")
        return 0
