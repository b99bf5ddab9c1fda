"""What happens to images: keyed, in bounds, and exact where it can be known."""

import itertools
import random

import numpy as np
import pytest
import torch
from PIL import Image

from sparsepretrain import config
from sparsepretrain.data.augmentation import Augmentation, mix


def options(*overrides, model="deit_tiny"):
    return config.load([f"model={model}", *overrides]).task


def picture(size=40, seed=0):
    pixels = np.random.RandomState(seed).randint(0, 256, (size, size, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


CHOICES = {
    "deit": options("task.image_size=32"),
    "plain": options("task.image_size=32", model="resnet50"),
    "random": options("task.image_size=32", "task.interpolation=random", model="resnet50"),
    "cifar": options("task.cutout=8", model="resnet18_cifar"),
    "digits": options("task.lighting=0.5", model="vit_nano"),
}


@pytest.mark.parametrize("name", CHOICES)
def test_augmentation_is_a_function_of_its_key(name):
    first, again = Augmentation(CHOICES[name], 3), Augmentation(CHOICES[name], 3)
    image, size = picture(), CHOICES[name].image_size
    results = {}
    for epoch in range(3):
        for position in range(4):
            result = first.train(image, epoch, position)
            assert result.shape == (3, size, size) and result.dtype == torch.float32
            results[epoch, position] = result
    for (epoch, position), result in reversed(results.items()):
        assert torch.equal(again.train(image, epoch, position), result)
    assert len({r.numpy().tobytes() for r in results.values()}) > 4
    other = Augmentation(CHOICES[name], 4).train(image, 0, 0)
    assert not all(torch.equal(other, r) for r in results.values())


def test_global_generators_are_unchanged():
    torch.manual_seed(1), random.seed(1), np.random.seed(1)
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    augmentation = Augmentation(CHOICES["deit"], 0)
    augmentation.train(picture(), 0, 0)
    with pytest.raises(TypeError):
        augmentation.train(None, 0, 0)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert (np.random.get_state()[1] == before[2]).all()


def test_lighting_is_noise_along_the_principal_components_of_color():
    choice = options("task.lighting=0.1", "task.shift=0", "task.image_size=4", model="vit_nano")
    image, augmentation = Image.new("RGB", (4, 4), (120, 90, 60)), Augmentation(choice, 0)
    plain, std = augmentation.evaluate(image), torch.tensor(choice.std).view(3, 1, 1)
    noise = torch.stack([(augmentation.train(image, 0, p) - plain) * std for p in range(800)])
    torch.testing.assert_close(noise, noise[..., :1, :1].expand_as(noise), rtol=0, atol=1e-6)
    values, vectors = torch.linalg.eigh(noise[:, :, 0, 0].T.cov())
    # deviations of 0.1 x the eigenvalues; 800 draws know them to 2.5 %
    assert values.flip(0).sqrt().tolist() == pytest.approx([0.02175, 0.00188, 0.00045], rel=0.1)
    brightness = torch.ones(3) / 3**0.5
    assert float(vectors[:, -1] @ brightness) ** 2 > 0.99, "mostly brighter and darker"


def normalized(choice, image):
    mean, std = np.array(choice.mean), np.array(choice.std)
    pixels = (np.asarray(image) / 255 - mean) / std
    return torch.from_numpy(pixels.transpose(2, 0, 1)).float()


def test_small_images_are_shifted_flipped_and_cut_out():
    choice = options("task.shift=2", "task.cutout=4", model="resnet18_cifar")
    augmentation, image = Augmentation(choice, 0), picture(32)
    whole = normalized(choice, image)
    framed = torch.zeros(3, 36, 36)
    framed[:, 2:34, 2:34] = whole
    places = list(itertools.product((False, True), range(5), range(5)))
    seen = set()
    for position in range(80):
        result = augmentation.train(image, 0, position)
        cut = (result == 0).all(0)
        matches = []
        for flip, top, left in places:
            view = framed[:, top : top + 32, left : left + 32]
            view = view.flip(-1) if flip else view
            if torch.allclose(result[:, ~cut], view[:, ~cut], atol=1e-5):
                matches.append((flip, top, left))
        assert len(matches) == 1
        assert cut.unfold(0, 4, 1).unfold(1, 4, 1).all(-1).all(-1).any()  # a square of 4×4
        seen.add(matches[0])
    every, found = ([set(part) for part in zip(*all_, strict=True)] for all_ in (places, seen))
    assert found == every


@pytest.mark.parametrize(
    ("overrides", "model", "border"),
    [
        (("task.shift=0", "task.flip=0.0"), "resnet18_cifar", 0),
        (("task.image_size=28", "task.eval_crop=0.875"), "resnet50", 2),
    ],
)
def test_evaluation_crops_the_middle_and_normalizes(overrides, model, border):
    choice, image = options(*overrides, model=model), picture(32)
    augmentation = Augmentation(choice, 0)
    middle = normalized(choice, image.crop((border, border, 32 - border, 32 - border)))
    torch.testing.assert_close(augmentation.evaluate(image), middle, atol=1e-5, rtol=0)
    if model == "resnet18_cifar":  # every augmentation is off
        assert torch.equal(augmentation.train(image, 5, 7), augmentation.evaluate(image))


def batch(size=6, side=16):
    torch.manual_seed(0)
    return torch.randn(size, 3, side, side), torch.arange(size)


MIXUP, CUTMIX = options("task.cutmix=0.0"), options("task.mixup=0.0")


@pytest.mark.parametrize("position", range(3))
def test_mixup_is_one_share_of_the_mirrored_image(position):
    images, labels = batch()
    mixed, partners, shares = mix(images.clone(), labels, MIXUP, (0, 0, position))
    assert partners.tolist() == [5, 4, 3, 2, 1, 0]
    share = float(shares[0])
    assert 0 <= share <= 1 and (shares == share).all()
    torch.testing.assert_close(mixed, images * share + images.flip(0) * (1 - share))
    torch.testing.assert_close(mixed.sum(0), images.sum(0), atol=1e-4, rtol=0)


@pytest.mark.parametrize("position", range(3))
def test_cutmix_shares_are_areas(position):
    images, labels = batch()
    mixed, _, shares = mix(images.clone(), labels, CUTMIX, (0, 0, position))
    own = (mixed == images).all(1)
    assert (own | (mixed == images.flip(0)).all(1)).all()
    torch.testing.assert_close(own.float().mean((1, 2)), shares)
    rows, columns = (~own[0]).any(1), (~own[0]).any(0)
    assert torch.equal(~own[0], rows[:, None] & columns[None])  # a rectangle


def test_mixing_follows_its_key_and_probability():
    (images, labels), both = batch(), options()

    def shares(choice, count=200):
        return [float(mix(images.clone(), labels, choice, (0, s, 0))[2][0]) for s in range(count)]

    assert shares(both) == shares(both)
    assert len(set(shares(both))) > 100
    rare = [s == 1.0 for s in shares(options("task.mix_probability=0.25"))]
    assert 0.6 < sum(rare) / len(rare) < 0.9
    assert set(shares(options("task.mix_probability=0.0"), 20)) == {1.0}
