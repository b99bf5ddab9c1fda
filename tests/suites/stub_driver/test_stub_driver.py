"""Every kernel case through Triton's compiler, binder and launcher; the driver runs nothing."""

import math

import pytest
import torch

from support.kernel_variants import all_cases
from support.stub_driver import CAPABILITY, StubDriver, compiler

CASES = [case for case in all_cases() if CAPABILITY not in case.refused]
RAGGED = (72, 96)
"""Divides no tile; constants, and with them the machine code, are those of small tensors."""


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    if compiler() is None:
        pytest.skip("needs a C compiler (cc), as Triton does")
    if torch.cuda.is_available():
        pytest.skip("a GPU is here, whose driver cannot be replaced: see tests/suites/gpu")
    stub = StubDriver(tmp_path_factory.mktemp("driver"))
    with stub.active():
        yield stub


def launched(case, shape, driver):
    begin = len(driver.launches())
    case.run("triton", *case.make(shape, torch.device("cpu")))
    launches = driver.launches(begin)
    assert launches
    for launch in launches:
        assert math.prod(launch.grid) >= 1 and launch.threads in (32, 64, 128, 256, 512)
    return launches


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_every_case_is_launched_on_odd_sizes(case, driver):
    launched(case, RAGGED, driver)
