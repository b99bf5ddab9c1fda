"""Fixed first masks: ``init.mask`` as a file of ``prune``, a rule, and what is refused."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from sparsepretrain.cli import main
from sparsepretrain.kernels import unpack_rows
from sparsepretrain.pruning.mask_files import read_masks, write_masks
from sparsepretrain.runs.checkpoint import newest_valid
from support.finetune_cases import QUICK
from support.prune_cases import checkpoint, text

FAMILIES = ("llama", "gpt2")


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SPARSEPRETRAIN_CACHE_DIR", str(tmp_path / "cache"))


def prune(source, out, root, *words, method="wanda"):
    typed = ["--method", method, "--out", str(out), "--sequences", "16"]
    assert main(["prune", str(source), *typed, *text(root, 8), *words]) == 0
    return out


def finetune(source, root, *words):
    common = ["task=causal_lm", *text(root, 8), f"runs_dir='{root}/runs'", *QUICK]
    method = ["sparsity=asp", "sparsity.at=0", "sparsity.targets=all", "steps=4", "epochs=null"]
    return main(["finetune", str(source), *common, *method, "eval.batches=1", *words])


def trained(root):
    """Checkpointed tensors of the only run."""
    (directory,) = (root / "runs").glob("*/*-s0")
    return newest_valid(directory / "checkpoints", print).part("model"), directory


def weights_of(state, name):
    """A weight as (out_features, in_features)."""
    weight = state[f"{name}.weight"]
    return weight.t() if ".c_" in name else weight


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("method", ["asp", pytest.param("slope", marks=pytest.mark.slow)])
def test_masks_of_a_file_are_those_that_train(tmp_path, family, method):
    """The masks are not those of the largest magnitudes: they come from another checkpoint."""
    source = checkpoint(tmp_path / "hf", family)
    out = prune(source, tmp_path / "out", tmp_path)
    keys = ["sparsity=slope"] if method == "slope" else []
    keys += ["sparsity.targets=all"]
    common = ["task=causal_lm", *text(tmp_path, 8), f"runs_dir='{tmp_path}/runs'", *QUICK]
    if method == "asp":
        keys += ["sparsity=asp", "sparsity.at=0"]
    words = [*keys, "steps=4", "epochs=null", "eval.batches=1", f"init.mask={out}"]
    assert main(["finetune", str(source), *common, *words]) == 0
    _, directory = trained(tmp_path)
    exported = tmp_path / "export"
    assert main(["export", str(directory), "--out", str(exported)]) == 0
    state = load_file(exported / "model.safetensors")
    before = load_file(source / "model.safetensors")
    for name, mask in read_masks(out):
        assert torch.equal(weights_of(state, name) != 0, mask), name
        assert not torch.equal(weights_of(state, name)[mask], weights_of(before, name)[mask])


@pytest.mark.parametrize("family", FAMILIES)
def test_wanda_in_a_run_gives_the_masks_of_the_verb(tmp_path, family):
    """With as many sequences, data and seed; the weights stay dense masters."""
    source = checkpoint(tmp_path / "hf", family)
    out = prune(source, tmp_path / "out", tmp_path, "--sequences", "128")
    assert finetune(source, tmp_path, "init.mask=wanda", "optim.lr=1e-30") == 0
    state, _ = trained(tmp_path)
    original = load_file(source / "model.safetensors")
    for name, mask in read_masks(out):
        weight = state[f"{name}.weight"]
        kept = unpack_rows(state[f"{name}.sparsity.mask"], weight.shape)
        assert torch.equal(kept.t() if ".c_" in name else kept, mask)
        assert torch.equal(weight, original[f"{name}.weight"])


@pytest.mark.slow
def test_sparse_weights_and_their_masks_continue_with_zeros_too(tmp_path):
    """A pruned checkpoint: the file and ``zeros`` say the same."""
    source = checkpoint(tmp_path / "hf")
    out = prune(source, tmp_path / "out", tmp_path, method="sparsegpt")
    masks = {}
    for rule in ("zeros", str(out), f"{out}/masks.safetensors"):
        assert finetune(out, tmp_path, f"init.mask={rule}") == 0
        state, _ = trained(tmp_path)
        masks[rule] = {k: v for k, v in state.items() if k.endswith("sparsity.mask")}
        shutil.rmtree(tmp_path / "runs")
    first, *others = masks.values()
    assert first and all(torch.equal(first[k], other[k]) for other in others for k in first)


def test_runs_know_their_masks_by_content(tmp_path, capsys):
    source = checkpoint(tmp_path / "hf")
    out = prune(source, tmp_path / "out", tmp_path)
    assert finetune(source, tmp_path, f"init.mask={out}") == 0
    assert finetune(source, tmp_path, f"init.mask={out}") == 0  # finished
    masks = {name: mask.roll(1, 1) for name, mask in read_masks(out)}
    write_masks(out / "masks.safetensors", masks.items(), (2, 4))
    assert finetune(source, tmp_path, f"init.mask={out}") == 4
    assert "masks.safetensors has changed since" in capsys.readouterr().err
    shutil.rmtree(out)
    assert finetune(source, tmp_path, f"init.mask={out}") == 0


def test_a_run_goes_on_without_its_masks(tmp_path, stop_after):
    """They are in the checkpoint."""
    source = checkpoint(tmp_path / "hf")
    out = prune(source, tmp_path / "out", tmp_path)
    words = [f"init.mask={out}", "checkpoint.every=2", "checkpoint.keep_last=9"]
    stop_after(2)
    assert finetune(source, tmp_path, *words) == 143
    stop_after(-1)
    shutil.move(out, tmp_path / "aside")
    assert finetune(source, tmp_path, *words) == 0
    state, _ = trained(tmp_path)
    for name, mask in read_masks(tmp_path / "aside"):
        kept = unpack_rows(state[f"{name}.sparsity.mask"], state[f"{name}.weight"].shape)
        assert torch.equal(kept, mask)


def another_model(out, root):
    other = checkpoint(root / "other", "gpt2")
    return prune(other, root / "other_out", root)


def another_width(out, root):
    masks = {name: mask[:, :16] for name, mask in read_masks(out)}
    write_masks(out / "masks.safetensors", masks.items(), (2, 4))
    return out


def too_dense(out, root):
    masks = {name: torch.ones_like(mask) for name, mask in read_masks(out)}
    write_masks(out / "masks.safetensors", masks.items(), (2, 4))
    return out


def weights_instead(out, root):
    return out / "model.safetensors"


def cut(out, root):
    file = out / "masks.safetensors"
    file.write_bytes(file.read_bytes()[:-20])
    return out


def floats(out, root):
    file = out / "masks.safetensors"
    shapes = {name: list(mask.shape) for name, mask in read_masks(out)}
    state = {name: torch.ones(shape) for name, shape in shapes.items()}
    save_file(state, file, {"masks": json.dumps({"pattern": "2:4", "shapes": shapes})})
    return out


def missing(out, root):
    return out / "nothing"


def typed_wrong(out, root):
    return "zeroes"


REFUSED = {
    another_model: (4, "another model"),
    another_width: (4, "another model"),
    too_dense: (2, "more than 2 of 4"),
    weights_instead: (4, "has no masks"),
    cut: (4, "damaged"),
    floats: (4, "damaged"),
    missing: (2, "there is no such file"),
    typed_wrong: (2, "'zeros'"),
}


@pytest.fixture(scope="module")
def pruned_llama(tmp_path_factory):
    """A directory with a checkpoint, ``hf``, and its pruned copy, ``out``."""
    root = tmp_path_factory.mktemp("pruned")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPARSEPRETRAIN_CACHE_DIR", str(root / "cache"))
        prune(checkpoint(root / "hf"), root / "out", root)
    return root


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: case.__name__)
def test_masks_that_do_not_fit_are_one_line_before_a_run_exists(
    tmp_path, capsys, case, pruned_llama
):
    source = shutil.copytree(pruned_llama / "hf", tmp_path / "hf")
    out = shutil.copytree(pruned_llama / "out", tmp_path / "out")
    mask = case(out, tmp_path)
    code, words = REFUSED[case]
    capsys.readouterr()
    assert finetune(source, tmp_path, f"init.mask={mask}") == code
    lines = capsys.readouterr().err.splitlines()
    assert "init.mask" in lines[-1] or "masks" in lines[-1]
    assert words in lines[-1]
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("rule", ["wanda", "zeros"])
def test_rules_need_trained_weights_and_a_method_with_fixed_masks(tiny, tmp_path, capsys, rule):
    assert main(["train", *tiny.overrides(f"init.mask={rule}", "sparsity=slope")]) == 2
    assert "init.mask must be" in capsys.readouterr().err
    source = checkpoint(tmp_path / "hf")
    assert finetune(source, tmp_path, "sparsity=slope", "~sparsity.at", f"init.mask={rule}") == 2
    common = ["task=causal_lm", *text(tmp_path, 8), f"runs_dir='{tmp_path}/runs'", *QUICK]
    words = ["sparsity=srste", "steps=4", "epochs=null", f"init.mask={rule}"]
    assert main(["finetune", str(source), *common, *words]) == 2
    assert "no mask that is fixed" in capsys.readouterr().err.splitlines()[-1]


def test_a_file_starts_random_weights_too(tiny, tmp_path):
    """Lottery tickets: the masks of one training, the initial weights of another seed."""
    run = tiny.train("sparsity=dense").directory
    out = tmp_path / "out"
    words = ["--method", "magnitude", "--layers", "ffn", "--out", str(out)]
    assert main(["prune", str(run), *words]) == 0
    done = tiny.train("sparsity=slope", "seed=1", f"init.mask={out}")
    state = newest_valid(done.directory / "checkpoints", print).part("model")
    for name, mask in read_masks(out):
        code = state[f"{name}.sparsity.mask"]
        assert torch.equal(unpack_rows(code, state[f"{name}.weight"].shape), mask)
