# ruff: noqa: F403, F405 (what type checkers find here)
"""The shared operations of all methods: tensors in, tensors out, no modules, no state.

Most take ``backend=None | "reference" | "cpu" | "triton"``; see :func:`dispatch.choose_backend`.
The public functions of this folder's files are found here by name. Importing this package does not
import torch; the first use of a function does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # what type checkers know; at run time nothing needs to be listed
    from sparsepretrain.kernels.bimask24 import *
    from sparsepretrain.kernels.common import *
    from sparsepretrain.kernels.fp8 import *
    from sparsepretrain.kernels.glu import *
    from sparsepretrain.kernels.groups4 import *
    from sparsepretrain.kernels.hardware import *
    from sparsepretrain.kernels.keys import *
    from sparsepretrain.kernels.masks import *
    from sparsepretrain.kernels.mvue24 import *
    from sparsepretrain.kernels.nm import *
    from sparsepretrain.kernels.noise import *
    from sparsepretrain.kernels.packed24 import *
    from sparsepretrain.kernels.sdgp import *
    from sparsepretrain.kernels.soft import *
    from sparsepretrain.kernels.transposable import *


def __getattr__(name: str) -> Any:
    if not name.startswith("_"):
        from sparsepretrain.kernels.common import functions_of

        functions = functions_of(__name__, __path__)
        if name in functions:
            globals()[name] = functions[name]
            return functions[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
