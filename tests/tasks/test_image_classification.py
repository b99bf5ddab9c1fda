"""Images in, exact losses and hit rates out."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from sparsepretrain import config
from sparsepretrain.errors import ConfigError
from sparsepretrain.tasks import build_task
from sparsepretrain.training.batches import Request, split_requests, stream

CPU = torch.device("cpu")
MIXING = ("task.mixup=0.8", "task.cutmix=1.0")


@pytest.fixture
def make(prepared_cache, monkeypatch):
    monkeypatch.setenv("SPARSEPRETRAIN_CACHE_DIR", str(prepared_cache))

    def build(*overrides):
        run = config.load(["model=vit_nano", "tracker.mode=disabled", *overrides])
        task = build_task(run)
        task.open_data(("train", "validation"))
        return task

    return build


class Fixed(nn.Module):
    """Answers with given logits, whatever it sees."""

    def __init__(self, logits):
        super().__init__()
        self.register_buffer("logits", logits)

    def forward(self, images):
        return self.logits[: len(images)]


def test_batches_have_the_shapes_of_the_example(make):
    for overrides in ((), MIXING):
        task = make(*overrides)
        batch, example = task.batch("train", 2, range(4, 10), 64), task.example(6, CPU)
        forms = [{k: (v.shape, v.dtype) for k, v in part.items()} for part in (batch, example)]
        assert forms[0] == forms[1]
        assert batch["images"].shape == (6, 3, 16, 16) and task.count(batch) == 6
    held_out = task.batch("validation", 0, range(320), 320)
    assert set(held_out) == {"images", "labels"}
    assert held_out["labels"].bincount().tolist() == [32] * 10


def test_micro_batches_are_parts_of_the_global_batch(make):
    task = make()
    whole = task.batch("train", 40, range(64), 64)  # crosses the end of an epoch of 1477
    for key, value in whole.items():
        parts = [task.batch("train", 40, range(i, i + 16), 64)[key] for i in range(0, 64, 16)]
        assert torch.equal(value, torch.cat(parts))


def test_an_epoch_sees_every_image_and_copies_differ(make):
    task = make("task.copies=2")
    batches = [task.batch("train", step, range(40), 40) for step in range(2)]
    labels, images = (torch.cat([batch[key] for batch in batches]) for key in ("labels", "images"))
    assert torch.equal(labels[::2], labels[1::2])
    same = [torch.equal(a, b) for a, b in zip(images[::2], images[1::2], strict=True)]
    assert sum(same) < 15  # 9 shifts are equally likely


def test_workers_make_the_same_mixed_batches(make):
    task = make(*MIXING)
    wanted = [Request("train", step, range(i, i + 8), 16) for step in (3, 4) for i in (0, 8)]
    wanted += split_requests("validation", task.samples("validation"), 100, None)
    here, there = ([*stream(task, wanted, CPU, workers)] for workers in (0, 1))
    assert len(here) == 8 and [task.count(b) for b in here[4:]] == [100, 100, 100, 20]
    for a, b in zip(here, there, strict=True):
        assert a.keys() == b.keys()
        assert all(torch.equal(a[k], b[k]) for k in a)


def test_held_out_images_do_not_depend_on_the_seed(make):
    a, b = (make(f"seed={s}").batch("validation", 0, range(8), 320) for s in (0, 1))
    assert torch.equal(a["images"], b["images"])
    a, b = (make(f"seed={s}").batch("train", 0, range(8), 64) for s in (0, 1))
    assert not torch.equal(a["images"], b["images"])


def test_smoothed_loss_equals_fp64(make):
    task = make("task.label_smoothing=0.2")
    torch.manual_seed(0)
    logits, labels = torch.randn(5, 10), torch.tensor([3, 1, 4, 1, 5])
    batch = {"images": torch.zeros(5, 3, 16, 16), "labels": labels}
    total, count = task.loss(Fixed(logits), batch)
    targets = F.one_hot(labels, 10) * 0.8 + 0.02
    expected = -(targets * logits.double().log_softmax(-1)).sum()
    assert count == 5 and total.dtype == torch.float32
    assert total.item() == pytest.approx(expected.item(), rel=1e-6)


def test_mixed_loss_equals_fp64(make):
    task = make("task.label_smoothing=0.1", *MIXING)
    torch.manual_seed(0)
    logits, labels = torch.randn(4, 10), torch.tensor([3, 1, 4, 1])
    partners, shares = labels.flip(0), torch.tensor([0.7, 0.7, 0.2, 1.0])
    batch = {"images": torch.zeros(4, 3, 16, 16), "labels": labels}
    batch |= {"partners": partners, "shares": shares}
    own, other = F.one_hot(labels, 10), F.one_hot(partners, 10)
    targets = 0.9 * (shares[:, None] * own + (1 - shares)[:, None] * other) + 0.01
    assert torch.allclose(targets.sum(-1), torch.ones(4))
    expected = -(targets * logits.double().log_softmax(-1)).sum()
    assert task.loss(Fixed(logits), batch)[0].item() == pytest.approx(expected.item(), rel=1e-6)


def test_top1_and_top5_of_known_answers(make):
    task = make("task.label_smoothing=0.2")
    logits = torch.arange(10.0).flip(0).repeat(8, 1)  # class 0 first, class 9 last
    labels = torch.tensor([0, 0, 1, 4, 5, 9, 2, 0])
    batch = {"images": torch.zeros(8, 3, 16, 16), "labels": labels}
    model = Fixed(logits)
    parts = [{k: v[s] for k, v in batch.items()} for s in (slice(0, 6), slice(6, 8))]
    observations = [task.observe(Fixed(logits), part, final=True) for part in parts]
    metrics = task.metrics(observations)
    assert metrics["top1"] == pytest.approx(100 * 3 / 8)
    assert metrics["top5"] == pytest.approx(100 * 6 / 8)
    expected = F.cross_entropy(model.logits, labels)  # not smoothed
    assert metrics["loss"] == pytest.approx(expected.item())
    batch = {"images": torch.zeros(2, 3, 16, 16), "labels": torch.tensor([0, 1])}
    few = task.observe(Fixed(torch.tensor([[0.0, 1, 2], [0, 1, 2]])), batch, final=False)
    assert few["top1"] == (0.0, 2) and few["top5"] == (200.0, 2)


@pytest.mark.parametrize(
    ("model", "override", "words"),
    [
        ("vit_nano", "task.cutout=20", "task.cutout must be ≤ task.image_size"),
        ("vit_nano", "task.random_erasing=0.5", "task.random_erasing"),
        ("vit_nano", "task.rand_augment=m9", "task.rand_augment"),
        ("vit_nano", "task.crop=resized", "task.shift"),
        ("vit_nano", "task.interpolation=random", "task.interpolation"),
        ("vit_nano", "task.scale=[0.5,0.1]", "task.scale"),
        ("vit_nano", "model.image_size=32", "model.image_size must equal task.image_size"),
        ("vit_nano", "model.patch_size=5", "model.patch_size must divide"),
        ("vit_nano", "model.heads=5", "model.heads must divide"),
        ("vit_nano", "model.width=[1,2]", "model.width"),
        ("vit_nano", "model.zero_init_last=false", "model.zero_init_last"),
        ("vit_nano", "model.stem=cifar", "model.stem"),
        ("vit_nano", "model.architecture=swin_tiny", "model.architecture"),
        ("vit_nano", "data=python_source", "task=image_classification"),
        ("resnet_nano", "model.patch_size=2", "model.patch_size"),
        ("resnet_nano", "model.depth=3", "model.depth must be 4"),
        ("resnet_nano", "model.width=[8,8,8]", "model.width must be 4"),
        ("resnet_nano", "model.architecture=regnetx_004", "model.depth must be null"),
    ],
)
def test_bad_options_are_refused(model, override, words):
    with pytest.raises(ConfigError) as caught:
        config.load([f"model={model}", override])
    assert any(words in message for message in caught.value.messages)
