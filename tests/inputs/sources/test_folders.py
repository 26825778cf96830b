"""Folders of texts and images: names, labels, pixels, and files that have changed."""

import os
import pickle
import shutil

import numpy as np
import pytest
from PIL import Image

from praxis_lite.core.errors import ConfigError
from praxis_lite.inputs import ImageFiles, TextFiles
from praxis_lite.inputs.sources.faults import BadExample


@pytest.fixture
def texts(tmp_path):
    for n in range(13):
        path = tmp_path / "texts" / f"{n % 3}" / f"{n:02}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"text {n} é\r\n" * n, encoding="utf-8", newline="")
    return tmp_path / "texts"


def test_texts_are_the_files_bytes_in_any_order_and_elsewhere(texts):
    source = TextFiles(f"{texts}/**/*.txt")
    source.check()
    expected = [
        {"name": str(path.relative_to(texts)), "text": path.read_bytes().decode()}
        for path in sorted(texts.glob("*/*.txt"))
    ]
    for n in np.random.default_rng(0).permutation(13).tolist():
        assert source[n] == expected[n]
    assert pickle.loads(pickle.dumps(source))[11] == expected[11]
    assert source.where(0) == f"{texts}/0/00.txt"
    (part,) = source.parts()
    assert (part.start, part.stop) == (0, 13)


def test_a_fingerprint_knows_names_and_sizes_and_a_part_times_too(texts, tmp_path):
    source = TextFiles(f"{texts}/**/*.txt")
    shutil.copytree(texts, tmp_path / "moved")
    moved = TextFiles(f"{tmp_path}/moved/**/*.txt")
    assert moved.fingerprint() == source.fingerprint()
    assert moved.parts() == source.parts()  # copytree copies times.
    os.utime(tmp_path / "moved/0/03.txt", ns=(1, 1))
    again = TextFiles(f"{tmp_path}/moved/**/*.txt")
    assert again.parts() != source.parts() and again.fingerprint() == source.fingerprint()
    (tmp_path / "moved/0/03.txt").write_text("other")
    again = TextFiles(f"{tmp_path}/moved/**/*.txt")
    assert again.fingerprint() != source.fingerprint()


def test_a_file_that_is_no_longer_what_was_listed_is_refused_by_name(texts):
    source = TextFiles(f"{texts}/**/*.txt")
    source.check()
    (texts / "0/03.txt").write_text("other")
    (texts / "0/06.txt").unlink()
    with pytest.raises(ConfigError, match="0/03.txt"):
        pickle.loads(pickle.dumps(source))[1]
    with pytest.raises(ConfigError, match="0/06.txt"):
        source[2]


def test_no_files_are_told_by_the_check(texts):
    with pytest.raises(ConfigError, match="TextFiles"):
        TextFiles(f"{texts}/*.md").check()


@pytest.mark.parametrize(("mode", "pixel", "wanted"), [
    ("RGB", (1, 2, 3), [1, 2, 3]),
    ("RGBA", (1, 2, 3, 4), [1, 2, 3]),
    ("L", 7, [7, 7, 7]),
    ("1", 1, [255, 255, 255]),
    ("I;16", 0x8040, [0x80, 0x80, 0x80]),
])  # fmt: skip
def test_pixels_are_rgb_of_8_bits(mode, pixel, wanted, tmp_path):
    image = Image.new(mode, (5, 3), 0)
    image.putpixel((4, 1), pixel)
    image.save(tmp_path / "a.png")
    actual = ImageFiles(f"{tmp_path}/a.png")[0]["image"]
    assert actual.shape == (3, 5, 3) and actual.dtype == np.uint8
    assert actual[1, 4].tolist() == wanted and actual[1, 3].tolist() == [0, 0, 0]


def test_a_damaged_image_is_told_whatever_is_damaged(tmp_path):
    rng = np.random.default_rng(0)
    Image.fromarray(rng.integers(0, 255, (40, 50, 3), np.uint8)).save(tmp_path / "a.png")
    data = (tmp_path / "a.png").read_bytes()
    huge = bytearray(data)
    huge[16:24] = b"\0\1\0\0\0\1\0\0"  # 65536 x 65536 pixels.
    Image.fromarray(np.zeros((3, 5), np.float32)).save(tmp_path / "f.tiff")
    harms = [b"", data[:20], data[: len(data) // 2], bytes(huge), b"GIF89a" + data]
    for harm in [*harms, (tmp_path / "f.tiff").read_bytes()]:
        (tmp_path / "a.png").write_bytes(harm)
        source = ImageFiles(f"{tmp_path}/a.png", skip=("damaged",))
        with pytest.raises(BadExample, match="/a.png cannot be read as an image: ") as caught:
            source[0]
        assert caught.value.fault == "damaged", len(harm)
