"""Hugging Face, Lightning, timm and peft with sparse models: resumed, averaged, wrapped."""

import logging
import warnings

import pytest
import torch
from torch import nn

import sparsepretrain as sp
from sparsepretrain.errors import ConfigError, SparsePretrainWarning
from sparsepretrain.kernels import nm_mask

STEPS = 6
WINDOW = {"start": 0.34}
"""Sparse from step 2 of 6."""


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    """No network; our warnings are errors."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.simplefilter("error", SparsePretrainWarning)
        yield


class Net(nn.Module):
    """Takes what Hugging Face's Trainer passes, and returns what it reads."""

    def __init__(self, seed=0):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.fc1 = nn.Linear(16, 32)
            self.fc2 = nn.Linear(32, 16)
            self.head = nn.Linear(16, 4)

    def forward(self, x, labels=None):
        y = self.head(self.fc2(torch.relu(self.fc1(x))))
        return y if labels is None else {"loss": (y * labels).sum(), "logits": y}


def sparse_net(method="sste", **options):
    model = Net()
    options = {"targets": "fc*", "total_steps": STEPS, "window": WINDOW} | options
    return model, sp.sparsify(model, method, **options)


def rows(count=24):
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randn(count, size, generator=generator) for size in (16, 4))
    return [{"x": a, "labels": b} for a, b in zip(x, y, strict=True)]


def batches(size=4):
    data = rows()
    stacked = {k: torch.stack([r[k] for r in data]) for k in data[0]}
    return [{k: v[i : i + size] for k, v in stacked.items()} for i in range(0, len(data), size)]


def assert_same(left, right):
    assert list(left) == list(right)
    different = [k for k in left if not torch.equal(left[k], right[k])]
    assert not different


METHODS = [
    ("sste", {}),
    ("tsrste", {"refresh": 2, "dense_tail": 0.34, "window": {}}),
    ("sdgf", {"until": 0.67, "window": {}}),
]


@pytest.mark.parametrize(("method", "options"), METHODS[1:2])
def test_hugging_face_trainer_resumes_bit_exactly(tmp_path, method, options):
    """No handle is saved: the counters are in the model's checkpoint."""
    transformers = pytest.importorskip("transformers")

    def run(resume):
        model, handle = sparse_net(method, **options)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        handle.attach(optimizer)
        phases = []
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path), max_steps=STEPS, per_device_train_batch_size=2,
            gradient_accumulation_steps=2, save_steps=3, report_to="none", use_cpu=True,
            disable_tqdm=True, logging_strategy="no", eval_strategy="steps", eval_steps=1,
        )  # fmt: skip

        class Watch(transformers.TrainerCallback):
            def on_step_begin(self, *args, **rest):
                phases.append((handle.completed_steps, handle.sparse, handle.method.pattern))

        trainer = transformers.Trainer(
            model=model, args=arguments, train_dataset=rows(), eval_dataset=rows(2),
            optimizers=(optimizer, None), callbacks=[Watch],
        )  # fmt: skip
        trainer.train(resume_from_checkpoint=resume)
        return model.state_dict(), phases

    whole, phases = run(None)
    again, rest = run(str(tmp_path / "checkpoint-3"))
    assert [step for step, *_ in phases] == list(range(STEPS)) and rest == phases[3:]
    assert len({p[1:] for p in phases}) > 1
    assert_same(again, whole)


def test_accelerate_resumes_bit_exactly(tmp_path):
    accelerate = pytest.importorskip("accelerate")

    def run(first, last, load=None, save=None):
        model, handle = sparse_net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
        model, optimizer = accelerator.prepare(model, optimizer)
        handle.attach(optimizer)
        if load is not None:
            accelerator.load_state(load)
        assert handle.completed_steps == first
        for step in range(first, last):
            for half in range(2):
                with accelerator.accumulate(model):
                    batch = batches(2)[2 * step + half]
                    accelerator.backward(model(**batch)["loss"])
                    optimizer.step()
                    optimizer.zero_grad()
        if save is not None:
            accelerator.save_state(save)
        assert handle.completed_steps == last and handle.sparse == (last >= 2)
        return accelerator.unwrap_model(model).state_dict()

    whole = run(0, STEPS)
    run(0, 3, save=str(tmp_path / "state"))
    assert_same(run(3, STEPS, load=str(tmp_path / "state")), whole)


def lightning_module(method="sste", accumulate=1, **options):
    lightning = pytest.importorskip("pytorch_lightning")

    class Module(lightning.LightningModule):
        """Its own forward is never called, and the optimizer is made by a hook."""

        def __init__(self):
            super().__init__()
            self.net = Net()
            options_ = {"targets": "*fc*", "total_steps": STEPS, "window": WINDOW} | options
            self.handle = sp.sparsify(self, method, **options_)

        def training_step(self, batch, index):
            return accumulate * self.net(**batch)["loss"]  # a sum; Lightning takes means

        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=1e-2)
            self.handle.attach(optimizer)
            return optimizer

    return Module()


def fit(module, directory, steps=STEPS, accumulate=1, checkpoint=None, save=None):
    import pytorch_lightning as lightning

    trainer = lightning.Trainer(
        accelerator="cpu", max_steps=steps, accumulate_grad_batches=accumulate, logger=False,
        enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
        default_root_dir=directory,
    )  # fmt: skip
    # one step per epoch: where Lightning goes on within one is not our matter
    loader = torch.utils.data.DataLoader(rows(8), batch_size=8 // accumulate)
    trainer.fit(module, loader, ckpt_path=checkpoint)
    if save is not None:
        trainer.save_checkpoint(save)
    return module


@pytest.mark.parametrize(("method", "options"), METHODS)
def test_lightning_resumes_bit_exactly(tmp_path, method, options):
    whole = fit(lightning_module(method, **options), tmp_path)
    fit(lightning_module(method, **options), tmp_path, 3, save=tmp_path / "half.ckpt")
    again = lightning_module(method, **options)
    fit(again, tmp_path, checkpoint=tmp_path / "half.ckpt")
    assert again.handle.completed_steps == STEPS
    assert_same(again.state_dict(), whole.state_dict())


def test_lightning_accumulates(tmp_path):
    """Closures contain the micro-batches; J runs once, after the last one."""
    options = {"decay": 0.1, "refresh": 2, "dense_tail": 0.0, "window": {}}
    results = [
        fit(lightning_module("tsrste", accumulate, **options), tmp_path, 4, accumulate)
        for accumulate in (1, 2)
    ]
    assert [m.handle.completed_steps for m in results] == [4, 4]
    one, two = (m.net.fc1.weight for m in results)
    torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-5)


AVERAGED = [
    ("ste", {"window": {"stop": 0.5}}, lambda w: w),
    ("sdgf", {"until": 0.5, "window": {}}, lambda w: w * nm_mask(w)),
]


def trained_with(average_of, method, options):
    """The average of a run of six steps, and that of its parameters alone."""
    model, handle = sparse_net(method, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    handle.attach(optimizer)
    average = average_of(model, decay=0.5)
    expected = {k: p.detach().clone() for k, p in model.named_parameters()}
    for batch in batches():
        model(**batch)["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
        average.update(model)
        for key, parameter in model.named_parameters():
            expected[key].lerp_(parameter.detach(), 0.5)
    return average.module.eval(), expected


@pytest.mark.parametrize(("method", "options", "project"), AVERAGED)
def test_the_average_of_timm_follows_the_phases(method, options, project):
    timm = pytest.importorskip("timm.utils")
    average, expected = trained_with(timm.ModelEmaV3, method, options)
    reference, x = Net(), batches()[0]["x"]
    reference.load_state_dict(expected)
    with torch.no_grad():
        for layer in (reference.fc1, reference.fc2):
            layer.weight.copy_(project(layer.weight))
    torch.testing.assert_close(average(x), reference(x))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "(ste|tsrste) evaluates dense weights")
        torch.testing.assert_close(sp.densify(average)(x), reference(x))


def test_timm_ema_v2_is_refused():
    """It blends integers."""
    timm = pytest.importorskip("timm.utils")
    with pytest.raises(ConfigError, match=r"were averaged: .* timm's ModelEmaV3"):
        trained_with(timm.ModelEmaV2, "sste", {})  # at the second update, which reads both


@pytest.mark.parametrize("kind", [nn.Linear, "Conv1D"])
def test_peft_merges_into_sparse_layers(kind):
    """Adapters are merged into the stored weight, and forwards see its projection at once."""
    peft = pytest.importorskip("peft")
    model, handle = sparse_net("ste", window={})
    if kind == "Conv1D":
        from transformers.pytorch_utils import Conv1D

        model = Net()
        for name in ("fc1", "fc2"):
            old = getattr(model, name)
            new = Conv1D(old.out_features, old.in_features)
            new.weight.data.copy_(old.weight.data.t())
            new.bias.data.copy_(old.bias.data)
            setattr(model, name, new)
        handle = sp.sparsify(model, "ste", targets="fc*")
    x = batches()[0]["x"]
    names = ["fc1", "fc2"]
    options = {"init_lora_weights": False, "fan_in_fan_out": kind != nn.Linear}
    config = peft.LoraConfig(r=2, target_modules=names, **options)
    before = {k: layer.weight.detach().clone() for k, layer in handle.layers.items()}
    plain = model.eval()(x).detach()
    wrapped = peft.get_peft_model(model, config).eval()
    assert wrapped(x).shape == plain.shape and not torch.allclose(wrapped(x), plain)
    wrapped.merge_adapter()
    merged = wrapped(x)
    layer = handle.layers["fc1"]
    delta = wrapped.base_model.model.fc1.get_delta_weight("default")
    torch.testing.assert_close(layer.weight, before["fc1"] + delta)
    reference = Net()
    reference.head.load_state_dict(model.head.state_dict())
    with torch.no_grad():
        for name, own in handle.layers.items():
            weight = own.weight * nm_mask(own.weight, dim=own.in_dim)
            target = getattr(reference, name)
            target.weight.copy_(weight if own.in_dim else weight.t())
            target.bias.copy_(own.bias)
        torch.testing.assert_close(merged, reference(x))
    wrapped.unmerge_adapter()
    with wrapped.disable_adapter():
        torch.testing.assert_close(wrapped(x), plain)
    sp.densify(wrapped)


def test_unchanged_frozen_weights_do_not_warn():
    model, _ = sparse_net("sste", window={})
    x = batches()[0]["x"]
    model.requires_grad_(False)
    for _ in range(2):
        model.eval()(x)
    state = sparse_net("sste", window={})[0].state_dict()
    model.load_state_dict({k: 2 * v if "weight" in k else v for k, v in state.items()})
    model(x)  # loaded on purpose
