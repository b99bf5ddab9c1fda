"""The verb ``doctor``: what it says of a machine, its arithmetic, and the path that measures."""

import io
from types import SimpleNamespace

import pytest
import torch

from sparsepretrain import cli, config, registry
from sparsepretrain.bench import doctor, forecast
from sparsepretrain.bench.forecast import Product, amdahl, step_of
from sparsepretrain.sparsity.execution import semi_structured
from sparsepretrain.tracking.console import Console
from sparsepretrain.training.hardware import GPU, known_gpu

NANO = ["model=gpt2_nano", "precision=bf16", "parallel.device=cpu"]
FFN = 8 * 2 * 512 * 128 * 2048  # FLOPs of one product of each of eight layers


def load(*overrides):
    return config.load([*NANO, *overrides])


def printed(function, *args):
    out = io.StringIO()
    function(*args[:1], Console(out), *args[1:]) if args else function(Console(out))
    return out.getvalue()


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    doctor.unsupported.cache_clear()
    yield
    doctor.unsupported.cache_clear()


@pytest.fixture
def an_h200(monkeypatch):
    """The CPU under the name of a GPU whose products are right, those of the reference."""
    for module in (doctor, forecast):
        monkeypatch.setattr(module, "present_gpu", lambda: torch.device("cpu"))
    for module in (doctor, forecast, semi_structured):
        monkeypatch.setattr(module, "unsupported", lambda device, **_: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    monkeypatch.setattr(doctor, "version", lambda: "0.8.1")


def test_a_machine_without_a_gpu(no_gpu):
    text = printed(doctor.examine)
    assert f"torch           {torch.__version__}" in text and "GPU             none" in text
    assert "No product runs sparse here: this machine has no CUDA device." in text


def test_products_are_those_of_the_rows():
    rows = {name: cells for name, *cells, _, _ in doctor.method_rows()}
    assert set(rows) == set(registry.names("method"))
    sparse = {name: "".join("x" if c == "sparse" else "-" for c in rows[name]) for name in rows}
    assert (sparse["srste"], sparse["sste"], sparse["tsrste"]) == ("x--", "x-x", "xxx")
    assert (sparse["sdgp"], sparse["slope"], sparse["dense"]) == ("-x-", "xx-", "---")
    act24 = next(row for row in doctor.method_rows() if row[0] == "act24")
    assert "emulated" in act24 and act24[-1] == "the 2:4 operand is an activation"


def test_a_library_with_a_regression(monkeypatch):
    assert "slower" not in dict(doctor.machine())["cuSPARSELt"]
    monkeypatch.setattr(doctor, "version", lambda: "0.8.0")
    told = dict(doctor.machine())["cuSPARSELt"]
    assert told.startswith("0.8.0, as loaded: slower on H100 and L4")


def test_devices_and_the_one_to_compare_with(monkeypatch):
    gpu = SimpleNamespace(name="NVIDIA H200", major=9, minor=0, total_memory=141 * 2**30)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: gpu)
    rows = dict(doctor.machine(known_gpu("A100")))
    assert rows["cuda:0"].startswith("NVIDIA H200, compute capability 9.0, 141 GiB; data sheet of")
    assert "312 TFLOP/s" in rows["compared with"]


def test_bounds_are_those_of_amdahl():
    """FFN of GPT-2 124M and 774M: 42.1 % and 57.0 % of the FLOPs, 2 and 3 of 3 products sparse."""
    assert [round(amdahl(0.421 * 2 / 3, s), 2) for s in forecast.SPEEDS] == [1.05, 1.09, 1.12, 1.16]
    assert [round(amdahl(0.570, s), 2) for s in forecast.SPEEDS] == [1.10, 1.19, 1.27, 1.40]
    assert amdahl(0.0, 2.0) == 1.0 and amdahl(1.0, 2.0) == 2.0


def test_roofline_of_a_product():
    gpu = GPU("x", 1.0, 1000.0, "")  # 1 TFLOP/s and 1 TB/s: a FLOP takes as long as a byte
    dense = Product("dgrad", "W", "", "", 1000, 1000, 1000, 1.0)
    assert dense.seconds(gpu, sparse=False) == pytest.approx(2e9 / 1e12)
    thin = dense._replace(n=1)  # a vector: as fast as the memory
    assert thin.seconds(gpu, sparse=False) == pytest.approx((2e6 + 4e3) / 1e12)
    weight = dense._replace(place="A", passes=1 / 4)
    packing = (2 + 9 / 8) * 1e6 / 4
    assert weight.seconds(gpu, sparse=True) == pytest.approx((1e9 + packing) / 1e12)
    sampled = dense._replace(place="U")
    assert sampled.seconds(gpu, sparse=True) == pytest.approx((1e9 + 11.125e6) / 1e12)
    # of a short sum nothing is left: auto would emulate, and sample all the same
    short = sampled._replace(n=2)
    assert short.best(gpu) == pytest.approx(short.seconds(gpu, sparse=False) + 4e6 / 1e12)
    assert short.best(gpu) < short.seconds(gpu, sparse=True)


def test_the_step_of_a_run():
    step = step_of(load("sparsity=sste", "batch.micro=16"))
    assert [(row.number, row.sizes) for row in step.layers] == [(4, (512, 128)), (4, (128, 512))]
    assert step.layers[0].name.startswith("transformer.h.0–3.mlp.c_fc")
    assert step.share * step.flops == pytest.approx(2 * FFN)
    assert step.layer_share * step.flops == pytest.approx(3 * FFN)
    halves = step_of(load("sparsity=sste", "batch.micro=8"))
    assert halves.micro_batches == 2 and halves.share == pytest.approx(step.share)
    assert halves.flops == step.flops and halves.updates == step.updates


def test_what_is_said_without_a_gpu(no_gpu):
    text = printed(forecast.forecast, load("sparsity=sste"))
    assert "no GPU to reckon with: --gpu NAME" in text
    assert "No speed-up is to be expected here: this machine has no CUDA device." in text
    assert "β·S(W) 2:4" in text and "512 × 2048 × 128" in text
    text = printed(forecast.forecast, load("sparsity=dense"), known_gpu("H100 SXM"))
    assert text.rstrip().endswith("No speed-up is to be expected: dense has no N:M operand.")
    text = printed(forecast.forecast, load("precision=fp32"), known_gpu("H100 SXM"))
    assert "No speed-up is to be expected: sparse products exist in fp16 and bf16" in text
    text = printed(forecast.forecast, load("sparsity=ste", "sparsity.n=1"), known_gpu("H100 SXM"))
    assert "No speed-up is to be expected: 1:4, not 2:4." in text


def test_what_is_said_of_a_named_gpu(no_gpu):
    wide = load("sparsity=srste", "model.n_embd=512")
    text = printed(forecast.forecast, wide, known_gpu("A100 40GB"))
    assert (
        "on A100: 312 TFLOP/s" in text
        and "At most 1." in text
        and "Measure before you rely on it" in text
    )
    text = printed(forecast.forecast, load("sparsity=sste"), known_gpu("H100 SXM"))
    assert "No speed-up is to be expected on H100: sampling and packing take longer" in text


def test_layers_are_measured_where_a_gpu_is(an_h200, monkeypatch):
    monkeypatch.setattr(forecast, "ROUNDS", 2)
    given = ["sparsity=tsrste", "batch.size=4", "batch.micro=2", "task.sequence_length=32"]
    seen = []
    works_of = forecast.works_of

    def spy(build, inputs, *args, **options):
        found = works_of(build, inputs, *args, **options)
        seen.append(((build().weight.shape, inputs), options, list(found)))
        return found

    monkeypatch.setattr(forecast, "works_of", spy)
    text = printed(forecast.forecast, load(*given))
    assert "on H200: 989.4 TFLOP/s" in text and "measured, forward and backward" in text
    assert [args for args, _, _ in seen] == [
        ((512, 128), (2, 32, 128)),
        ((128, 512), (2, 32, 512)),
    ]
    assert {(o["fresh"], o["dtype"]) for _, o, _ in seen} == {(False, torch.bfloat16)}
    assert seen[0][2] == ["dense", "emulated", "sparse"]
    assert "as fast as dense" in text.splitlines()[-1]
    # another GPU than the one that is here: its data sheet only
    seen.clear()
    text = printed(forecast.forecast, load(*given), known_gpu("A100"))
    assert "on A100: 312 TFLOP/s" in text and not seen


def test_what_measurements_mean():
    assert forecast.judge(0.5, 0.9).startswith("No speed-up is to be expected: these layers were")
    assert forecast.judge(0.5, 2.0).endswith("a whole step is at most 1.33×.")


def test_the_verb(no_gpu, capsys):
    assert cli.main(["doctor", "--gpu", "L4"]) == 0
    assert "compared with   L4: 121 TFLOP/s" in capsys.readouterr().out
    assert cli.main(["doctor", *NANO, "--gpu=RTX 4090"]) == 0
    assert "gpt2_nano, sste, bf16 on RTX 4090" in capsys.readouterr().out
    for words, told in (
        (["--gpu", "H10"], "no data sheet of it is known (did you mean 'H100'?)"),
        (["--gpu", "Voodoo"], "no data sheet of it is known (choose from B200, H200 NVL"),
        (["--model", "gpt2_77m"], "did you mean 'gpt2_774m'?"),
    ):
        assert cli.main(["doctor", *words]) == 2
        complaint = capsys.readouterr().err
        assert told in complaint and len(complaint.splitlines()) == 1
