"""The loss against a teacher, and what is refused as a teacher."""

import io
import math

import pytest
import torch
import transformers
from torch.nn.functional import log_softmax

from sparsepretrain import tasks
from sparsepretrain.cli import main
from sparsepretrain.config import freeze, load
from sparsepretrain.console import Console
from sparsepretrain.errors import CheckpointError, ConfigError
from sparsepretrain.training import plan
from sparsepretrain.training.distillation import kl_divergence
from sparsepretrain.training.teacher import find_teacher
from support.finetune_cases import glue
from support.finetune_cases import train as finetune
from support.tiny_runs import TRAINING, Tiny, assert_same_run, final_state, interrupted, metrics
from support.tiny_translation import TinyTranslation

EXACT = ("precision=fp64", "model.dropout=0")


@pytest.fixture(scope="module")
def dense(tmp_path_factory, small_corpus):
    """``dense(*overrides)``: directory of a dense run, trained once."""
    made = {}
    root = tmp_path_factory.mktemp("dense")

    def train(*overrides):
        if overrides not in made:
            tiny = Tiny(root, small_corpus)
            made[overrides] = tiny.train("sparsity=dense", *overrides).directory
        return made[overrides]

    return train


def plain(logits, expected, temperature, keep):
    """Σ p·ln(p/q) over items, written out in double precision."""
    total = 0.0
    for index in keep.nonzero().flatten().tolist():
        pair = (expected[index].double(), logits[index].double())
        p, q = (torch.softmax(row / temperature, 0).tolist() for row in pair)
        total += sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
    return total


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_divergence_equals_its_formula(temperature):
    torch.manual_seed(0)
    logits, expected = 3 * torch.randn(7, 5), 3 * torch.randn(7, 5)
    keep = torch.tensor([1, 1, 0, 1, 0, 1, 1], dtype=torch.bool)
    found = kl_divergence(logits.view(1, 7, 5), expected.view(1, 7, 5), temperature, keep[None])
    assert found.item() == pytest.approx(plain(logits, expected, temperature, keep), rel=1e-5)
    every = kl_divergence(logits, expected, temperature)
    whole = torch.ones(7, dtype=torch.bool)
    assert every.item() == pytest.approx(plain(logits, expected, temperature, whole), rel=1e-5)
    assert kl_divergence(logits, logits, temperature).item() == 0
    wide = logits.double().requires_grad_()
    assert torch.autograd.gradcheck(
        lambda x: kl_divergence(x, expected.double(), temperature, keep), (wide,)
    )


def test_divergence_in_chunks_and_with_excluded_classes(monkeypatch):
    torch.manual_seed(0)
    logits, expected = torch.randn(9, 4).double().requires_grad_(), torch.randn(9, 4).double()
    expected[:, 1] = -math.inf  # the teacher never predicts it
    whole = kl_divergence(logits, expected, 2.0)
    (gradient,) = torch.autograd.grad(whole, logits)
    assert whole.isfinite() and gradient.isfinite().all()
    monkeypatch.setattr(tasks, "LOGITS_AT_ONCE", 8)
    parts = kl_divergence(logits, expected, 2.0)
    assert parts.item() == pytest.approx(whole.item(), rel=1e-14)
    assert torch.allclose(torch.autograd.grad(parts, logits)[0], gradient, rtol=1e-13)
    mean = torch.distributions.kl_divergence(
        *(torch.distributions.Categorical(logits=x / 2.0) for x in (expected, logits.detach()))
    )
    assert whole.item() == pytest.approx(mean.sum().item(), rel=1e-12)


@pytest.mark.parametrize("weight", [1.0, 0.25])
def test_a_student_that_is_its_teacher(tiny, dense, weight):
    """KL is 0 and has no gradient; the loss is the share of the cross-entropy."""
    words = (f"init.path='{dense()}'", "sparsity=dense", "teacher=self", f"teacher.weight={weight}")
    outcome = tiny.train(*words, "steps=1", "clip=null")
    line = metrics(outcome.directory)[1]
    assert line["kl"] == 0
    assert line["loss"] == pytest.approx((1 - weight) * line["cross_entropy"], rel=1e-6, abs=1e-12)
    assert (line["grad_norm"] < 1e-7) == (weight == 1)


def test_both_terms_are_recorded_and_add_up(tiny, dense):
    words = (f"init.path='{dense()}'", "sparsity=ste", "teacher=self", "teacher.temperature=3")
    session_lines = [m for m in metrics(tiny.train(*words, *EXACT).directory) if "split" not in m]
    for line in session_lines:
        loss = 0.33 * line["cross_entropy"] + 0.67 * 9 * line["kl"]
        assert line["kl"] > 0 and line["loss"] == pytest.approx(loss, rel=1e-12)


def test_the_loss_equals_one_written_out(tiny, dense):
    """Against logits of both models for the first batch of the run."""
    first, other = dense(), dense("seed=5")
    words = (f"init.path='{first}'", "sparsity=dense", "teacher=checkpoint", "batch.micro=2")
    own = (f"teacher.path='{other}'", "teacher.weight=0.4", *EXACT)
    line = metrics(tiny.train(*words, *own, "steps=1").directory)[1]
    session = tiny.build("sparsity=dense", *EXACT)
    batch = session.task.batch("train", 0, range(4), 4)
    logits = []
    for directory in (first, other):
        session.model.load_state_dict(final_state(directory)["model"])
        with torch.no_grad():
            logits.append(session.task.scores(session.model.eval(), batch).view(-1, 256))
    items = len(logits[0])
    ce = -log_softmax(logits[0], -1)[range(items), batch["targets"].view(-1)].mean()
    log_q, log_p = (log_softmax(x / 2.0, -1) for x in logits)
    kl = (log_p.exp() * (log_p - log_q)).sum() / items
    assert line["cross_entropy"] == pytest.approx(ce.item(), rel=1e-10)
    assert line["kl"] == pytest.approx(kl.item(), rel=1e-10)
    assert line["loss"] == pytest.approx((0.6 * ce + 0.4 * 4 * kl).item(), rel=1e-10)


def test_resume_is_bit_exact_and_the_teacher_is_not_saved(tiny, dense, stop_after):
    words = (f"init.path='{dense()}'", "sparsity=sste", "teacher=self", "batch.micro=2")
    whole = tiny.train(*words, f"runs_dir='{tiny.root / 'whole'}'").directory
    without = tiny.train(*words[:2], "batch.micro=2").directory
    assert [*final_state(whole)["model"]] == [*final_state(without)["model"]]
    assert [*final_state(whole)["optimizer"]] == [*final_state(without)["optimizer"]]
    assert_same_run(whole, interrupted(tiny, stop_after, (3,), *words))


@pytest.mark.slow  # inductor compiles both models
def test_a_compiled_teacher_teaches_the_same(tiny, dense):
    words = (f"init.path='{dense()}'", "sparsity=sste", "teacher=self", "model.dropout=0")
    runs = [metrics(tiny.train(*words, f"compile={mode}").directory) for mode in ("none", "blocks")]
    for eager, compiled in zip(*runs, strict=True):
        keys = eager.keys() & {"loss", "kl"}
        assert [compiled[k] for k in keys] == pytest.approx([eager[k] for k in keys], rel=1e-4)


def test_micro_batches_change_nothing(tiny, dense):
    words = (f"init.path='{dense()}'", "sparsity=srste", "teacher=self", *EXACT)
    one, two = (metrics(tiny.train(*words, f"batch.micro={n}").directory) for n in (4, 1))
    for a, b in zip(one, two, strict=True):
        if "split" not in a:  # evaluations count micro-batches
            keys = ("loss", "kl", "cross_entropy")
            assert [a[key] for key in keys] == pytest.approx([b[key] for key in keys], rel=1e-11)


def test_a_sparse_run_teaches_what_it_evaluates_with(tiny, dense):
    """A(W) with its scales: the student starts from it, so that KL is 0 in the first step."""
    source = dense("sparsity=sste")
    words = (f"init.path='{source}'", "init.weights=projected", "sparsity=dense", "teacher=self")
    assert metrics(tiny.train(*words, "steps=1").directory)[1]["kl"] == 0


def test_a_teacher_that_has_gone_on_is_refused(tiny, dense, stop_after):
    """Its run has another checkpoint when the student continues."""
    words = ("sparsity=dense", f"runs_dir='{tiny.root / 'teachers'}'")
    stop_after(4)
    teacher = tiny.train(*words).directory
    student = ("sparsity=ste", "teacher=checkpoint", f"teacher.path='{teacher}'")
    stop_after(2)
    assert tiny.train(*student).code == 143
    stop_after(-1)
    assert tiny.train(*words).code == 0
    with pytest.raises(CheckpointError, match="step_00000006 is not among the sources that"):
        tiny.train(*student)
    # the checkpoint itself stays the same one
    named = f"teacher.path='{teacher / 'checkpoints/step_00000006'}'"
    assert tiny.train(*student[:2], named).code == 0


def test_classification_by_a_fine_tuned_teacher(dense, tmp_path):
    words = [*glue(tmp_path), "steps=2", f"runs_dir='{tmp_path / 'runs'}'"]
    teacher, _, _ = finetune(dense(), *words)
    given = ["teacher=checkpoint", f"teacher.path='{teacher}'"]
    _, out, lines = finetune(dense(), *words, "sparsity=ste", *given)
    assert lines[0]["kl"] > 0 and f"teacher: {teacher}" in out
    with pytest.raises(ConfigError, match="expected a teacher that was trained with task=seq"):
        finetune(dense(), *words, "teacher=self")


def test_masked_language_model(tiny, dense):
    bert = (
        *("model=bert_nano", "precision=fp32", "data.tokenizer=wordpiece", "data.vocab_size=1200"),
        *("model.vocab_size=1300", "steps=2"),
    )
    source = dense(*bert)
    outcome = tiny.train(*bert, "sparsity=ste", f"init.path='{source}'", "teacher=self")
    assert metrics(outcome.directory)[1]["kl"] > 0


@pytest.mark.parametrize("kind", ["translation", "images"])
def test_other_tasks_with_classes(tmp_path, small_corpus, kind):
    """Padding of sentences does not count: a student that is its teacher has KL 0, others not."""

    class Images(Tiny):
        def overrides(self, *more):
            runs = f"runs_dir='{self.root / 'runs'}'"
            return ["model=vit_nano", *TRAINING, "batch.size=4", "batch.micro=4", runs, *more]

    plain = {"translation": ["model.dropout=0"], "images": []}[kind]  # a student without dropout
    tiny = {"translation": TinyTranslation, "images": Images}[kind](tmp_path, small_corpus)
    source = tiny.train("sparsity=dense", "steps=2").directory
    words = ("teacher=self", f"init.path='{source}'", "steps=1", *plain)
    same = metrics(tiny.train(*words, "sparsity=dense").directory)
    assert [line["kl"] for line in same if "kl" in line] == [0]
    pruned = metrics(tiny.train(*words, "sparsity=ste").directory)
    (line,) = [line for line in pruned if "kl" in line]
    loss = 0.33 * line["cross_entropy"] + 0.67 * 4 * line["kl"]
    assert line["kl"] > 0 and line["loss"] == pytest.approx(loss, rel=1e-5)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_checkpoint_of_transformers_teaches(tiny, tmp_path, family):
    def save(name, rows):
        tokens = {"vocab_size": rows, "bos_token_id": 0, "eos_token_id": 0}
        config = transformers.GPT2Config(n_positions=32, n_embd=16, n_layer=1, n_head=2, **tokens)
        if family == "llama":
            layers = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
            config = transformers.LlamaConfig(num_attention_heads=2, **layers, **tokens)
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / name)
        return f"teacher.path='{tmp_path / name}'"

    words = ("teacher=checkpoint", save("hf", 256), "sparsity=sste")
    assert metrics(tiny.train(*words).directory)[-2]["kl"] > 0
    if family == "gpt2":
        with pytest.raises(ConfigError, match=r"has 32 positions, but task.sequence_length is 64"):
            tiny.train(*words, "task.sequence_length=64")
    with pytest.raises(ConfigError, match=r"expected 256 tokens or classes, .* got 300 of"):
        tiny.train(*words, save("more", 300))
    assert len(list((tiny.root / "runs" / "gpt2_nano").iterdir())) == 1


@pytest.mark.parametrize(
    ("words", "error", "text"),
    [
        (
            ("teacher=self",),
            ConfigError,
            "teacher expected none or checkpoint if init.path is null",
        ),
        (("teacher=checkpoint",), ConfigError, "teacher.path must name a run or a checkpoint"),
        (("teacher=checkpoint", "teacher.path=/no/where"), CheckpointError, "no such directory"),
        (("teacher=checkpoint", "teacher.path=/tmp", "teacher.weight=2"), ConfigError, "weight"),
        (("teacher=checkpoint", "teacher.path=/tmp", "teacher.temperature=0"), ConfigError, "temp"),
        (("teacher=nobody",), ConfigError, "teacher has no option 'nobody'"),
        (("teacher='a/b'",), ConfigError, "write teacher=checkpoint teacher.path=a/b"),
    ],
)
def test_bad_options_are_refused(tiny, words, error, text):
    with pytest.raises(error, match=text):
        tiny.train(*words)
    assert not (tiny.root / "runs").exists()


def test_teachers_that_do_not_fit_are_refused(tiny, dense, tmp_path):
    other = ("data.tokenizer=bpe", "data.vocab_size=300", "model.vocab_size=300")
    wrong = {
        "expected 300 tokens or classes": (*other, f"teacher.path='{dense()}'"),
        "has 16 positions": (
            "task.sequence_length=32",
            f"teacher.path='{dense('model.n_positions=16')}'",
        ),
        "are others than those of the data": (
            "model.vocab_size=300",
            f"teacher.path='{dense(*other)}'",
        ),
    }
    for text, words in wrong.items():
        with pytest.raises(ConfigError, match=text):
            tiny.train("teacher=checkpoint", *words)
    with pytest.raises(ConfigError, match="task=regression has no classes to compare"):
        plan.check(
            load(
                [
                    *("model=mlp_nano", "data=teacher", "task=regression", "tracker=jsonl"),
                    *("parallel.device=cpu", "teacher=checkpoint", f"teacher.path='{dense()}'"),
                ]
            )
        )
    assert not (tiny.root / "runs").exists()


def test_the_run_itself_is_no_teacher(tiny, dense):
    first = tiny.train("sparsity=ste", "teacher=checkpoint", f"teacher.path='{dense()}'")
    itself = tiny.load("sparsity=ste", "teacher=checkpoint", f"teacher.path='{dense()}'")
    itself.teacher.path = str(first.directory)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(freeze, "run_directory", lambda run: first.directory)
        with pytest.raises(ConfigError, match="is the run itself"):
            find_teacher(itself, print)


def test_a_dry_run_counts_the_teacher(tiny, dense):
    words = ("sparsity=sste", "teacher=self", f"init.path='{dense()}'")
    out = io.StringIO()
    plan.dry_run(tiny.load(*words), Console(out))
    (row,) = (line for line in out.getvalue().splitlines() if line.startswith("│ teacher"))
    assert str(dense()) in row and "adds 33%" in out.getvalue()


@pytest.mark.parametrize("teacher", ["checkpoint", "self"])
def test_evaluation_needs_no_teacher(tiny, tmp_path, teacher):
    source = tmp_path / "gone"
    tiny.train("sparsity=dense", f"runs_dir='{source}'", "name=gone")
    (dense,) = (source / "gone").iterdir()
    key = "teacher.path" if teacher == "checkpoint" else "init.path"
    student = tiny.train(f"teacher={teacher}", f"{key}='{dense}'").directory
    dense.rename(tmp_path / "moved")
    assert main(["eval", str(student)]) == 0
