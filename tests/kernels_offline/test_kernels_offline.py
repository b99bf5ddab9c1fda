"""Every kernel compiles for every architecture and keeps to its limits; no GPU is needed."""

import dataclasses
import json

import machine_code
import measure
import pytest
import torch
from kernel_variants import all_cases

from kernel_cases import KernelCase, Limit, normal
from sparsepretrain.kernels import flip_count, nm_mask, pack_24, soft_threshold, unpack_24

COMMITTED = json.loads(measure.RECORD.read_text())
FIGURES = ("registers", "spills", "shared", "loads", "wide_loads", "pipes", "loops", "bytes")
RERUN = "run make kernels-offline"
CASES = all_cases()


def place(row):
    return row["case"], row["kernel"], row["architecture"]


KNOWN = {place(row): row for row in COMMITTED["cases"]}


@pytest.mark.parametrize(
    "case, capability",
    [pytest.param(case, cc, id=f"{case.name}-{cc}") for case in CASES for cc in case.architectures],
)
def test_compiles_within_limits(case, capability):
    rows = measure.examine(case, capability)
    assert rows
    assert [f"{row.name}: {p}" for row in rows for p in row.problems] == []
    for row in rows:
        row = row.as_dict()
        assert place(row) in KNOWN, RERUN
        known = KNOWN[place(row)]
        assert (row["refused"] is None) == (known["refused"] is None), RERUN
        if machine_code.versions() == COMMITTED["compilers"]:
            assert [row[key] for key in FIGURES] == [known[key] for key in FIGURES], RERUN


def test_every_kernel_has_a_case():
    launched = {launch.name for case in CASES for launch in measure.launches(case)}
    assert measure.entry_kernels() == launched
    assert "nm._mask_24" in launched


def test_committed_table_has_no_other_rows():
    wanted = {
        (case.name, launch.name, f"sm_{cc}")
        for case in CASES
        for launch in measure.launches(case)
        for cc in case.architectures
    }
    assert wanted == set(KNOWN), RERUN
    assert COMMITTED["within_limits"] is True


def test_fp8_is_refused_before_ada():
    refused = {row["case"] for row in COMMITTED["cases"] if row["refused"]}
    assert refused == {case.name for case in CASES if case.refused}
    assert all("e4m3" in name for name in refused)


def case_of(**changes):
    values = {
        "name": "2:4 mask",
        "make": lambda shape, device: (normal(shape, device),),
        "run": lambda backend, x: nm_mask(x, backend=backend),
        "bytes": 5,
        "limits": {"nm._mask_24": Limit(100)},
        "offline": (64, 256),
    }
    return KernelCase(**{**values, **changes})


@pytest.mark.parametrize(
    "limits, problem",
    [
        ({}, "no limit"),
        ({"nm._mask_24": Limit(0.5)}, "slots per element of issue > 0.5; "),
        ({"nm._mask_24": Limit(100, registers=8)}, "registers > 8"),
        ({"nm._mask_24": Limit(100, wide_loads=99)}, "128 bits < 99"),
    ],
)
def test_limits_are_judged(limits, problem):
    (row,) = measure.examine(case_of(limits=limits), 90)
    assert not row.ok
    assert problem in "; ".join(row.problems)


def test_a_kernel_that_should_be_refused_but_compiles():
    (row,) = measure.examine(case_of(refused=(90,)), 90)
    assert "compiles, although" in row.problems[0]


def test_spills_are_seen():
    with machine_code.recording() as launches:
        soft_threshold(torch.empty(256, 1024), 4, 16, backend="triton")
    roomy = machine_code.compile_launch(launches[0], 90)
    assert roomy.spills == roomy.stack == 0
    tight = dataclasses.replace(launches[0], keywords={**launches[0].keywords, "maxnreg": 24})
    facts = machine_code.compile_launch(tight, 90)
    assert facts.registers <= 24
    assert facts.spills > 0
    assert facts.stack > 0


def test_recording_follows_the_launcher():
    x = torch.empty(64, 257, dtype=torch.bfloat16)[:, 1:]  # two bytes off any alignment
    with machine_code.recording() as launches:
        result = nm_mask(x, backend="triton")
    (launch,) = launches
    assert result.shape == x.shape
    source, options = machine_code.source_of(launch, machine_code.GPUTarget("cuda", 90, 32))
    names = launch.kernel.arg_names
    x, out = names.index("x"), names.index("out")
    assert source.signature["x"] == ("*bf16", "constexpr", "i32", "constexpr", "constexpr")
    assert source.signature["out"][0] == "*i8"
    assert source.signature["TILE"] == "constexpr"
    assert source.constants[x, 4] == 1  # the stride
    assert source.constants[names.index("LOW"),] is False
    assert ["tt.divisibility", 16] not in source.attrs.get((x, 0), [])
    assert ["tt.divisibility", 16] in source.attrs[out, 0]
    assert options["enable_fp_fusion"] is False
    facts = machine_code.compile_launch(launch, 90)
    assert facts.wide_loads == 0  # what is not aligned cannot be loaded 128 bits at a time


def test_nothing_is_launched_or_left_behind():
    with pytest.raises(ValueError, match="needs a CUDA tensor"):
        nm_mask(torch.empty(4, 8), backend="triton")
    with machine_code.recording():
        nm_mask(torch.empty(4, 8), backend="triton")
    with pytest.raises(ValueError, match="needs a CUDA tensor"):
        nm_mask(torch.empty(4, 8), backend="triton")


def test_large_tensors_get_wide_indices():
    mask = torch.empty(2**31 + 64, dtype=torch.bool)  # untouched: takes no memory
    with machine_code.recording() as launches:
        code = pack_24(mask, backend="triton")
        unpack_24(code, mask.shape, backend="triton")
        flip_count(mask, mask, backend="triton")
        pack_24(mask[:1024], backend="triton")
    wide = [launch.keywords["WIDE"] for launch in launches]
    # flags are packed in words of eight bytes, flips counted in words of four
    assert wide == [False, True, False, False]


LISTING = """
.text.kernel:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/              @!P0 LDG.E.128 R4, desc[UR4][R2.64] ;
        /*0020*/              @!PT LDS RZ, [RZ] ;
.L_x_0:
        /*0030*/                   FADD R1, R2, R3 ;
        /*0034*/                   IADD3 R5, P1, R5, 0x2, RZ ;
        /*0038*/                   ISETP.NE.U32.AND P0, PT, R5.reuse, 0x20, PT ;
        /*0040*/               @P0 BRA `(.L_x_0) ;
        /*0050*/              @UP0 UMOV UR4, 0x1 ;
        /*0060*/               @P1 BRA `(.L_x_2) ;
        /*0070*/                   NOP ;
.L_x_2:
        /*0080*/                   EXIT ;
.L_x_1:
        /*0090*/                   BRA `(.L_x_1);
        /*00a0*/                   NOP;
"""


def facts_of(listing):
    opcodes, times, loops = machine_code.read_listing(listing)
    of_launch = {"registers": 1, "stack": 0, "shared": 0, "threads": 128}
    return machine_code.Facts(**of_launch, opcodes=opcodes, times=times, loops=loops)


def test_reading_a_listing():
    facts = facts_of(LISTING)
    loop = ["FADD", "IADD3", "ISETP.NE.U32.AND", "BRA"]
    assert facts.opcodes == ["LDC", "LDG.E.128", "LDS", *loop, "UMOV", "BRA", "EXIT"]
    assert facts.loops == [16]  # to 0x20 by 2
    assert facts.times == [1, 1, 1, 16, 16, 16, 16, 1, 1, 1]
    assert facts.executed == {"issue": 6 + 16 * 4, "alu": 32, "fma": 16, "imad": 0, "xu": 0}
    assert (facts.loads, facts.wide_loads, facts.spills) == (1, 1, 0)
    spilled = facts_of(LISTING.replace("LDS RZ, [RZ]", "STL.64 [R1], R2"))
    assert spilled.spills == 1
    assert facts_of(LISTING.replace("R5.reuse, 0x20", "R5, R6")).loops == [0]


def test_an_unknown_loop_is_a_problem(monkeypatch):
    monkeypatch.setattr(machine_code, "_rounds", lambda body: 0)
    case = case_of(run=lambda backend, x: nm_mask(x, 16, 32, backend=backend))
    (row,) = measure.examine(case, 90)
    assert "has a loop whose rounds are not known" in row.problems


def test_integers_multiply_in_half_of_the_lanes():
    code = """
        /*0000*/                   FFMA R1, R2, R3, R4 ;
        /*0010*/                   IMAD.WIDE.U32 R4, R5, R6, RZ ;
        /*0020*/                   MUFU.RCP R1, R1 ;
        /*0030*/                   FSETP.GT.AND P0, PT, R1, R2, PT ;
"""
    assert facts_of(code).executed == {"issue": 4, "alu": 1, "fma": 2, "imad": 1, "xu": 1}


def test_the_count_is_per_element():
    (small,) = measure.examine(case_of(offline=(64, 2048)), 90)
    (large,) = measure.examine(case_of(offline=(640, 2048)), 90)
    assert small.pipes == large.pipes and small.slots == large.slots > 0


def test_measuring_shows_how_far_it_is(capsys, monkeypatch):
    monkeypatch.setattr(measure, "all_cases", lambda: CASES[:1])
    record = measure.measure()
    assert len(record["cases"]) == 3 and record["within_limits"]
    out, err = capsys.readouterr()
    lines = err.splitlines()
    assert not out and len(lines) == 3
    assert lines[0].startswith("1 of 3: ") and lines[-1].startswith("3 of 3: ")
