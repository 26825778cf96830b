"""Folders of strangers: nothing outside them is read, imported or started; classes by name."""

import io
import json
import os
import re
import struct
import sys
import zipfile
import zlib

import numpy as np
import pyarrow
import pytest
from PIL import Image

from praxis_lite.core.errors import ConfigError
from praxis_lite.inputs import (
    FromSource,
    HuggingFaceDataset,
    ImageFiles,
    Mixture,
    NpyFiles,
    TextFiles,
    Tfds,
    WithWorkers,
)
from praxis_lite.inputs.mixing.same_classes import require_same_classes
from praxis_lite.inputs.sources import arrays
from praxis_lite.inputs.sources.faults import BadExample
from praxis_lite.inputs.sources.files.inside import file_inside, json_inside
from tests.support.marks import needs_tensorflow

SECRET = "outside"


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


def test_a_jpeg_is_turned_and_damaged_exif_data_say_nothing(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6
    data = encoded(Image.new("RGB", (40, 16), (200, 0, 0)), "JPEG", exif=exif)
    (tmp_path / "a.jpg").write_bytes(data)
    assert ImageFiles(f"{tmp_path}/a.jpg")[0]["image"].shape == (40, 16, 3)
    at = data.index(b"Exif\0\0") + 6
    (tmp_path / "b.jpg").write_bytes(data[:at] + b"\xff" * 8 + data[at + 8 :])
    assert ImageFiles(f"{tmp_path}/b.jpg")[0]["image"].shape == (16, 40, 3)


@pytest.mark.parametrize(("image", "expected"), [
    (Image.new("LA", (2, 2), (9, 0)), [9, 9, 9]),
    (Image.new("CMYK", (2, 2), (0, 255, 255, 0)), [255, 0, 0]),
    (Image.new("P", (2, 2), 1), [10, 20, 30]),
])  # fmt: skip
def test_grey_ink_and_palettes_are_red_green_and_blue(image, expected, tmp_path):
    how = {}
    if image.mode == "P":
        image.putpalette([0, 0, 0, 10, 20, 30])
        how = {"transparency": b"\xff\x07"}  # Pillow warns of such.
    (tmp_path / "a").write_bytes(encoded(image, "TIFF" if image.mode == "CMYK" else "PNG", **how))
    assert ImageFiles(f"{tmp_path}/a")[0]["image"][1, 1].tolist() == expected


POSTSCRIPT = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshowpage\n"
BOMB = b"\x89PNG\r\n\x1a\n" + b"".join(
    struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
    for name, data in ((b"IHDR", struct.pack(">IIBBBBB", 10_000, 10_000, 8, 2, 0, 0, 0)),
                       (b"IDAT", zlib.compress(b"\0" * 100_000)), (b"IEND", b""))
)


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize(("data", "message"), [
    (POSTSCRIPT, "b'%!PS-Ado'.*PNG, JPEG"),
    (BOMB, "10,000 x 10,000"),
    (encoded(Image.new("RGB", (50, 50)), "JPEG2000"), "jP  .*PNG"),
    (b"", " b''"),
])  # fmt: skip
def test_formats_and_sizes_that_are_not_read_are_named(data, message, tmp_path, monkeypatch):
    (tmp_path / "gs").write_text(f"#!/bin/sh\ntouch {tmp_path}/{SECRET}\n")
    (tmp_path / "gs").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    (tmp_path / "a.png").write_bytes(data)
    with pytest.raises(BadExample, match=f"a.png.*{message}"):
        ImageFiles(f"{tmp_path}/a.png")[0]
    assert not (tmp_path / SECRET).exists()


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "BMP", "WEBP", "TIFF", "PPM"])
def test_an_image_that_is_cut_off_is_named(kind, tmp_path):
    pixels = np.random.default_rng(0).integers(0, 255, (40, 50, 3), np.uint8)
    data = encoded(Image.fromarray(pixels), kind)
    (tmp_path / "a").write_bytes(data)
    assert ImageFiles(f"{tmp_path}/a")[0]["image"].shape == (40, 50, 3)
    (tmp_path / "a").write_bytes(data[: len(data) // 2])
    with pytest.raises(BadExample, match=r"/a .*\['damaged'\]"):
        ImageFiles(f"{tmp_path}/a")[0]


def test_a_file_that_seems_to_have_a_terabyte_is_refused(tmp_path):
    with open(tmp_path / "a", "wb") as file:
        file.truncate(1 << 40)
    for source in (ImageFiles(f"{tmp_path}/a"), TextFiles(f"{tmp_path}/a")):
        with pytest.raises(BadExample, match="/a.*1.0.*TiB"):
            source[0]


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
    match = "'label'.*test.*'b'.*0.*train.*1"
    with pytest.raises(ConfigError, match=match):
        require(train=train, test=test)
    with pytest.raises(ConfigError, match=match):
        Mixture({"train": train, "test": batches("test")}, {"train": 1, "test": 1}, 1).check()
    require(train=train, test=batches("test", classes=train.source))
    require(train=train, test=batches("test", classes=["a", "b", "d", "e"]))
    require(train=train, test=batches("test", without_labels))


# Names in files.


def test_only_plain_files_in_the_folder_are_opened(tmp_path):
    folder = tmp_path / "in"
    folder.mkdir()
    (tmp_path / SECRET).write_text("{}")
    (folder / "good").write_text("{}")
    (folder / "link").symlink_to("good")
    (folder / "out").symlink_to(f"../{SECRET}")
    (folder / "loop").symlink_to("loop")
    os.mkfifo(folder / "pipe")
    assert file_inside(folder, "link", "x") == f"{folder}/good"
    for name in (f"../{SECRET}", "out", f"{tmp_path}/{SECRET}", "https://host/good",
                 "good/../../outside", "hf://datasets/x"):
        with pytest.raises(ConfigError, match="x .*/in; "):
            file_inside(folder, name, "x")
    for name in ("pipe", "loop", "none", "."):
        with pytest.raises(ConfigError, match=f"/in/{name}, .* x "):
            file_inside(folder, name, "x")
    for name in (None, 7, "", "a\0", ["good"]):
        with pytest.raises(ConfigError, match=f"^x .* {re.escape(repr(name))} "):
            file_inside(folder, name, "x")
    deep = b'{"a": [' * 60 + b"]}" * 60
    for text in (b"[7]", b"{", b"\xff", b"[" * 10**5, b"", deep):
        (folder / "good").write_bytes(text)
        with pytest.raises(ConfigError, match="/good .*JSON"):
            json_inside(folder, "good")


@pytest.fixture
def saved(tmp_path):
    """Writes what `save_to_disk` would, by hand."""

    def save(name="d", rows=None, features=None, **state):
        folder = tmp_path / name
        folder.mkdir(parents=True)
        table = pyarrow.Table.from_pylist(rows or [{"n": n, "ids": [n, 2]} for n in range(7)])
        with pyarrow.ipc.new_stream(str(folder / "data.arrow"), table.schema) as file:
            file.write_table(table, 3)
        state = {"_data_files": [{"filename": "data.arrow"}], "_fingerprint": "f"} | state
        (folder / "state.json").write_text(json.dumps(state))
        (folder / "dataset_info.json").write_text(json.dumps({"features": features or {}}))
        return folder

    return save


def test_a_saved_dataset_is_read_by_its_number(saved):
    source = HuggingFaceDataset(str(saved()))
    source.check()
    assert [source[k]["ids"].tolist() for k in (6, 0, 3)] == [[6, 2], [0, 2], [3, 2]]
    (batch,) = FromSource(source, 7, shuffle=False).batches()
    assert batch["n"].tolist() == list(range(7))
    item = HuggingFaceDataset(str(saved("e", _format_columns=["n"])))
    assert item[5] == {"n": 5}
    with pytest.raises(IndexError):
        item[7]


@pytest.mark.parametrize("name", [
    "../d/data.arrow", "/etc/passwd", "https://host/x.arrow", "s3://b/x", "file:///etc/passwd",
    "out.arrow", "pipe.arrow", None, 7, "..", "",
])  # fmt: skip
def test_a_saved_dataset_names_no_file_elsewhere(name, saved, tmp_path):
    saved()
    folder = saved("e", _data_files=[{"filename": name}])
    (folder / "out.arrow").symlink_to("../d/data.arrow")
    os.mkfifo(folder / "pipe.arrow")
    with pytest.raises(ConfigError, match=r"state\.json|pipe\.arrow"):
        HuggingFaceDataset(str(folder)).check()


@pytest.mark.parametrize("state", [
    {"_data_files": 7}, {"_data_files": ["x", 3]}, {"_fingerprint": None}, {"_data_files": None},
    {"_data_files": [{"filename": {"a": 1}}]}, {"_data_files": []},
])  # fmt: skip
def test_a_state_of_another_shape_is_refused(state, saved):
    with pytest.raises(ConfigError, match=r"state\.json|/d "):
        HuggingFaceDataset(str(saved(**state))).check()


def test_an_image_of_a_row_is_made_of_its_bytes_alone(saved, tmp_path):
    good = encoded(Image.fromarray(upright()))
    (tmp_path / "x.png").write_bytes(good)
    images = [
        {"bytes": good, "path": "/etc/passwd"}, {"bytes": None, "path": f"{tmp_path}/x.png"},
        {"bytes": None, "path": "https://host/x.png"}, {"bytes": POSTSCRIPT, "path": None},
        {"bytes": None, "path": None}, None,
    ]
    kinds = {"image": {"_type": "Image"}, "sound": {"_type": "Audio"}}
    folder = saved(
        rows=[{"image": one, "sound": {"path": "http://host/x"}} for one in images], features=kinds
    )
    source = HuggingFaceDataset(str(folder), skip=("damaged",))
    np.testing.assert_array_equal(np.asarray(source[0]["image"]), upright())
    assert source[5]["image"] is None and source[0]["sound"] == {"path": "http://host/x"}
    for number in (1, 2, 4):
        with pytest.raises(BadExample, match=f"row {number}, .*image.*(x.png|None)"):
            source[number]
    with pytest.raises(BadExample, match="row 3.*'%!PS-Ado"):
        source[3]
    nested = saved("n", rows=[{"a": [{"b": images[1]}]}],
                   features={"a": {"_type": "List", "feature": {"b": kinds["image"]}}})
    with pytest.raises(BadExample, match=r"row 0.*/x\.png'"):
        HuggingFaceDataset(str(nested))[0]


def test_classes_of_splits_are_the_same(saved, tmp_path):
    for split, names in (("train", ["a", "b"]), ("test", ["b"]), ("more", ["a", "b"])):
        saved(f"d/{split}", features={"y": {"_type": "ClassLabel", "names": names}})
    write = (tmp_path / "d/dataset_dict.json").write_text
    write(json.dumps({"splits": ["train", "more"]}))
    HuggingFaceDataset(f"{tmp_path}/d", "more").check()
    write(json.dumps({"splits": ["train", "test"]}))
    with pytest.raises(ConfigError, match="'y'.*'b'.*0.*'test'"):
        HuggingFaceDataset(f"{tmp_path}/d", "test").check()
    write(json.dumps({"splits": ["../d/train"]}))
    with pytest.raises(ConfigError, match="dataset_dict.json.*../d/train/state.json"):
        HuggingFaceDataset(f"{tmp_path}/d", "../d/train").check()


# TFDS.


@pytest.fixture
def prepared(tmp_path):
    """Writes what TFDS would, by hand."""

    def prepare(features, template="{DATASET}-{SPLIT}.{FILEFORMAT}-{SHARD_X_OF_Y}", **info):
        folder = tmp_path / "ds/1.0.0"
        folder.mkdir(parents=True, exist_ok=True)
        split = {"name": "train", "numBytes": "1", "shardLengths": ["1"],
                 "filepathTemplate": template}
        info = {"name": "ds", "version": "1.0.0", "fileFormat": "array_record", "splits": [split],
                **info}
        (folder / "dataset_info.json").write_text(json.dumps(info))
        (folder / "features.json").write_text(json.dumps(features))
        return folder

    return prepare


CORE = "tensorflow_datasets.core.features"
EVIL = "evilmod.Feature"
INT = {"pythonClassName": f"{CORE}.scalar.Scalar",
       "tensor": {"shape": {}, "dtype": "int64", "encoding": "none"}}


def of_dict(**features):
    return {"pythonClassName": f"{CORE}.features_dict.FeaturesDict",
            "featuresDict": {"features": features}}


@pytest.mark.slow
@pytest.mark.parametrize("features", [
    {"pythonClassName": EVIL, "featuresDict": {"features": {}}},
    {"python_class_name": EVIL, "features_dict": {"features": {}}},
    of_dict(a={"pythonClassName": EVIL}),
    of_dict(a={"pythonClassName": f"{CORE}.sequence_feature.Sequence",
               "sequence": {"feature": {"pythonClassName": EVIL}}}),
    {"type": EVIL, "content": {}},
    {"type": f"{CORE}.features_dict.FeaturesDict", "content": {"a": {"type": EVIL, "content": {}}}},
    {"type": f"{CORE}.features_dict.FeaturesDict", "proto_cls": "tensorflow_datasets.FeaturesDict",
     "content": json.dumps({"features": {"a": {"pythonClassName": EVIL}}})},
    {"pythonClassName": f"{CORE}.features_dict.FeaturesDict",
     "jsonFeature": {"json": json.dumps({"a": {"type": EVIL, "content": {}}})}},
    {"pythonClassName": "os.path"}, {"pythonClassName": 7}, {"type": 7, "content": {}},
    {"pythonClassName": f"{CORE}.evilmod.Feature"}, {"pythonClassName": "evilmod"},
])  # fmt: skip
def test_tfds_imports_nothing_that_a_folder_names(features, prepared, tmp_path, monkeypatch):
    (tmp_path / "evilmod.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match="TFDS's"):
        Tfds(str(prepared(features)), "train").check()
    assert "evilmod" not in sys.modules


@pytest.mark.slow
@pytest.mark.parametrize("features", [
    {"type": f"{CORE}.class_label_feature.ClassLabel",
     "content": {"num_classes": None, "names_file": "/etc/passwd"}},
    {"type": f"{CORE}.features_dict.FeaturesDict", "content": 7}, of_dict(a=INT | {"tensor": 7}),
    {},
])  # fmt: skip
def test_other_features_of_tfds_are_refused(features, prepared):
    with pytest.raises(ConfigError, match="/ds/1.0.0.*(/etc/passwd|dataset_info.json)"):
        Tfds(str(prepared(features)), "train").check()


@pytest.mark.slow
def test_the_module_that_made_a_dataset_of_tfds_is_not_imported(prepared, tmp_path, monkeypatch):
    (tmp_path / "evilmod.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match="ds-train.*dataset_info.json"):
        Tfds(str(prepared(of_dict(a=INT), moduleName="evilmod")), "train").check()
    assert "evilmod" not in sys.modules


@pytest.mark.slow
@pytest.mark.parametrize("template", [
    "../{DATASET}", "/etc/{SPLIT}", "a/../../{SPLIT}", "out-{SPLIT}", "pipe-{SPLIT}",
])  # fmt: skip
def test_tfds_reads_no_file_elsewhere(template, prepared, tmp_path):
    folder = prepared(of_dict(a=INT), template)
    (tmp_path / "ds/ds").write_text("x")
    if template.startswith("out"):
        (folder / "out-train").symlink_to("../ds")
    if template.startswith("pipe"):
        os.mkfifo(folder / "pipe-train")
    name = template.split("/")[-1].format(DATASET="ds", SPLIT="train")
    with pytest.raises(ConfigError, match=f"names .*{name},.*/ds/1.0.0|/ds/1.0.0/{name},"):
        Tfds(str(folder), "train").check()


@pytest.mark.slow
@pytest.mark.parametrize("make", [
    os.mkfifo, lambda path: os.symlink("/etc/passwd", path), lambda path: os.symlink(path, path),
    lambda path: os.symlink("/etc", path),
])  # fmt: skip
def test_names_of_labels_of_tfds_lie_in_the_folder(make, prepared):
    label = {"pythonClassName": f"{CORE}.class_label_feature.ClassLabel",
             "classLabel": {"numClasses": "2"}}
    folder = prepared(of_dict(label=label))
    make(f"{folder}/label.labels.txt")
    with pytest.raises(ConfigError, match=r"labels\.txt"):
        Tfds(str(folder), "train").check()


@pytest.mark.slow
@needs_tensorflow
def test_images_of_tfds_are_read_as_others_are(tmp_path):
    import tensorflow_datasets as tfds

    exif = Image.Exif()
    exif[0x0112] = 3
    data = [
        encoded(Image.fromarray(np.ascontiguousarray(upright()[::-1, ::-1])), exif=exif),
        encoded(Image.fromarray(upright())), POSTSCRIPT,
    ]
    tfds.dataset_builders.store_as_tfds_dataset(
        name="images", version="1.0.0", data_dir=str(tmp_path), file_format="array_record",
        disable_shuffling=True,
        features=tfds.features.FeaturesDict({
            "n": np.int64, "some": tfds.features.Sequence(tfds.features.Image()),
            "image": tfds.features.Image(),
            "mask": tfds.features.Image(shape=(None, None, 1)),
        }),
        split_datasets={"train": [
            (n, {"n": n, "some": [one], "image": one, "mask": one}) for n, one in enumerate(data)
        ]},
    )
    source = Tfds(f"{tmp_path}/images/1.0.0", "train", skip=("damaged",))
    source.check()
    for _, item in source.read(0, 3):
        if isinstance(item, BadExample):
            assert "cannot be read: it begins b'%!PS-Ado'" in str(item)
            continue
        np.testing.assert_array_equal(item["image"], upright())
        np.testing.assert_array_equal(item["some"][0], upright())
        assert item["mask"].shape == (4, 3, 1)


# Arrays.


def npz(**members):
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w", zipfile.ZIP_DEFLATED) as file:
        for name, content in members.items():
            file.writestr(f"{name}.npy", content)
    return data.getvalue()


def npy(shape, dtype="'<i8'", body=b""):
    header = f"{{'descr': {dtype}, 'fortran_order': False, 'shape': {shape}, }}"
    header += " " * (63 - (len(header) + 10) % 64) + "\n"
    return b"\x93NUMPY\1\0" + struct.pack("<H", len(header)) + header.encode() + body


@pytest.mark.parametrize("data", [
    npy((10**12,), body=bytes(80)), npz(x=npy((10**12,), body=bytes(80))),
    npz(x=npy((10**9, 10**9, 10**9))), npy("(-1,)", body=bytes(8)),
    npy((2,), "'|O'", b"cos\nsystem"), npz(x=npy((1,), "'|O'", b"\x80\x04N.")),
    npy("(2,", body=bytes(16)), npy((2,), "[" * 900),
    npz(x=b"", y=b"none"), npy("()", body=bytes(8)), npz(), b"PK\3\4", b"\x93NUMPY",
])  # fmt: skip
def test_arrays_that_are_not_what_their_header_says_are_refused(data, tmp_path):
    for name in ("a.npy", "a.npz"):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(ConfigError, match=r"/a\.np[yz]"):
            NpyFiles(f"{tmp_path}/{name}").check()


def test_an_npz_that_unpacks_to_much_more_is_refused(tmp_path, monkeypatch):
    (tmp_path / "a.npz").write_bytes(npz(x=npy((10**5,), body=bytes(8 * 10**5))))
    NpyFiles(f"{tmp_path}/a.npz").check()
    monkeypatch.setattr(arrays, "_MOST_UNPACKED", 10**5)
    with pytest.raises(ConfigError, match=r"x.npy.*781.*KiB"):
        NpyFiles(f"{tmp_path}/a.npz", cache_dir=f"{tmp_path}/other").check()
