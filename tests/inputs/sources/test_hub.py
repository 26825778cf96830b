"""Datasets that TFDS and Hugging Face's library prepared: values, splits, and lost files."""

import pickle
import shutil
import sys

import numpy as np
import pyarrow
import pytest

from praxis_lite.core.errors import ConfigError
from praxis_lite.inputs import HuggingFaceDataset, Tfds
from praxis_lite.inputs.sources.faults import BadExample
from tests.support.marks import needs_tensorflow


@pytest.fixture(scope="module")
def rows():
    return [{"ids": list(range(n)), "x": [0.5] * n, "words": ["é"], "n": n} for n in range(13)]


@pytest.fixture
def saved(rows, tmp_path):
    import datasets

    features = datasets.Features(
        {
            "ids": datasets.List(datasets.Value("int32")),
            "n": datasets.Value("int64"),
            "x": datasets.List(datasets.Value("float32")),
            "words": datasets.List(datasets.Value("string")),
        }
    )
    item = datasets.Dataset.from_list(rows, features=features)
    item.save_to_disk(tmp_path / "one")
    datasets.DatasetDict(train=item, test=item.select(range(7))).save_to_disk(tmp_path / "dict")
    return tmp_path


@pytest.mark.slow
def test_lists_of_numbers_are_arrays_of_their_type_empty_ones_too(saved, rows):
    source = pickle.loads(pickle.dumps(HuggingFaceDataset(str(saved / "one"))))
    source.check()
    for n in np.random.default_rng(0).permutation(13).tolist():
        actual = source[n]
        assert (actual["ids"].dtype, actual["x"].dtype) == (np.int32, np.float32)
        assert {k: v.tolist() if k in ("ids", "x") else v for k, v in actual.items()} == rows[n]


@pytest.mark.slow
def test_a_fingerprint_of_hugging_faces_knows_no_folder(saved):
    item, split = HuggingFaceDataset(f"{saved}/one"), HuggingFaceDataset(f"{saved}/dict", "test")
    before = item.fingerprint(), item.parts()
    shutil.move(saved / "one", saved / "moved")
    moved = HuggingFaceDataset(f"{saved}/moved")
    assert (moved.fingerprint(), moved.parts()) == before
    assert split.fingerprint()["version"] != before[0]["version"] and len(split) == 7


@pytest.mark.slow
def test_wrong_splits_and_lost_files_of_hugging_faces_are_told(saved):
    with pytest.raises(ConfigError, match=r"\['test'.*'train'\]"):
        HuggingFaceDataset(f"{saved}/dict").check()
    with pytest.raises(ConfigError, match=r"HuggingFaceDataset\.split.*'train'.*/one has"):
        HuggingFaceDataset(f"{saved}/one", "train").check()
    with pytest.raises(ConfigError, match="/none is not a complete.*save_to_disk"):
        HuggingFaceDataset(f"{saved}/none").check()
    (file,) = (saved / "one").glob("*.arrow")
    file.write_bytes(file.read_bytes()[:700])
    with pytest.raises(ConfigError, match=r"/one cannot be read"):
        HuggingFaceDataset(f"{saved}/one").check()


@pytest.mark.slow
def test_images_are_decoded_and_sounds_are_not_and_a_damaged_row_is_named(tmp_path, monkeypatch):
    import datasets
    from PIL import Image

    features = datasets.Features(
        {
            "image": datasets.Image(),
            "sound": datasets.Audio(),
            "label": datasets.ClassLabel(names=["a", "b"]),
            "messages": [{"role": datasets.Value("string"), "name": datasets.Value("string")}],
        }
    )
    pixels = np.arange(36, dtype=np.uint8).reshape(4, 3, 3)
    Image.fromarray(pixels).save(tmp_path / "a.png")
    sound = {"bytes": b"no sound", "path": None}
    rows = [
        {
            "image": {"bytes": data, "path": None},
            "sound": sound,
            "label": 1,
            "messages": [{"role": "user", "name": None}],
        }
        for data in ((tmp_path / "a.png").read_bytes(), b"no image")
    ]
    table = pyarrow.Table.from_pylist(rows, schema=features.arrow_schema)
    datasets.Dataset(table).save_to_disk(tmp_path / "d")
    source = HuggingFaceDataset(f"{tmp_path}/d")
    assert source.classes_of_labels() == {"label": ("a", "b")}
    np.testing.assert_array_equal(np.asarray(source[0]["image"]), pixels)
    assert source[0]["sound"] == {"bytes": b"no sound"}  # Nested keys with null are left out.
    assert source[0]["messages"] == [{"role": "user"}]
    with pytest.raises(BadExample, match="/d, row 1, cannot be read"):
        source[1]
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(ConfigError, match=r"/d, for its images, .*pip install"):
        HuggingFaceDataset(f"{tmp_path}/d").rows  # noqa: B018


@pytest.mark.slow
def test_classes_of_splits_are_the_same(tmp_path):
    import datasets

    splits = {
        split: datasets.Dataset.from_dict(
            {"y": [0]}, features=datasets.Features({"y": datasets.ClassLabel(names=names)})
        )
        for split, names in (("train", ["a", "b"]), ("test", ["b"]))
    }
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "d")
    with pytest.raises(ConfigError, match="'b' of 'y'.*'test'.*'train'"):
        HuggingFaceDataset(f"{tmp_path}/d", "test").check()


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    import tensorflow_datasets as tfds

    folder = tmp_path_factory.mktemp("tfds")
    tfds.dataset_builders.store_as_tfds_dataset(
        name="numbers",
        version="1.0.0",
        data_dir=str(folder),
        file_format="array_record",
        features=tfds.features.FeaturesDict(
            {
                "n": np.int64,
                "x": tfds.features.Tensor(shape=(3,), dtype=np.float32),
                "text": tfds.features.Text(),
            }
        ),
        split_datasets={
            name: [(n, {"n": n, "x": [n] * 3, "text": f"é {n}"}) for n in range(count)]
            for name, count in (("train", 31), ("test", 7))
        },
    )
    return folder / "numbers/1.0.0"


@pytest.mark.slow
@needs_tensorflow
def test_examples_of_tfds_are_what_was_prepared(prepared):
    source = pickle.loads(pickle.dumps(Tfds(str(prepared), "train")))
    source.check()
    actual = sorted((source[n] for n in range(31)), key=lambda element: element["n"])
    for n, item in enumerate(actual):
        assert (int(item["n"]), item["x"].tolist(), item["text"].decode()) == (n, [n] * 3, f"é {n}")
    assert len(Tfds(str(prepared), "train[:10]")) == 10


@pytest.mark.slow
@needs_tensorflow
def test_a_fingerprint_of_tfds_knows_no_folder(prepared, tmp_path):
    shutil.copytree(prepared, tmp_path / "moved")
    item, moved = Tfds(str(prepared), "train"), Tfds(f"{tmp_path}/moved", "train")
    assert (item.fingerprint(), item.parts()) == (moved.fingerprint(), moved.parts())
    assert item.fingerprint()["version"] != Tfds(str(prepared), "test").fingerprint()["version"]


@pytest.mark.slow
@needs_tensorflow
def test_wrong_splits_and_lost_files_of_tfds_are_told(prepared, tmp_path):
    with pytest.raises(ConfigError, match=r"'tain'.*train"):
        Tfds(str(prepared), "tain").check()
    with pytest.raises(ConfigError, match=r"'train\[:x\]'.*'test'"):
        Tfds(str(prepared), "train[:x]").check()
    with pytest.raises(ConfigError, match=r"dataset_info\.json"):
        Tfds(str(tmp_path), "train").check()
    shutil.copytree(prepared, tmp_path / "cut")
    (file,) = (tmp_path / "cut").glob("numbers-train*")
    file.write_bytes(file.read_bytes()[:-4000])
    Tfds(f"{tmp_path}/cut", "test").check()
    with pytest.raises(ConfigError, match=r"numbers-train.*\(.+\).*31"):
        Tfds(f"{tmp_path}/cut", "train").check()
    file.unlink()
    with pytest.raises(ConfigError, match="numbers-train"):
        Tfds(f"{tmp_path}/cut", "train").check()


@pytest.mark.slow
@needs_tensorflow
def test_a_format_without_random_access_is_named(tmp_path):
    import tensorflow_datasets as tfds

    tfds.dataset_builders.store_as_tfds_dataset(
        name="numbers",
        version="1.0.0",
        data_dir=str(tmp_path),
        file_format="tfrecord",
        features=tfds.features.FeaturesDict({"n": np.int64}),
        split_datasets={"train": [(n, {"n": n}) for n in range(7)]},
    )
    with pytest.raises(ConfigError, match="tfrecord.*array_record"):
        Tfds(f"{tmp_path}/numbers/1.0.0", "train").check()
