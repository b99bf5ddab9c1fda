"""Write the reST roles of docstrings, such as ``:func:`sparsify```, as links of the API pages."""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension, NameResolutionError, Object

ROLE = re.compile(r":(?:func|meth|class|attr|mod|data|exc):`(?P<name>[^`]+)`")


class Roles(Extension):
    """Replace roles once the package is read; mkdocstrings loads this class by its file."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        """Rewrite the docstring of one module, class, function or attribute."""
        if obj.docstring:
            obj.docstring.value = ROLE.sub(
                lambda role: reference(role["name"], obj), obj.docstring.value
            )


def reference(name: str, obj: Object) -> str:
    """Return a link to what ``name`` means in the docstring of ``obj``; code if it has no page."""
    shown = name.removeprefix("~").rpartition(".")[2] if name.startswith("~") else name
    name = name.removeprefix("~")
    first, dot, remainder = name.partition(".")
    try:
        path = obj.resolve(first) + dot + remainder
    except NameResolutionError:
        path = name
    shown = shown.removeprefix("sparsepretrain.")
    return f'<autoref identifier="{path}" optional><code>{shown}</code></autoref>'
