"""Hostile checkpoints of Pax: refused in one paragraph; nothing outside is read, nothing aborts."""

import json
import os
import re
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.run.checkpoints.hostile_steps import (
    MANIFEST_MAGIC,
    NODE_MAGIC,
    encoded,
    frame,
    raw,
    repeated,
    varint,
    write,
)
from tests.run.checkpoints.looking import look
from tests.tools.pax.test_checkpoints import MADE_BY_PAX, STEPS

READ = """
from praxis_lite.tools.pax.checkpoints import read_pax_checkpoint

def read(folder):
    for array in read_pax_checkpoint(folder).values():
        pass
"""
EMB = "mdl_vars.params.lm.position_emb.emb_var"  # [8, 6] in chunks of [4, 3], float32.
# By name: what a case is made of, what changes it (its step, a folder outside), and the words.
CASES: dict[str, tuple[str, Callable[[Path, Path], None], str]] = {}


def hostile(form: str, words: str) -> Callable:
    """Registers a case."""

    def register(change: Callable[[Path, Path], None]) -> Callable:
        assert change.__name__ not in CASES
        CASES[change.__name__] = form, change, words
        return change

    return register


def zarray(step: Path, **settings: object) -> None:
    """Changes what the files say of one array."""
    path = step / "state" / EMB / ".zarray"
    path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))


# A directory per array.


@hostile("scanned_gda", "symbolic link")
def a_chunk_that_is_a_link(step, outside):
    chunk = step / "state" / EMB / "0.0"
    shutil.move(chunk, outside / "chunk")
    chunk.symlink_to(outside / "chunk")


@hostile("scanned_gda", "symbolic link")
def an_array_that_is_a_link(step, outside):
    shutil.move(step / "state" / EMB, outside / "array")
    (step / "state" / EMB).symlink_to(outside / "array")


@hostile("scanned_gda", "symbolic link")
def a_state_that_is_a_link(step, outside):
    shutil.move(step / "state", outside / "state")
    (step / "state").symlink_to(outside / "state")


@hostile("scanned_gda", "symbolic link")
def metadata_that_is_a_link(step, outside):
    shutil.move(step / "metadata/metadata", outside / "metadata")
    (step / "metadata/metadata").symlink_to(outside / "metadata")


@hostile("scanned_gda", "no regular file")
def a_chunk_that_is_a_pipe(step, outside):
    chunk = step / "state" / EMB / "0.0"
    chunk.unlink()
    os.mkfifo(chunk)


@hostile("scanned_gda", "no regular file")
def metadata_that_is_a_pipe(step, outside):
    (step / "metadata/metadata").unlink()
    os.mkfifo(step / "metadata/metadata")


@hostile("scanned_gda", "chunk .*/1.1 is missing")
def a_chunk_that_is_missing(step, outside):
    (step / "state" / EMB / "1.1").unlink()


@hostile("scanned_gda", "chunks, more than there are")
def a_shape_without_data(step, outside):
    zarray(step, shape=[2**40, 6])


@hostile("scanned_gda", "bytes cannot be in the")
def a_chunk_without_data(step, outside):
    zarray(step, shape=[2**30, 6], chunks=[2**30, 6])
    for name in ("0.1", "1.0", "1.1"):
        (step / "state" / EMB / name).unlink()


@hostile("scanned_gda", "compressor .*blosc")
def blosc(step, outside):
    zarray(step, compressor={"id": "blosc", "cname": "lz4", "clevel": 9, "shuffle": 1})


@hostile("scanned_gda", "dtype")
def arrays_of_objects(step, outside):
    zarray(step, dtype="|O", filters=[{"id": "pickle"}])


@hostile("scanned_gda", "has the shape None")
def zarr_3(step, outside):
    (step / "state" / EMB / ".zarray").unlink()
    (step / "state" / EMB / "zarr.json").write_text("{}")


@hostile("scanned_gda", "nested too deeply|is no JSON")
def a_deep_zarray(step, outside):
    (step / "state" / EMB / ".zarray").write_text("[" * 30_000 + "]" * 30_000)


@hostile("scanned_gda", "wants a window of")
def a_chunk_with_a_window_of_a_terabyte(step, outside):
    (step / "state" / EMB / "0.0").write_bytes(frame(repeated(0, 48, True), window=30 << 3))


@hostile("scanned_gda", "holds 1099511627776 bytes instead of 48")
def a_chunk_that_says_it_is_a_bomb(step, outside):
    bomb = frame(repeated(0, 2**33, last=True), size=2**40)
    (step / "state" / EMB / "0.0").write_bytes(bomb)


@hostile("scanned_gda", "cannot be read")
def a_chunk_that_is_a_bomb(step, outside):
    (step / "state" / EMB / "0.0").write_bytes(frame(repeated(0, 2**33, last=True)))


# What the metadata says.


def metadata(step: Path, shape: object) -> None:
    path = step / "metadata/metadata"
    actual = json.loads(path.read_text())
    layers = actual["train_state_metadata"]["mdl_vars"]["params"]["lm"]
    layers["position_emb"]["emb_var"]["unpadded_shape"] = shape
    path.write_text(json.dumps(actual))


@hostile("scanned_gda", "shape")
def true_shapes_of_text(step, outside):
    metadata(step, "76")


@hostile("scanned_gda", "shape")
def true_shapes_that_are_negative(step, outside):
    metadata(step, [-1, 6])


@hostile("scanned_gda", "shape")
def true_shapes_of_another_rank(step, outside):
    metadata(step, [7])


@hostile("scanned_flax", "shape")
def true_shapes_that_are_endless(step, outside):
    metadata(step, [2**40, 2**40])


@hostile("scanned_gda", "metadata")
def metadata_of_another_form(step, outside):
    (step / "metadata/metadata").write_text('{"train_state_metadata": {"mdl_vars": {"w": [7]}}}')


@hostile("scanned_gda", "nested too deeply|is no JSON")
def deep_metadata(step, outside):
    (step / "metadata/metadata").write_text('{"a":' * 100_000)


# One database.


def put_tree(state: Path, node: bytes, path: str = "d/" + "0" * 32) -> None:
    """Makes a node, in a data file of this name, all of the database's tree."""
    (state / "d" / ("0" * 32)).write_bytes(node)
    body = bytes(17) + varint(100) + varint(2**20) + b"\4\0"  # Its id and settings.
    body += b"\1" + varint(len(path)) + b"\0" + path.encode()
    body += b"\1\1\0" + b"\0\0" + varint(len(node)) + b"\0\0\0" + bytes(8) + b"\0"
    (state / "manifest.ocdbt").write_bytes(encoded(MANIFEST_MAGIC, body))


@hostile("unrolled_ocdbt", "holds more than 134217728 bytes")
def a_table_of_8_billion_files(step, outside):
    blocks = [raw(b"\0" + varint(2**33)), *repeated(0, 2**32, last=True)]
    put_tree(step / "state", encoded(NODE_MAGIC, frame(blocks), compression=1))


@hostile("unrolled_ocdbt", "ends too early|too long")
def keys_of_17_gigabytes(step, outside):
    count = 2**17
    lengths = b"\xff\x7f" * (count - 2) + b"\0"
    blocks = [raw(b"\0\0" + varint(count))]
    blocks += [raw(lengths[at : at + 2**17]) for at in range(0, len(lengths), 2**17)]
    blocks += [raw(varint(2**14 - 1)), *repeated(1, count - 1), *repeated(97, 2**17, last=True)]
    put_tree(step / "state", encoded(NODE_MAGIC, frame(blocks), compression=1))


@hostile("unrolled_ocdbt", "is not in its directory")
def data_files_above(step, outside):
    put_tree(step / "state", b"", "../../../../outside/d/" + "0" * 32)


@hostile("unrolled_ocdbt", "symbolic link")
def a_data_file_that_is_a_link(step, outside):
    node = next((step / "state" / "d").iterdir())
    shutil.move(node, outside / node.name)
    node.symlink_to(outside / node.name)


@hostile("unrolled_ocdbt", "chunk .*/1.1 is missing")
def a_value_that_is_missing(step, outside):
    write(step / "state", f"{EMB}/1.1", None)


@hostile("unrolled_ocdbt", "compressor .*gzip")
def gzip(step, outside):
    text = (ZARRAY | {"compressor": {"id": "gzip", "level": 9}})
    write(step / "state", f"{EMB}/.zarray", json.dumps(text).encode())


ZARRAY = {
    "zarr_format": 2, "shape": [8, 6], "chunks": [4, 3], "dtype": "<f4", "order": "C",
    "filters": None, "fill_value": None, "dimension_separator": ".",
}


# Msgpack.


@hostile("scanned_flax", "damaged|is refused")
def a_list_in_lists_without_end(step, outside):
    """Each says that it has as many as the file has bytes: 8 MB each, when it is made."""
    size = 2**20
    header = b"\xdd" + (size // 2).to_bytes(4, "big")
    (step / "state/checkpoint").write_bytes(header * 900 + b"\0" * (size - 900 * 5))


@hostile("scanned_flax", "symbolic link")
def a_msgpack_that_is_a_link(step, outside):
    shutil.move(step / "state/checkpoint", outside / "checkpoint")
    (step / "state/checkpoint").symlink_to(outside / "checkpoint")


@hostile("scanned_flax", "no regular file")
def a_msgpack_that_is_a_pipe(step, outside):
    (step / "state/checkpoint").unlink()
    os.mkfifo(step / "state/checkpoint")


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """The step that Pax wrote in each form, by its name."""
    root, actual = tmp_path_factory.mktemp("pax"), {}
    for name in STEPS:
        with zipfile.ZipFile(MADE_BY_PAX / f"{name}.zip") as file:
            file.extractall(root / name)
        [actual[name]] = (root / name / "checkpoints").iterdir()
    return actual


@pytest.fixture(scope="module")
def steps(good, tmp_path_factory):
    """The step of each case, by its name, beside a folder `outside`."""
    root, actual = tmp_path_factory.mktemp("hostile"), {}
    for name, (form, change, _) in CASES.items():
        actual[name] = root / name / "checkpoints" / good[form].name
        (root / name / "outside").mkdir(parents=True)
        shutil.copytree(good[form], actual[name])
        change(actual[name], root / name / "outside")
    return actual


@pytest.fixture(scope="module")
def looks(good, steps):
    return look(READ, good["scanned_flax"], [*good.values(), *steps.values()])


def test_what_pax_wrote_is_read(good, looks):
    for step in good.values():
        assert looks[str(step)]["how"] == "accepted", looks[str(step)]


@pytest.mark.parametrize("name", CASES)
def test_a_hostile_checkpoint_of_pax_is_refused_in_words(steps, looks, name):
    step = steps[name]
    told = looks[str(step)]
    assert told is not None, "the process ended"
    assert told["how"] == "refused", told["words"]
    assert re.search(CASES[name][2], told["words"]), told["words"]
    assert str(step) in told["words"]
    assert "\n" not in told["words"] and len(told["words"]) < 1500
    assert told["done"] == []
    for path in told["opened"]:
        inside = os.path.normpath(path).startswith(str(step)) and ".." not in path.split("/")
        assert inside or path.startswith(("/proc/", "/sys/fs/cgroup/")), path
