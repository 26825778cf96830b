"""Files of NumPy arrays are mapped, known by their content, and refused if they hold no numbers."""

import zipfile

import numpy as np
import pytest

from praxis_lite.core.errors import ConfigError
from praxis_lite.inputs import NpyFiles


def test_an_array_is_mapped_and_its_rows_are_copies(tmp_path):
    x = np.random.default_rng(0).normal(size=(257, 7)).astype(np.float32)
    np.save(tmp_path / "a.npy", x[:100])
    np.save(tmp_path / "b.npy", x[100:])
    source = NpyFiles(f"{tmp_path}/*.npy", name="features")
    for n in np.random.default_rng(1).permutation(257).tolist():
        np.testing.assert_array_equal(source[n]["features"], x[n])
    source[3]["features"][:] = 0  # One's own: the file is not changed, nor what is read next.
    np.testing.assert_array_equal(source[3]["features"], x[3])
    mapped = source.opened(0)["features"]
    while mapped is not None and not isinstance(mapped, np.memmap):
        mapped = mapped.base
    assert mapped is not None


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_rows_of_arrays_of_one_file_go_together(save, tmp_path):
    save(tmp_path / "a.npz", x=np.arange(26).reshape(13, 2), y=np.arange(13) * 7)
    source = NpyFiles(f"{tmp_path}/a.npz")
    assert [(x["x"].tolist(), int(x["y"])) for x in map(source.__getitem__, range(13))] == [
        ([2 * n, 2 * n + 1], 7 * n) for n in range(13)
    ]


def test_content_decides_and_not_the_name(tmp_path):
    np.savez(tmp_path / "a.npz", y=np.arange(5))
    np.save(tmp_path / "b.npy", np.arange(7))
    (tmp_path / "a.npz").rename(tmp_path / "a.npy")
    (tmp_path / "b.npy").rename(tmp_path / "b.npz")
    assert NpyFiles(f"{tmp_path}/a.npy")[4] == {"y": 4}
    assert NpyFiles(f"{tmp_path}/b.npz")[6] == {"x": 6}


def test_what_is_no_file_of_arrays_is_told(tmp_path):
    np.save(tmp_path / "objects.npy", np.array([{"a": 1}], object), allow_pickle=True)
    np.savez(tmp_path / "objects.npz", x=np.array([{"a": 1}], object), allow_pickle=True)
    (tmp_path / "garbage.npy").write_bytes(b"garbage")
    (tmp_path / "empty.npy").write_bytes(b"")
    np.save(tmp_path / "cut.npy", np.arange(1000))
    data = (tmp_path / "cut.npy").read_bytes()
    (tmp_path / "cut.npy").write_bytes(data[:-1])
    np.savez(tmp_path / "damaged.npz", x=np.arange(1000))
    with zipfile.ZipFile(tmp_path / "damaged.npz") as file:
        place = file.getinfo("x.npy").header_offset + 2000
    data = bytearray((tmp_path / "damaged.npz").read_bytes())
    data[place] ^= 1
    (tmp_path / "damaged.npz").write_bytes(data)
    for path in tmp_path.glob("*.np?"):
        with pytest.raises(ConfigError, match=f"{path.name}"):
            NpyFiles(str(path)).check()


def test_arrays_without_rows_are_told(tmp_path):
    np.save(tmp_path / "none.npy", np.zeros((0, 3)))
    np.save(tmp_path / "one.npy", np.float32(7))
    with pytest.raises(ConfigError, match=r"\(2 files"):
        NpyFiles(f"{tmp_path}/*.npy").check()


def test_arrays_of_other_lengths_are_named(tmp_path):
    np.savez(tmp_path / "b.npz", x=np.arange(6), y=np.arange(5))
    with pytest.raises(ConfigError, match="b.npz.*{'x'.*6.*'y'.*5}"):
        NpyFiles(f"{tmp_path}/b.npz").check()
