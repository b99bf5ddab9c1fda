"""Plug-ins that a test loads and the next one must not find."""

import sys

from sparsepretrain import registry


def forget(stem: str) -> None:
    """Undo the import of ``plugins=[…/stem.py]``."""
    registry.named_plugins.clear()
    for name in [name for name in sys.modules if f"sparsepretrain_plugin_{stem}_" in name]:
        del sys.modules[name]
        for registered in registry._registered.values():
            for key in [k for k, cls in registered.items() if cls.__module__ == name]:
                del registered[key]
