"""Images of ImageFiles: pixels upright in 8-bit RGB; the same labels in all splits and datasets."""

import io

import numpy as np
import pytest
from PIL import Image

from praxis_lite.core.errors import ConfigError
from praxis_lite.inputs import FromSource, ImageFiles, Mixture, WithWorkers
from praxis_lite.inputs.mixing.same_classes import require_same_classes
from praxis_lite.inputs.sources.faults import BadExample


def encoded(image, kind="PNG", **how):
    data = io.BytesIO()
    image.save(data, kind, **how)
    return data.getvalue()


# Images.


def upright():
    """Returns RGB pixels [4, 3, 3] of which each is another."""
    return np.arange(36, dtype=np.uint8).reshape(4, 3, 3) * 7


# By hand, as EXIF 2.32 defines them: what is stored, of what is to be seen.
STORED = {
    1: lambda x: x, 2: lambda x: x[:, ::-1], 3: lambda x: x[::-1, ::-1], 4: lambda x: x[::-1],
    5: lambda x: x.swapaxes(0, 1), 6: lambda x: np.rot90(x),
    7: lambda x: x[::-1, ::-1].swapaxes(0, 1), 8: lambda x: np.rot90(x, -1),
}  # fmt: skip


@pytest.mark.parametrize("kind", ["PNG", "TIFF", "WEBP"])
def test_images_are_turned_as_exif_says(kind, tmp_path):
    for orientation, store in STORED.items():
        exif = Image.Exif()
        exif[0x0112] = orientation
        how = {"lossless": True} if kind == "WEBP" else {}
        stored = Image.fromarray(np.ascontiguousarray(store(upright())))
        path = tmp_path / f"{orientation}.{kind.lower()}"
        path.write_bytes(encoded(stored, kind, exif=exif, **how))
        actual = ImageFiles(str(path))[0]["image"]
        np.testing.assert_array_equal(actual, upright(), err_msg=f"orientation {orientation}")


@pytest.mark.parametrize(("image", "expected"), [
    (Image.new("LA", (2, 2), (9, 0)), [9, 9, 9]),
    (Image.new("CMYK", (2, 2), (0, 255, 255, 0)), [255, 0, 0]),
    (Image.new("P", (2, 2), 1), [10, 20, 30]),
])  # fmt: skip
def test_gray_ink_and_palettes_are_red_green_and_blue(image, expected, tmp_path):
    how = {}
    if image.mode == "P":
        image.putpalette([0, 0, 0, 10, 20, 30])
        how = {"transparency": b"\xff\x07"}  # Pillow warns of such.
    (tmp_path / "a").write_bytes(encoded(image, "TIFF" if image.mode == "CMYK" else "PNG", **how))
    assert ImageFiles(f"{tmp_path}/a")[0]["image"][1, 1].tolist() == expected


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "BMP", "WEBP", "TIFF", "PPM"])
def test_an_image_that_is_cut_off_is_named(kind, tmp_path):
    pixels = np.random.default_rng(0).integers(0, 255, (40, 50, 3), np.uint8)
    data = encoded(Image.fromarray(pixels), kind)
    (tmp_path / "a").write_bytes(data)
    assert ImageFiles(f"{tmp_path}/a")[0]["image"].shape == (40, 50, 3)
    (tmp_path / "a").write_bytes(data[: len(data) // 2])
    with pytest.raises(BadExample, match=r"/a .*\['damaged'\]"):
        ImageFiles(f"{tmp_path}/a")[0]


# Classes.


@pytest.fixture
def splits(tmp_path):
    for split, names in (("train", "abd"), ("test", "bd"), ("other", "bc")):
        for name in names:
            (tmp_path / split / name).mkdir(parents=True)
            Image.new("RGB", (2, 2)).save(tmp_path / split / name / "x.png")
    return tmp_path


def labels_of(source):
    source.check()
    return {source[k]["name"].split("/")[0]: int(source[k]["label"]) for k in range(len(source))}


def test_a_split_has_the_labels_of_training_if_classes_are_named_or_taken(splits):
    train = ImageFiles(f"{splits}/train/*/*")
    assert labels_of(train) == {"a": 0, "b": 1, "d": 2} and train.class_names == ("a", "b", "d")
    for classes in (["a", "b", "d"], train):
        test = ImageFiles(f"{splits}/test/*/*", classes=classes)
        assert labels_of(test) == {"b": 1, "d": 2}
        assert test.fingerprint()["classes"] == ["a", "b", "d"]
    assert "classes" not in train.fingerprint()


def test_a_folder_that_is_no_class_is_named(splits):
    for classes in (["a", "b", "d"], ImageFiles(f"{splits}/train/*/*")):
        with pytest.raises(ConfigError, match="other/c/x.png.*'c'"):
            ImageFiles(f"{splits}/other/*/*", classes=classes).check()
    for classes in ("abc", ["a", "a"], [], [1], 7):
        with pytest.raises(ConfigError, match="ImageFiles.classes"):
            ImageFiles(f"{splits}/test/*/*", classes=classes).check()


def small(example):
    return {"image": example["image"], "label": example["label"]}


def without_labels(example):
    return {"image": example["image"]}


def test_a_class_has_one_number_in_all_datasets_of_a_job_and_sources_of_a_mixture(splits):
    def batches(split, transform=small, **settings):
        return FromSource(
            ImageFiles(f"{splits}/{split}/*/*", **settings), 1, transform, shuffle=True
        )

    def require(**of):
        require_same_classes({f"datasets.{name}": item for name, item in of.items()})

    train, test = batches("train"), WithWorkers(batches("test"), 2)
    match = "'b' has the label 0 in .*test, but 1 in .*train"
    with pytest.raises(ConfigError, match=match):
        require(train=train, test=test)
    with pytest.raises(ConfigError, match=match):
        Mixture({"train": train, "test": batches("test")}, {"train": 1, "test": 1}, 1).check()
    require(train=train, test=batches("test", classes=train.source))
    require(train=train, test=batches("test", classes=["a", "b", "d", "e"]))
    require(train=train, test=batches("test", without_labels))
