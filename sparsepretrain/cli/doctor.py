"""The verb ``doctor``: what this machine can do, and what sparse products can gain in a run."""

from __future__ import annotations

import argparse

from sparsepretrain.cli._verb import ConfiguredVerb
from sparsepretrain.errors import ConfigError
from sparsepretrain.registry import register, suggestion


@register("verb", "doctor")
class Doctor(ConfiguredVerb):
    summary = "say what this machine can run sparse, and what a model would gain"
    place = 8

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        super().add_arguments(parser)
        text = "predict its training step: the same as model=NAME; on a GPU also measure its layers"
        parser.add_argument("--model", metavar="NAME", help=text)
        text = "reckon with the data sheet of this one, such as 'H100 SXM'"
        parser.add_argument("--gpu", metavar="NAME", help=text)

    def run(self, args: argparse.Namespace) -> int:
        from sparsepretrain.tracking.console import Console

        words = [*([f"model={args.model}"] if args.model else []), *args.overrides]
        run, console = None, Console()
        if words:
            from sparsepretrain.config.compose import read
            from sparsepretrain.config.validate import load_request

            request = read(words, args.config_dir)
            run = load_request(request)
            if all(word.startswith("plugins=") for word in words):  # they have methods, no model
                run = None
            elif request.notes:
                console.info("\n".join(request.notes))
        console.loading("doctor")
        from sparsepretrain.bench import doctor
        from sparsepretrain.training.hardware import GPUS, known_gpu

        gpu = known_gpu(args.gpu) if args.gpu else None
        if args.gpu and gpu is None:
            hint = suggestion(args.gpu, [each.name for each in GPUS])
            raise ConfigError(f"--gpu {args.gpu!r}: no data sheet of it is known{hint}")
        doctor.examine(console, gpu)
        if run is not None:
            from sparsepretrain.bench import forecast

            forecast.forecast(run, console, gpu)
        return 0
