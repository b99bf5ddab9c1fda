# PYTHON_ARGCOMPLETE_OK
"""The ``sparsepretrain`` command: ``main.py`` and a file per verb.

A plug-in registers a subclass of :class:`Verb` with ``@register("verb", name)``.
"""

from sparsepretrain.cli._verb import ConfiguredVerb, UsageError, Verb, read_settings
from sparsepretrain.cli.main import main

__all__ = ["ConfiguredVerb", "UsageError", "Verb", "main", "read_settings"]
