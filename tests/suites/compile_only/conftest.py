"""These tests run in a process of their own: Triton cannot compile what it interprets."""

import os

if os.environ.get("TRITON_INTERPRET") == "1":
    raise RuntimeError(
        "kernels are interpreted here; run these tests alone, make test-kernels-offline"
    )
