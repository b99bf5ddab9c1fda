"""These tests run in a process of their own: Triton cannot interpret and compile in one."""

import os
import sys

if os.environ.get("SPARSEPRETRAIN_TEST_DEVICE", "cpu") == "cpu":
    if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
        raise RuntimeError("Triton was imported before its tests: run them alone, make test-triton")
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_configure(config):
    """NumPy, which interprets the kernels, warns of 0/0 and overflow; a GPU does not."""
    config.addinivalue_line("filterwarnings", "ignore:.*encountered in:RuntimeWarning")
