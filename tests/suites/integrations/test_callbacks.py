"""Our callbacks in the Trainers of transformers and Lightning: report, save, start again."""

import csv
import functools
import json
import logging
import warnings
from pathlib import Path

import peft
import pytest
import pytorch_lightning
import torch
import transformers
from transformers.trainer_callback import PrinterCallback

import sparsepretrain as sp
from sparsepretrain.errors import ConfigError, SparsePretrainWarning
from sparsepretrain.integrations import lightning as in_lightning
from sparsepretrain.integrations.transformers import SparsityCallback
from sparsepretrain.kernels import nm_mask
from support.families import small_model

STEPS = 4
FFN = ["*.mlp.*"]


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    """No network; our warnings are errors."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.simplefilter("error", SparsePretrainWarning)
        yield


def gpt2():
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=50, n_positions=16, n_embd=16, n_layer=2, n_head=2, use_cache=False,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def tokens(rows=32):
    drawn = torch.randint(50, (rows, 16), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": row, "labels": row} for row in drawn]


class Report(PrinterCallback):
    """Sees what W&B and TensorBoard see."""

    def __init__(self):
        self.lines = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.lines.append(dict(logs))


def hugging_face(directory, model, *, steps=STEPS, callback=None, **more):
    settings = {"max_steps": steps, "per_device_train_batch_size": 2, "report_to": "none"}
    settings |= {"use_cpu": True, "disable_tqdm": True, "logging_steps": 1, "save_steps": 2}
    report = Report()
    trainer = transformers.Trainer(
        model=model,
        args=transformers.TrainingArguments(str(directory), **settings | more),
        train_dataset=tokens(),
        eval_dataset=tokens(2),
        callbacks=[report],
    )
    (callback or SparsityCallback()).add_to(trainer)
    return trainer, report


def is_sparse(model):
    weights = [w for key, w in model.named_parameters() if "mlp" in key and key.endswith("weight")]
    return all(torch.equal(w * nm_mask(w, dim=0), w) for w in weights)


@pytest.mark.parametrize("method", ["sste", "srste", "tsrste"])
def test_trainers_train_report_and_save(tmp_path, method):
    model = gpt2()
    options = {"dense_tail": 0.0, "refresh": 2} if method == "tsrste" else {}
    handle = sp.sparsify(model, method, targets=FFN, total_steps=STEPS, **options)
    trainer, report = hugging_face(tmp_path, model, eval_strategy="steps", eval_steps=2)
    trainer.train()
    assert handle.completed_steps == STEPS
    training = [line for line in report.lines if "loss" in line]
    assert len(training) == STEPS and all("sparsity/density" in line for line in training)
    assert not any("sparsity/density" in line for line in report.lines if "eval_loss" in line)
    history = [line for line in trainer.state.log_history if "loss" in line]
    assert history[-1]["sparsity/flip_rate"] == handle.metrics()["flip_rate"]
    saved = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / f"checkpoint-{STEPS}/sparse")
    assert is_sparse(saved) and not is_sparse(model)
    about = json.loads((tmp_path / f"checkpoint-{STEPS}/sparse/sparsity.json").read_text())
    assert about["step"] == STEPS and about["pattern"] == "2:4"
    x = torch.arange(8)[None]
    torch.testing.assert_close(saved.eval()(x).logits, model.eval()(x).logits)


def test_trainers_resume_bit_exactly_and_train_again(tmp_path):
    def start(directory, **more):
        model = gpt2()
        handle = sp.sparsify(model, "srste", targets=FFN, decay=0.1)
        return model, handle, hugging_face(directory, model, **more)[0]

    whole, handle, trainer = start(tmp_path / "a")
    trainer.train()
    again, _, second = start(tmp_path / "b")
    second.train(resume_from_checkpoint=str(tmp_path / "a/checkpoint-2"))
    for (key, one), two in zip(
        whole.state_dict().items(), again.state_dict().values(), strict=True
    ):
        assert torch.equal(one, two), key
    trainer.train()  # the same optimizer
    assert handle.completed_steps == 2 * STEPS
    hugging_face(tmp_path / "c", whole)[0].train()  # another one
    assert handle.completed_steps == 3 * STEPS


@pytest.mark.parametrize(("family", "method"), [("mixtral", "sste"), ("qwen3_moe", "srste")])
def test_experts_resume_bit_exactly_and_are_saved_sparse(tmp_path, family, method):
    def start(directory):
        torch.manual_seed(0)
        model = small_model(family, "cpu")
        handle = sp.sparsify(model, method, targets=["*.experts"])
        return model, handle, *hugging_face(directory, model)

    whole, handle, trainer, report = start(tmp_path / "a")
    trainer.train()
    logged = [line for line in report.lines if "loss" in line]
    assert logged[-1]["sparsity/flip_rate"] == handle.metrics()["flip_rate"] > 0
    with pytest.raises(ConfigError, match=r"does not exist: .* resume from output_dir"):
        start(tmp_path / "b")[2].train(resume_from_checkpoint=str(tmp_path / "a/checkpoint-2"))
    again, _, second, _ = start(tmp_path / "a")
    second.train(resume_from_checkpoint=str(tmp_path / "a/checkpoint-2"))
    for (key, one), two in zip(
        whole.state_dict().items(), again.state_dict().values(), strict=True
    ):
        assert torch.equal(one, two), key
    saved = type(whole).from_pretrained(tmp_path / f"a/checkpoint-{STEPS}/sparse")
    x = torch.arange(8)[None]
    torch.testing.assert_close(saved.eval()(x).logits, whole.eval()(x).logits)
    experts = [w for name, w in saved.named_parameters() if ".experts." in name]
    assert experts and all(torch.equal(w * nm_mask(w), w) for w in experts)


@pytest.mark.parametrize("greater_is_better", [True, False])
def test_the_best_model_has_its_experts_and_scales(tmp_path, greater_is_better):
    """Of two checkpoints; one of the two cases chooses the first."""
    torch.manual_seed(0)
    model = small_model("mixtral", "cpu")
    sp.sparsify(model, "sste", targets=["*.experts"])
    settings = {"eval_strategy": "steps", "eval_steps": 2, "learning_rate": 1e-2}
    settings |= {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss"}
    settings |= {"greater_is_better": greater_is_better}
    trainer, _ = hugging_face(tmp_path, model, **settings)
    trainer.train()
    best = trainer.state.best_model_checkpoint
    saved = type(model).from_pretrained(Path(best, "sparse"))
    x = torch.arange(8)[None]
    torch.testing.assert_close(saved.eval()(x).logits, model.eval()(x).logits)


@pytest.mark.parametrize("method", ["asp", pytest.param("slope", marks=pytest.mark.slow)])
def test_trainers_of_adapters_resume_bit_exactly(tmp_path, method):
    """A Trainer saves the adapters alone: counters and masks lie beside them."""

    def start(directory, save=False):
        model = gpt2()
        options = {"at": 0.6} if method == "asp" else {"mask": "random"}
        sp.sparsify(model, method, targets=FFN, total_steps=STEPS, **options)
        lora = peft.LoraConfig(r=4, target_modules=["c_fc"], fan_in_fan_out=True)
        model = peft.get_peft_model(model, lora)
        callback = SparsityCallback(save=save)
        return model, hugging_face(directory, model, callback=callback)[0]

    whole, trainer = start(tmp_path / "a")
    trainer.train()
    again, second = start(tmp_path / "a")
    second.train(resume_from_checkpoint=str(tmp_path / "a/checkpoint-2"))
    assert sp.sparsifier_of(again).completed_steps == STEPS and sp.sparsifier_of(again).sparse
    for (key, one), two in zip(
        whole.state_dict().items(), again.state_dict().values(), strict=True
    ):
        assert torch.equal(one, two), key
    merged = sp.densify(again.merge_and_unload())
    assert is_sparse(merged)
    (tmp_path / "a/checkpoint-2/sparsity.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"does not exist: .* checkpoint of this model lacks"):
        start(tmp_path / "a")[1].train(resume_from_checkpoint=str(tmp_path / "a/checkpoint-2"))
    with pytest.raises(ConfigError, match=r"use SparsityCallback\(save=False\)"):
        start(tmp_path / "b", save=True)[1].train()
    assert not list(tmp_path.glob("b/checkpoint*"))


def test_trainers_are_told_what_is_wrong(tmp_path):
    with pytest.raises(ConfigError, match="the model is not sparse"):
        hugging_face(tmp_path, gpt2())[0].train()
    model = gpt2()
    sp.sparsify(model, "asp", targets=FFN, total_steps=100)
    with pytest.raises(SparsePretrainWarning, match="total_steps=100, and the Trainer takes 4"):
        hugging_face(tmp_path, model)[0].train()
    trainer, _ = hugging_face(tmp_path, model)
    trainer.remove_callback(SparsityCallback)
    trainer.add_callback(SparsityCallback())
    with pytest.raises(SparsePretrainWarning, match=r"add_to\(trainer\) instead of callbacks"):
        trainer.train()


def test_a_search_of_hyperparameters_that_saves_is_refused(tmp_path):
    model = gpt2()
    sp.sparsify(model, "ste", targets=FFN)
    for strategy in ("steps", "no"):
        trainer, _ = hugging_face(tmp_path, model, save_strategy=strategy)
        trainer.hp_search_backend = None
        trainer.state = transformers.TrainerState(is_hyper_param_search=True, max_steps=STEPS)
        trainer.callback_handler.optimizer = trainer.create_optimizer()
        start = functools.partial(
            trainer.callback_handler.on_train_begin, trainer.args, trainer.state, trainer.control
        )
        if strategy == "no":
            start()
            continue
        with pytest.raises(ConfigError, match="hyperparameter_search saves each trial elsewhere"):
            start()


def test_saving_may_be_left_out_and_names_the_final_model(tmp_path):
    model = gpt2()
    sp.sparsify(model, "ste", targets=FFN)
    trainer, _ = hugging_face(tmp_path, model, callback=SparsityCallback(save=False))
    trainer.train()
    assert (tmp_path / "checkpoint-2").is_dir() and not list(tmp_path.rglob("sparse"))
    with pytest.raises(SparsePretrainWarning, match="save_model takes the stored weights"):
        trainer.save_model(tmp_path / "final")


class Module(pytorch_lightning.LightningModule):
    def __init__(self, optimizers=1):
        super().__init__()
        torch.manual_seed(0)
        self.net = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Linear(32, 16))
        self.head = torch.nn.Linear(16, 16)
        self.count = optimizers
        self.automatic_optimization = optimizers == 1

    def forward(self, x):
        return self.head(self.net(x))

    def training_step(self, batch, index):
        loss = (self(batch[0]) - batch[0]).square().mean()
        if self.automatic_optimization:
            return loss
        for optimizer in self.optimizers():
            optimizer.zero_grad()
        self.manual_backward(loss)
        for optimizer in self.optimizers():
            optimizer.step()
        return None

    def configure_optimizers(self):
        if self.count == 1:
            return torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [torch.optim.AdamW(part.parameters(), lr=1e-2) for part in (self.head, self.net)]


def fit(directory, module, callback, *, steps=STEPS, checkpoint=None, save=None, **more):
    trainer = pytorch_lightning.Trainer(
        accelerator="cpu", max_steps=steps, enable_progress_bar=False, enable_model_summary=False,
        enable_checkpointing=False, default_root_dir=directory, log_every_n_steps=1,
        callbacks=[callback], logger=pytorch_lightning.loggers.CSVLogger(directory, version=0),
        **more,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(1)
    rows = torch.utils.data.TensorDataset(torch.randn(8, 16, generator=generator))
    trainer.fit(module, torch.utils.data.DataLoader(rows, batch_size=8), ckpt_path=checkpoint)
    if save is not None:
        trainer.save_checkpoint(save)
    return trainer


def callback(method="tsrste", **options):
    return in_lightning.SparsityCallback(method, targets="net.*", total_steps=STEPS, **options)


@pytest.mark.parametrize("method", ["sste", "srste", "tsrste"])
@pytest.mark.parametrize("optimizers", [1, 2])
def test_lightning_trains_reports_and_hands_over(tmp_path, method, optimizers):
    module = Module(optimizers)
    options = {"dense_tail": 0.0, "refresh": 2} if method == "tsrste" else {}
    fit(tmp_path, module, callback(method, **options), steps=STEPS * optimizers)
    handle = sp.sparsifier_of(module)
    assert handle.completed_steps == STEPS and list(handle.layers) == ["net.0", "net.1"]
    (file,) = Path(tmp_path).rglob("metrics.csv")
    with file.open() as stream:
        lines = [row for row in csv.DictReader(stream) if row["sparsity/density"]]
    assert len(lines) == STEPS
    assert float(lines[-1]["sparsity/flip_rate"]) == handle.metrics()["flip_rate"]
    plain = Module()
    plain.load_state_dict(handle.dense_state_dict())
    x = torch.randn(4, 16)
    torch.testing.assert_close(plain(x), module.eval()(x))
    assert all(torch.equal(w * nm_mask(w), w) for w in (plain.net[0].weight, plain.net[1].weight))


def test_lightning_resumes_bit_exactly_and_fits_again(tmp_path):
    whole = Module()
    fit(tmp_path / "a", whole, callback())
    fit(tmp_path / "b", Module(), callback(), steps=2, save=tmp_path / "half.ckpt")
    again = Module()
    fit(tmp_path / "c", again, callback(), checkpoint=tmp_path / "half.ckpt")
    for (key, one), two in zip(
        whole.state_dict().items(), again.state_dict().values(), strict=True
    ):
        assert torch.equal(one, two), key
    fit(tmp_path / "d", whole, callback())  # sparse already, with another optimizer
    assert sp.sparsifier_of(whole).completed_steps == 2 * STEPS


def test_modules_that_sparsify_themselves_are_left_alone(tmp_path):
    module = Module()
    sp.sparsify(module, "ste", targets="net.0")
    fit(tmp_path, module, callback())
    assert list(sp.sparsifier_of(module).layers) == ["net.0"]


def test_lightnings_average_needs_copied_buffers(tmp_path):
    from pytorch_lightning.callbacks import WeightAveraging

    for blends in (True, False):
        module, average = Module(), WeightAveraging(use_buffers=blends)
        trainer = pytorch_lightning.Trainer(
            accelerator="cpu", max_steps=STEPS, enable_progress_bar=False, logger=False,
            enable_model_summary=False, enable_checkpointing=False, default_root_dir=tmp_path,
            callbacks=[callback("tsrste", dense_tail=0.0), average],
        )  # fmt: skip
        rows = torch.utils.data.TensorDataset(torch.randn(8, 16))
        trainer.fit(module, torch.utils.data.DataLoader(rows, batch_size=8))
        if blends:
            with pytest.raises(ConfigError, match=r"EMAWeightAveraging\(use_buffers=False"):
                sp.sparsifier_of(module).dense_state_dict()
        else:
            assert sp.sparsifier_of(module).prove().holds
