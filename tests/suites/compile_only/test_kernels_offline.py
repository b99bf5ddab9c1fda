"""Every kernel compiles for every architecture without spills; no GPU is needed."""

import pytest
import torch
from triton.errors import TritonError

from sparsepretrain.kernels import flip_count, pack_24, soft_threshold, unpack_24
from support import machine_code
from support.kernel_variants import all_cases

CASES = all_cases()


def launches(case):
    """Return the different kernels that a case launches."""
    machine_code.entry_kernels()  # defines every kernel before launches are recorded
    inputs = case.make(case.offline, torch.device("cpu"))
    with machine_code.recording() as recorded:
        case.run("triton", *inputs)
    return {launch.name: launch for launch in reversed(recorded)}


@pytest.mark.parametrize(
    "case, capability",
    [pytest.param(case, cc, id=f"{case.name}-{cc}") for case in CASES for cc in case.architectures],
)
def test_compiles_without_spills(case, capability):
    found = launches(case)
    assert found
    if capability in case.refused:
        with pytest.raises(TritonError):  # of one of its kernels
            for launch in found.values():
                machine_code.compile_launch(launch, capability)
        return
    usage = {name: machine_code.compile_launch(each, capability) for name, each in found.items()}
    assert {name: used for name, used in usage.items() if used.spilled} == {}


def test_every_kernel_has_a_case():
    launched = {name for case in CASES for name in launches(case)}
    assert machine_code.entry_kernels() == launched
    assert "nm._mask_24_kernel" in launched


def test_spills_are_seen():
    with machine_code.recording() as recorded:
        soft_threshold(torch.empty(256, 1024), 4, 16, backend="triton")
    assert machine_code.compile_launch(recorded[0], 90).spilled == 0
    tight = recorded[0]._replace(keywords={**recorded[0].keywords, "maxnreg": 24})
    usage = machine_code.compile_launch(tight, 90)
    assert usage.registers <= 24 and usage.spilled > 0


def test_large_tensors_get_wide_indices():
    mask = torch.empty(2**31 + 64, dtype=torch.bool)  # untouched: takes no memory
    with machine_code.recording() as recorded:
        code = pack_24(mask, backend="triton")
        unpack_24(code, mask.shape, backend="triton")
        flip_count(mask, mask, backend="triton")
        pack_24(mask[:1024], backend="triton")
    wide = [launch.keywords["INT64_OFFSETS"] for launch in recorded]
    # flags are packed in words of eight bytes, flips counted in words of four
    assert wide == [False, True, False, False]
