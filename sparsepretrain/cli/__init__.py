"""The ``sparsepretrain`` command: ``main.py`` and a file per verb."""

from sparsepretrain.cli.main import VERBS, _parser, main

__all__ = ["VERBS", "_parser", "main"]
