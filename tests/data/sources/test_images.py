"""Sources of images, their bad input, and the order of training."""

import errno
import io
import json
import os
import struct
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, UnidentifiedImageError

from sparsepretrain.data.formats import Images, to_rgb
from sparsepretrain.data.order import Shuffle
from sparsepretrain.data.preparation import load, prepare
from sparsepretrain.errors import DataError

BOTH = ("train", "validation")
SPLITS = (*BOTH, "test")


def opened(options, classes=10):
    data, splits = load(options), SPLITS if options.name == "digits" else BOTH
    return {split: Images(options, data, split, classes) for split in splits}


def labels_of(images):
    return [images.label(i) for i in range(images.count)]


# digits


def test_digits_split_is_fixed(options):
    images = opened(options("digits"))
    counts = {split: found.count for split, found in images.items()}
    assert counts == {"train": 1277, "validation": 320, "test": 200}
    assert Counter(labels_of(images["test"])) == dict.fromkeys(range(10), 20)
    assert Counter(labels_of(images["validation"])) == dict.fromkeys(range(10), 32)
    other = opened(options("digits", seed=1))["validation"]
    pixels = [np.asarray(v.image(0)).tobytes() for v in (images["validation"], other)]
    assert pixels[0] != pixels[1]
    # a change of the split would make results incomparable
    assert load(options("digits")).fingerprint == "f1ba0752f4c327b2"


def test_every_digit_is_in_one_split(options):
    from sklearn.datasets import load_digits

    digits = load_digits()
    expected = Counter(
        (int(label), np.rint(image * 255 / 16).astype(np.uint8).tobytes())
        for label, image in zip(digits.target, digits.images, strict=True)
    )
    found = Counter()
    for images in opened(options("digits")).values():
        for i in range(images.count):
            image = images.image(i)
            assert image.mode == "RGB" and image.size == (8, 8)
            found[images.label(i), np.asarray(image)[..., 0].tobytes()] += 1
    assert found == expected


# folders


@pytest.fixture
def folder(tmp_path):
    """Two classes; image i of class c has the color (c, i, 7)."""
    root = tmp_path / "images"
    for split, count in (("train", 3), ("val", 2)):
        for c, name in enumerate(("cat", "dög")):
            (root / split / name).mkdir(parents=True)
            for i in range(count):
                file = root / split / name / f"{i}.png"
                Image.new("RGB", (10 + i, 12), (c, i, 7)).save(file)
    return root


def test_folders_become_an_index(options, folder):
    Image.new("L", (4, 4), 9).save(folder / "train/cat/0.png")
    Image.new("RGBA", (4, 4), (1, 2, 3, 0)).save(folder / "train/cat/1.png")
    data = prepare(options("image_folder", root=str(folder)))
    entries = [json.loads(x) for x in bytes(data.tokens["validation"]).split(b"\0")[:-1]]
    assert entries[-1] == {"path": "val/dög/1.png", "label": 1}
    images = opened(options("image_folder", root=str(folder)), 2)
    assert labels_of(images["train"]) == [0, 0, 0, 1, 1, 1]
    assert images["train"].image(5).size == (12, 12)
    assert images["train"].image(5).getpixel((0, 0)) == (1, 2, 7)
    rgb = [images["train"].image(i).getpixel((0, 0)) for i in (0, 1)]
    assert rgb == [(9, 9, 9), (1, 2, 3)]
    Image.new("RGB", (4, 4)).save(folder / "train/cat/new.jpg")
    changed = prepare(options("image_folder", root=str(folder)))
    assert changed.fingerprint != data.fingerprint


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"root": "/nowhere"}, "data.root: /nowhere is not a directory: put image_folder there"),
        ({"validation": "v"}, r"data.validation: .*/v holds no class directory"),
        ({"train": "val/cat"}, "holds no class directory"),
        ({"train": "val"}, r"train/emu: no class of that name"),
        ({"validation": "val"}, r"train/emu: the class has no image"),
    ],
)
def test_unsuitable_directories_are_refused(options, folder, cache, changes, words):
    (folder / "train/emu").mkdir()
    other = "val" if changes.get("train", "train") == "train" else "train"
    changes = {"validation": other, "root": str(folder)} | changes
    with pytest.raises(DataError, match=words):
        prepare(options("image_folder", **changes))
    assert not list(cache.glob("*/manifest.json"))


@pytest.mark.parametrize("which", ["train", "val/cat", "train/cat/part"])
def test_a_directory_that_may_not_be_listed_is_named(options, folder, monkeypatch, which):
    (folder / "train/cat/part").mkdir()
    listed = Path.iterdir

    def refuse(path):  # root, who often runs tests, may list every directory
        if path == folder / which:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return listed(path)

    monkeypatch.setattr(Path, "iterdir", refuse)
    with pytest.raises(DataError, match=f"cannot read .*{which}: Permission denied"):
        prepare(options("image_folder", root=str(folder)))


@pytest.mark.parametrize("content", [b"not an image", b"", None])
def test_broken_image_is_named(options, folder, content):
    file = folder / "val/cat/1.png"
    file.write_bytes(file.read_bytes()[:40] if content is None else content)
    images = opened(options("image_folder", root=str(folder)), 2)["validation"]
    with pytest.raises(DataError, match=r"val/cat/1\.png.* cannot be read") as caught:
        images.image(1)
    assert "\n" not in str(caught.value)
    file.unlink()
    with pytest.raises(DataError, match=r"No such file .*val/cat/1\.png"):
        images.image(1)


def test_label_out_of_range_is_refused(options, folder):
    with pytest.raises(DataError, match=r"image 5 has label 1, .*model.classes=1"):
        opened(options("image_folder", root=str(folder)), 1)
    with pytest.raises(DataError, match=r"label 9, .*model.classes=9"):
        labels_of(opened(options("digits"), 9)["train"])


# the datasets library


@pytest.fixture
def repository(tmp_path):
    """A local data set of the ``datasets`` library, four images in each split."""
    import datasets

    features = datasets.Features({"img": datasets.Image(), "label": datasets.Value("int64")})
    for split in ("train", "test"):
        images = [Image.new("RGB", (8, 8), (i, 0, 0)) for i in range(4)]
        rows = {"img": images, "label": [0, 1, 2, 0]}
        data = datasets.Dataset.from_dict(rows, features=features)
        data.to_parquet(tmp_path / f"hub/{split}.parquet")
    return tmp_path / "hub"


def test_hub_data_sets_become_an_index(options, repository, monkeypatch, tmp_path):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "hf"))
    choice = options("cifar10", path=str(repository))
    with pytest.raises(DataError, match="cifar10 is not prepared: run"):
        opened(choice, 3)
    prepare(choice, workers=1)
    images = opened(choice, 3)
    assert labels_of(images["validation"]) == [0, 1, 2, 0]
    assert images["train"].image(3).getpixel((0, 0)) == (3, 0, 0)
    with pytest.raises(DataError, match="image 2 has label 2, out of range"):
        labels_of(opened(choice, 2)["validation"])
    with pytest.raises(DataError, match="has no column 'image'"):
        prepare(options("cifar10", path=str(repository), image_column="image"), workers=1)
    with pytest.raises(DataError, match="datasets cannot load"):
        prepare(options("cifar10", path=str(repository), validation="dev"), workers=1)


# order


def test_every_epoch_visits_every_image_once():
    order = Shuffle(10, seed=3)
    epochs = [order.samples(e, range(10), 10) for e in range(3)]
    for e, samples in enumerate(epochs):
        assert sorted(p.item for p in samples) == list(range(10))
        assert [(p.epoch, p.position) for p in samples] == [(e, i) for i in range(10)]
    assert len({tuple(p.item for p in samples) for samples in epochs}) == 3
    again = Shuffle(10, seed=3)
    assert again.samples(0, range(29, -1, -1), 30) == [
        p for samples in reversed(epochs) for p in reversed(samples)
    ]


def test_repeated_augmentation_repeats_neighbors():
    order = Shuffle(10, seed=0, copies=3)
    images = [sample.item for sample in order.samples(0, range(10), 10)]
    assert images == [images[i] for i in (0, 0, 0, 3, 3, 3, 6, 6, 6, 9)]
    assert len(set(images)) == 4
    seen = {sample.item for sample in order.samples(0, range(200), 200)}
    assert seen == set(range(10))


# modes of images


def saved(tmp_path, values, suffix=".png", mode=None):
    path = tmp_path / f"image{suffix}"
    Image.fromarray(values, mode).save(path)
    with Image.open(path) as image:
        image.load()
        return image


def test_16_bit_gray_values_are_scaled(tmp_path):
    ramp = np.linspace(0, 65535, 256).round().astype(np.uint16).reshape(16, 16)
    for suffix in (".png", ".tif"):
        image = to_rgb(saved(tmp_path, ramp, suffix))
        assert image.mode == "RGB"
        got = np.asarray(image)[..., 0].astype(int)
        np.testing.assert_array_equal(got, np.arange(256).reshape(16, 16))


def gray(image):
    """Values of a gray image in RGB."""
    values = np.asarray(to_rgb(image)).astype(int)
    assert (values == values[..., :1]).all()
    return values[0, :, 0].tolist()


def pgm(values, most, kind):
    """A portable gray map of one row, binary (P5) or plain (P2)."""
    head = f"{kind}\n{len(values)} 1\n{most}\n".encode()
    body = b" ".join(b"%d" % v for v in values)
    if kind == "P5":
        body = np.array(values, ">u2" if most > 255 else "u1").tobytes()
    return Image.open(io.BytesIO(head + body))


@pytest.mark.parametrize("most", [1, 7, 100, 255, 256, 1000, 1023, 4095, 32767, 65534, 65535])
@pytest.mark.parametrize("kind", ["P5", "P2"])
def test_gray_maps_are_scaled_by_the_largest_value_that_they_declare(most, kind):
    values = sorted({round(most * i / 40) for i in range(41)})
    got = np.array(gray(pgm(values, most, kind)))
    exact = np.array(values) * 255 / most
    # Pillow rounds to 16 bits before
    assert np.abs(got - exact).max() <= 0.51 and got[-1] == 255


def tiff(values, bits, *, zero_is_white=False, signed=False, order="<"):
    """An uncompressed TIFF of one row, written tag by tag."""
    if bits == 12:
        text = "".join(f"{v:012b}" for v in values)
        data = int(text.ljust(-(-len(text) // 8) * 8, "0"), 2).to_bytes(-(-len(text) // 8), "big")
    elif bits < 8:
        text = "".join(f"{v:0{bits}b}" for v in values)
        data = bytes(int(text[i : i + 8].ljust(8, "0"), 2) for i in range(0, len(text), 8))
    else:
        kind = "i" if signed else "u"
        data = np.array(values, f"{order}{kind}{bits // 8}").tobytes()
    tags = {256: len(values), 257: 1, 258: bits, 259: 1, 262: int(not zero_is_white)}
    tags |= {273: 8, 277: 1, 278: 1, 279: len(data), 339: 2 if signed else 1}
    data += b"\0" * (len(data) % 2)
    head = (b"II" if order == "<" else b"MM") + struct.pack(f"{order}HI", 42, 8 + len(data))
    entries = b"".join(struct.pack(f"{order}HHII", k, 4, 1, v) for k, v in sorted(tags.items()))
    directory = struct.pack(f"{order}H", len(tags)) + entries + bytes(4)
    return Image.open(io.BytesIO(head + data + directory))


@pytest.mark.parametrize("bits", [1, 2, 4, 8, 12, 16])
@pytest.mark.parametrize("zero_is_white", [False, True])
@pytest.mark.parametrize("order", ["<", ">"])
def test_gray_tiff_has_the_brightness_that_it_declares(bits, zero_is_white, order):
    most = (1 << bits) - 1
    values = sorted({round(most * i / 16) for i in range(17)})
    exact = np.array(values) * 255 / most
    try:
        image = tiff(values, bits, zero_is_white=zero_is_white, order=order)
    except UnidentifiedImageError:
        # not silently wrong: Pillow has no such kind, so training names the file
        assert bits == 12 or (bits, zero_is_white, order) == (16, True, ">")
        return
    got = np.array(gray(image))
    assert np.abs(got - (255 - exact if zero_is_white else exact)).max() <= 0.5


@pytest.mark.parametrize("compression", ["tiff_lzw", "tiff_adobe_deflate", "packbits"])
@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_compressed_tiff_in_which_zero_is_white_is_inverted(tmp_path, compression, dtype):
    most = np.iinfo(dtype).max
    values = np.linspace(0, most, 16).round().astype(dtype)[None]
    path = tmp_path / "a.tif"
    Image.fromarray(values).save(path, compression=compression, tiffinfo={262: 0})
    # Pillow inverts 8-bit values when it writes them, and stores 16-bit ones as they are
    expected = values if dtype is np.uint8 else most - values
    with Image.open(path) as image:
        image.load()
        assert gray(image) == (expected[0] / (most / 255)).round().astype(int).tolist()


@pytest.mark.parametrize(("bits", "words"), [(8, "signed 8-bit"), (16, "signed 16-bit")])
def test_signed_values_are_refused(bits, words):
    with pytest.raises(ValueError, match=rf"its pixels are {words} integers: convert it to 8 or"):
        to_rgb(tiff([-5, 0, 5], bits, signed=True))


@pytest.mark.parametrize("dtype", [np.int32, np.float32])
def test_32_bit_values_are_refused(tmp_path, dtype):
    with pytest.raises(ValueError, match=r"32-bit .*: convert it to 8 or 16 bits"):
        to_rgb(saved(tmp_path, np.full((4, 4), 7, dtype), ".tif"))


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "YCbCr", "HSV"])
def test_8_bit_modes_are_converted(mode):
    image = Image.fromarray(np.full((4, 4, 3), 255, np.uint8)).convert(mode)
    assert np.asarray(to_rgb(image)).min() >= 254


def test_the_file_of_an_image_that_has_no_range_is_named(options, tmp_path):
    for split in BOTH:
        (tmp_path / split / "sheep").mkdir(parents=True)
        Image.fromarray(np.full((4, 4), 7, np.float32)).save(tmp_path / split / "sheep" / "a.tif")
    folder = options("image_folder", root=str(tmp_path), validation="validation")
    prepare(folder, workers=1)
    with pytest.raises(DataError, match=r"a\.tif.*cannot be read: its pixels are 32-bit"):
        opened(folder, 1)["train"].image(0)


def test_images_in_folders_below_a_class_belong_to_it(options, folder):
    """Tiny ImageNet has ``CLASS/images``; some have a part of a class below it."""
    for split in ("train", "val"):
        below = folder / split / "cat/images/part"
        below.mkdir(parents=True)
        for file in sorted((folder / split / "cat").glob("*.png"))[1:]:
            file.rename(below / file.name)
        (folder / split / "cat/loop").symlink_to(folder / split / "cat")
        (folder / split / "cat/._0.png").write_bytes(b"\0\5\x16\7")  # macOS, on other disks
        (folder / split / "cat/.hidden").mkdir()
        Image.new("RGB", (4, 4)).save(folder / split / "cat/.hidden/no.png")
    data = prepare(options("image_folder", root=str(folder)))
    entries = [json.loads(x) for x in bytes(data.tokens["train"]).split(b"\0")[:-1]]
    paths = [entry["path"] for entry in entries if entry["label"] == 0]
    part = "train/cat/images/part"
    assert paths == ["train/cat/0.png", f"{part}/1.png", f"{part}/2.png"]
    images = opened(options("image_folder", root=str(folder)), 2)["train"]
    assert [images.image(i).getpixel((0, 0)) for i in range(3)] == [(0, i, 7) for i in range(3)]
    Image.new("RGB", (4, 4)).save(folder / part / "new.png")
    assert prepare(options("image_folder", root=str(folder))).fingerprint != data.fingerprint
