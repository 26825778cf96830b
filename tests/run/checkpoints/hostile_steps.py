"""Steps that someone else made: each with digests that fit, and something in it that must not pass.

A case changes a copy of a good step; `CASES` has each with the words that refuse it.
"""

import base64
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tensorstore as ts
import xxhash

from praxis_lite.run.checkpoints.files import zstd_frames
from praxis_lite.run.checkpoints.steps.manifest import COMMIT_JSON, MANIFEST_JSON, commit_text

MANIFEST_MAGIC, NODE_MAGIC = 0x0CDB3A2A, 0x0CDB20DE
EMB = "mdl_vars/params/emb"
# By name: what changes a step (its folder, its manifest, a folder outside), and the words.
Change = Callable[[Path, dict[str, Any], Path], bytes | None]
CASES: dict[str, tuple[Change, str]] = {}
HARMLESS: dict[str, Change] = {}


def hostile(words: str) -> Callable:
    """Registers a case; what it returns, if anything, is the text of manifest.json."""

    def register(change: Callable) -> Callable:
        assert change.__name__ not in CASES
        CASES[change.__name__] = change, words
        return change

    return register


def make(name: str, good: Path, folder: Path) -> Path:
    """Returns the step of a case, in a folder of its own beside a folder `outside`."""
    step_dir, outside = folder / name / "checkpoints" / good.name, folder / name / "outside"
    shutil.copytree(good, step_dir)
    outside.mkdir()
    manifest = json.loads((step_dir / MANIFEST_JSON).read_text())
    change = HARMLESS[name] if name in HARMLESS else CASES[name][0]
    text = change(step_dir, manifest, outside)
    commit(step_dir, manifest, text)
    return step_dir


def commit(step_dir: Path, manifest: dict[str, Any], text: bytes | None = None) -> None:
    """Makes size and digest of every file fit, through links too, and commits."""
    if text is None:
        named = {name: x for name, x in manifest["files"].items() if x.get("kept")}
        manifest["files"] = {**digests(step_dir), **named}
        text = json.dumps(manifest).encode()
    (step_dir / MANIFEST_JSON).write_bytes(text)
    (step_dir / COMMIT_JSON).write_text(commit_text(int(step_dir.name), text))


def digests(step_dir: Path) -> dict[str, dict[str, Any]]:
    """Returns size and digest of each file."""
    actual = {}
    for folder, _, names in os.walk(step_dir, followlinks=True):
        for name in names:
            path = Path(folder) / name
            relative = str(path.relative_to(step_dir))
            if relative not in (MANIFEST_JSON, COMMIT_JSON) and path.is_file():
                data = path.read_bytes()
                actual[relative] = {"size": len(data), "xxh3_128": xxhash.xxh3_128_hexdigest(data)}
    return actual


# OCDBT's files, written by hand.


def _crc_table() -> list[int]:
    table = []
    for value in range(256):
        for _ in range(8):
            value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)
        table.append(value)
    return table


_TABLE = _crc_table()


def encoded(magic: int, body: bytes, compression: int = 0, version: int = 0) -> bytes:
    """Returns a file of OCDBT: header, body, checksum."""
    head = magic.to_bytes(4, "big") + (len(body) + 18).to_bytes(8, "little")
    data = head + bytes([version, compression]) + body
    return data + crc32c(data)


def crc32c(data: bytes) -> bytes:
    """Returns the checksum of OCDBT's files, and of the indices of Zarr 3's shards."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _TABLE[(crc ^ byte) & 255] ^ crc >> 8
    return (crc ^ 0xFFFFFFFF).to_bytes(4, "little")


def body_of(data: bytes) -> bytes:
    """Returns the body of a file of OCDBT, decoded."""
    body = data[14:-4]
    return zstd_frames.decoded(body, 2**27) if data[13] == 1 else body


def varint(value: int) -> bytes:
    actual = b""
    while value > 127:
        actual += bytes([value & 127 | 128])
        value >>= 7
    return actual + bytes([value])


def frame(blocks: list[bytes], size: int | None = None, window: int = 0x58) -> bytes:
    """Returns a Zstandard frame; `size` is what its header claims."""
    text = b"" if size is None else size.to_bytes(8, "little")
    return b"\x28\xb5\x2f\xfd" + bytes([0xC0 if text else 0, window]) + text + b"".join(blocks)


def raw(data: bytes, last: bool = False) -> bytes:
    return (len(data) << 3 | last).to_bytes(3, "little") + data


def repeated(byte: int, count: int, last: bool = False) -> list[bytes]:
    """Returns blocks of `count` equal bytes."""
    sizes = [2**17] * (count // 2**17) + [count % 2**17]
    return [
        (size << 3 | 2 | (last and at == len(sizes) - 1)).to_bytes(3, "little") + bytes([byte])
        for at, size in enumerate(sizes)
    ]


def _node(item: Path) -> Path:
    root = body_of((item / "manifest.ocdbt").read_bytes())
    at = root.index(b"\x22\x00d/") + 2
    return item / root[at : at + 34].decode()


def put_node(item: Path, node: bytes) -> None:
    """Makes `node` the only node of the tree."""
    path, manifest = _node(item), item / "manifest.ocdbt"
    old = varint(path.stat().st_size)
    body = body_of(manifest.read_bytes())
    assert body.count(old) == 2  # The length, and in the statistics.
    path.write_bytes(node)
    manifest.write_bytes(encoded(MANIFEST_MAGIC, body.replace(old, varint(len(node)))))


def _put_root(item: Path, path: str, base_length: int = 0) -> None:
    """Makes the manifest refer to another data file."""
    manifest = item / "manifest.ocdbt"
    body, old = body_of(manifest.read_bytes()), str(_node(item).relative_to(item)).encode()
    new = varint(len(path)) + varint(base_length) + path.encode()
    manifest.write_bytes(encoded(MANIFEST_MAGIC, body.replace(b"\x22\x00" + old, new)))


def write(item: Path, key: str, value: bytes | None) -> None:
    """Sets a key of the database, as TensorStore does."""
    kvstore = ts.KvStore.open({"driver": "ocdbt", "base": f"file://{item}/"}).result()
    if value is None:
        del kvstore[key]
    else:
        kvstore[key] = value


def _zarray(step_dir: Path, **settings: Any) -> None:
    """Changes what the database says of `emb`."""
    item = step_dir / "mdl_vars"
    kvstore = ts.KvStore.open({"driver": "ocdbt", "base": f"file://{item}/"}).result()
    actual = json.loads(kvstore["params.emb/.zarray"])
    write(item, "params.emb/.zarray", json.dumps({**actual, **settings}).encode())


def _json(path: Path, change: Callable[[Any], Any]) -> None:
    actual = json.loads(path.read_text())
    path.write_text(json.dumps(change(actual) or actual))


# Folders.


@hostile("symbolic link|no regular file")
def link_to_a_file(step_dir, manifest, outside):
    node = _node(step_dir / "mdl_vars")
    shutil.move(node, outside / node.name)
    node.symlink_to(outside / node.name)


@hostile("symbolic link|no regular file|missing")
def link_to_a_folder(step_dir, manifest, outside):
    folder = step_dir / "mdl_vars" / "d"
    shutil.move(folder, outside / "d")
    folder.symlink_to(outside / "d")


@hostile("symbolic link|no regular file|missing")
def link_to_an_item(step_dir, manifest, outside):
    shutil.move(step_dir / "opt_states", outside / "opt_states")
    (step_dir / "opt_states").symlink_to("../../outside/opt_states")


@hostile("symbolic link")
def link_to_a_step(step_dir, manifest, outside):
    commit(step_dir, manifest)
    shutil.move(step_dir, outside / "3")
    step_dir.symlink_to(outside / "3")


@hostile("no regular file")
def named_pipe(step_dir, manifest, outside):
    name = "mdl_vars/d/" + "0" * 32
    os.mkfifo(step_dir / name)
    manifest["files"][name] = {"size": 0, "xxh3_128": "", "kept": True}


@hostile(r"'mdl_vars/params.emb/.zarray' that .* of another layout \(plain Zarr files\)")
def plain_zarr(step_dir, manifest, outside):
    (step_dir / "mdl_vars" / "params.emb").mkdir()
    (step_dir / "mdl_vars" / "params.emb" / ".zarray").write_text("{}")


@hostile(r"of another layout \(Zarr 3 files\)")
def zarr_3(step_dir, manifest, outside):
    (step_dir / "mdl_vars" / "zarr.json").write_text("{}")


@hostile(r"of another layout \(NumPy\)")
def numpy_pickles(step_dir, manifest, outside):
    (step_dir / "mdl_vars" / "arrays.npz").write_bytes(b"cos\nsystem\n")


@hostile(r"of another layout \(Flax's or T5X's msgpack\)")
def msgpack(step_dir, manifest, outside):
    (step_dir / "mdl_vars" / "checkpoint").write_bytes(b"\xc7")


@hostile("format 1 of an earlier praxis_lite")
def format_1(step_dir, manifest, outside):
    (step_dir / "manifest").mkdir()
    (step_dir / "manifest" / "metadata").write_text("{}")
    return b"{}"  # Removed again by the runner of the cases.


@hostile("too deep|does not write")
def a_deep_folder(step_dir, manifest, outside):
    folder = step_dir / "mdl_vars" / "/".join("d" * 90)
    folder.mkdir(parents=True)
    (folder / ("0" * 32)).write_text("")


# manifest.json.


@hostile(r"\.\./\.\./outside/secret is missing")
def files_above(step_dir, manifest, outside):
    (outside / "secret").write_text("")
    manifest["files"]["../../outside/secret"] = {"size": 0, "xxh3_128": "", "kept": True}


@hostile("/etc/hostname is missing")
def files_with_absolute_names(step_dir, manifest, outside):
    manifest["files"]["/etc/hostname"] = {"size": 0, "xxh3_128": "", "kept": True}


@hostile("is no JSON|has changed|nested")
def a_deep_manifest(step_dir, manifest, outside):
    text = json.dumps({**manifest, "files": digests(step_dir)})
    return text.replace('"data": {', '"data": {"x": ' + "[" * 10**5 + "]" * 10**5 + ", ").encode()


@hostile("its metrics are no numbers")
def metrics_that_are_no_numbers(step_dir, manifest, outside):
    manifest["metrics"] = {"heldout/loss": ["x"]}


@hostile("its 'best' is no BestCheckpoints")
def a_best_of_other_fields(step_dir, manifest, outside):
    manifest["best"] = {"metric": "heldout/loss", "__class__": "os.system"}


@hostile("'mdl_vars/../x'")
def leaves_above(step_dir, manifest, outside):
    manifest["leaves"]["mdl_vars/../x"] = manifest["leaves"].pop(EMB)


@hostile("'/etc/passwd', which is in no item")
def absolute_leaves(step_dir, manifest, outside):
    manifest["leaves"]["/etc/passwd"] = manifest["leaves"].pop(EMB)


@hostile("not described as one")
def negative_shapes(step_dir, manifest, outside):
    manifest["leaves"][EMB]["shape"] = [-1, 7]


@hostile("padded to a smaller one")
def paddings_that_cut(step_dir, manifest, outside):
    manifest["leaves"][EMB]["shape"] = [41, 7]


@hostile("which no computer can hold")
def absurd_shapes(step_dir, manifest, outside):
    shape = [2**40, 2**40]
    manifest["leaves"][EMB] |= {"shape": shape, "padded_shape": shape}
    _zarray(step_dir, shape=shape)


@hostile(r"has the shape \[1180591620717411303424")
def endless_shapes(step_dir, manifest, outside):
    manifest["leaves"][EMB] |= {"shape": [2**70, 7], "padded_shape": [2**70, 8]}


@hostile("chunks, more than there are")
def large_shapes_without_data(step_dir, manifest, outside):
    shape = [2**40, 8]
    manifest["leaves"][EMB] |= {"shape": shape, "padded_shape": shape}
    _zarray(step_dir, shape=shape)


@hostile("cannot be in the .* bytes stored")
def large_chunks_without_data(step_dir, manifest, outside):
    shape, item = [2**30, 8], step_dir / "mdl_vars"
    manifest["leaves"][EMB] |= {"shape": shape, "padded_shape": shape}
    _zarray(step_dir, shape=shape, chunks=shape)
    for row in range(4):
        for column in range(2):
            write(item, f"params.emb/{row}.{column}", None)
    write(item, "params.emb/0.0", frame([*repeated(0, 2**20, last=True)]))


@hostile("has the shape")
def too_many_dims(step_dir, manifest, outside):
    manifest["leaves"][EMB] |= {"shape": [1] * 99, "padded_shape": [1] * 99}


@hostile("has the dtype 'object'")
def dtypes_of_objects(step_dir, manifest, outside):
    manifest["leaves"][EMB]["dtype"] = "object"
    _zarray(step_dir, dtype="|O", filters=[{"id": "pickle"}])


# OCDBT's tree.


@hostile(r"'\.\./\.\./\.\./outside/d/0{32}' is not in its directory")
def data_files_above(step_dir, manifest, outside):
    item = step_dir / "mdl_vars"
    (outside / "d").mkdir()
    shutil.copy(_node(item), outside / "d" / ("0" * 32))
    _put_root(item, "../../../outside/d/" + "0" * 32)


@hostile(r"'\.\./\.\./\.\./outside/d/0{32}' is not in its directory")
def base_paths_above(step_dir, manifest, outside):
    item = step_dir / "mdl_vars"
    (outside / "d").mkdir()
    shutil.copy(_node(item), outside / "d" / ("0" * 32))
    _put_root(item, "../../../outside/d/" + "0" * 32, base_length=17)


@hostile("is not in its directory")
def absolute_data_files(step_dir, manifest, outside):
    item = step_dir / "mdl_vars"
    shutil.copy(_node(item), outside / "node")
    _put_root(item, str(outside / "node"))


@hostile("which there is not")
def data_files_that_are_missing(step_dir, manifest, outside):
    _put_root(step_dir / "mdl_vars", "d/" + "0" * 32)


@hostile("holds more than 134217728 bytes")
def a_table_of_8_billion_files(step_dir, manifest, outside):
    blocks = [raw(b"\0" + varint(2**33)), *repeated(0, 2**32, last=True)]
    put_node(step_dir / "mdl_vars", encoded(NODE_MAGIC, frame(blocks), compression=1))


@hostile("ends too early")
def a_table_of_8_billion_files_uncompressed(step_dir, manifest, outside):
    put_node(step_dir / "mdl_vars", encoded(NODE_MAGIC, b"\0" + varint(2**33) + b"\0" * 2000))


@hostile("ends too early|too long")
def keys_of_17_gigabytes(step_dir, manifest, outside):
    """A node of 260 kB: 2^17 keys of 16 KiB each, but for the last."""
    count = 2**17
    lengths = b"\xff\x7f" * (count - 2) + b"\0"
    blocks = [raw(b"\0\0" + varint(count))]
    blocks += [raw(lengths[at : at + 2**17]) for at in range(0, len(lengths), 2**17)]
    blocks += [raw(varint(2**14 - 1)), *repeated(1, count - 1), *repeated(97, 2**17, last=True)]
    put_node(step_dir / "mdl_vars", encoded(NODE_MAGIC, frame(blocks), compression=1))


@hostile("goes on from more than there is")
def keys_that_go_on_from_nothing(step_dir, manifest, outside):
    body = b"\0\0" + varint(2) + varint(9) + b"\1\1" + b"ab" + b"\1\1" + b"\0\0" + b"xy"
    put_node(step_dir / "mdl_vars", encoded(NODE_MAGIC, body))


@hostile("data file goes on from more than there is")
def names_that_go_on_from_nothing(step_dir, manifest, outside):
    body = b"\0" + varint(2) + varint(9999) + varint(34) + b"\0\0\0" + b"d/" + b"0" * 32
    put_node(step_dir / "mdl_vars", encoded(NODE_MAGIC, body + bytes(99)))


@hostile("not in order")
def keys_in_no_order(step_dir, manifest, outside):
    body = b"\0\0" + varint(2) + b"\0" + b"\1\1" + b"ba" + b"\1\1" + b"\0\0" + b"xy"
    put_node(step_dir / "mdl_vars", encoded(NODE_MAGIC, body))


@hostile("of another height|two places of the tree")
def a_node_that_is_its_own_child(step_dir, manifest, outside):
    item = step_dir / "mdl_vars"
    name = str(_node(item).relative_to(item)).encode()
    body = b"\1" + varint(1) + b"\x22\0" + name + b"\1" + b"\1" + b"\0" + b"a"
    body += b"\0" + b"\0" + varint(999) + b"\0\0\0"
    put_node(item, encoded(NODE_MAGIC, body))


@hostile("which has")
def values_beyond_the_file(step_dir, manifest, outside):
    item = step_dir / "mdl_vars"
    name = str(_node(item).relative_to(item)).encode()
    body = b"\0" + varint(1) + b"\x22\0" + name + b"\1" + b"\1" + b"a"
    put_node(item, encoded(NODE_MAGIC, body + varint(2**62) + b"\1" + b"\0" + varint(5)))


@hostile("versions in other files")
def a_manifest_of_numbers(step_dir, manifest, outside):
    path = step_dir / "mdl_vars" / "manifest.ocdbt"
    body = bytearray(body_of(path.read_bytes()))
    body[16] = 1
    path.write_bytes(encoded(MANIFEST_MAGIC, bytes(body)))


@hostile("CRC-32C|checksum")
def a_checksum_that_is_wrong(step_dir, manifest, outside):
    node = _node(step_dir / "mdl_vars")
    data = bytearray(node.read_bytes())
    data[-1] ^= 1
    node.write_bytes(data)


@hostile("another length than it has|does not begin")
def a_manifest_that_is_cut(step_dir, manifest, outside):
    path = step_dir / "mdl_vars" / "manifest.ocdbt"
    path.write_bytes(path.read_bytes()[:40])


@hostile("version of the format")
def a_format_of_tomorrow(step_dir, manifest, outside):
    path = step_dir / "mdl_vars" / "manifest.ocdbt"
    path.write_bytes(encoded(MANIFEST_MAGIC, body_of(path.read_bytes()), version=1))


# Arrays.


@hostile(r"stored with 'shape' \[80, 8\]")
def arrays_of_another_shape(step_dir, manifest, outside):
    _zarray(step_dir, shape=[80, 8])


@hostile(r"chunks of \[99999999, 99999999\]")
def chunks_larger_than_their_array(step_dir, manifest, outside):
    _zarray(step_dir, chunks=[99999999, 99999999])


@hostile("not as Zarr 2|chunks of")
def chunks_of_nothing(step_dir, manifest, outside):
    _zarray(step_dir, chunks=[0, 4])


@hostile("compressor .*blosc")
def blosc(step_dir, manifest, outside):
    _zarray(step_dir, compressor={"id": "blosc", "cname": "lz4", "clevel": 9, "shuffle": 1})


@hostile("compressor .*gzip")
def gzip(step_dir, manifest, outside):
    _zarray(step_dir, compressor={"id": "gzip", "level": 9})


@hostile("stored with 'dtype'")
def arrays_of_objects(step_dir, manifest, outside):
    _zarray(step_dir, dtype="|O")


@hostile("stored with 'filters'")
def filters(step_dir, manifest, outside):
    _zarray(step_dir, filters=[{"id": "pickle"}])


@hostile("stored with 'zarr_format' 3")
def arrays_of_zarr_3(step_dir, manifest, outside):
    _zarray(step_dir, zarr_format=3)


@hostile("the chunk params.emb/3.1 is missing")
def chunks_that_are_missing(step_dir, manifest, outside):
    write(step_dir / "mdl_vars", "params.emb/3.1", None)


@hostile("'params.other' that is not in manifest.json")
def arrays_that_nobody_knows(step_dir, manifest, outside):
    write(step_dir / "mdl_vars", "params.other/.zarray", b"{}")


@hostile("nested too deeply|is no JSON")
def a_deep_zarray(step_dir, manifest, outside):
    write(step_dir / "mdl_vars", "params.emb/.zarray", b"[" * 30_000 + b"]" * 30_000)


@hostile("holds 1099511627776 bytes instead of 160")
def a_chunk_that_says_it_is_a_bomb(step_dir, manifest, outside):
    bomb = frame(repeated(0, 2**33, last=True), size=2**40)
    write(step_dir / "mdl_vars", "params.emb/0.0", bomb)


@hostile("cannot be read|holds")
def a_chunk_that_is_a_bomb(step_dir, manifest, outside):
    bomb = frame(repeated(0, 2**33, last=True))
    write(step_dir / "mdl_vars", "params.emb/0.0", bomb)


@hostile("wants a window of")
def a_chunk_with_a_window_of_a_terabyte(step_dir, manifest, outside):
    write(step_dir / "mdl_vars", "params.emb/0.0", frame(repeated(0, 160, True), window=30 << 3))


@hostile("wants a dictionary")
def a_chunk_with_a_dictionary(step_dir, manifest, outside):
    data = bytearray(frame(repeated(0, 160, last=True)))
    data[4] |= 1
    write(step_dir / "mdl_vars", "params.emb/0.0", bytes(data))


@hostile("is not one")
def a_chunk_of_another_codec(step_dir, manifest, outside):
    write(step_dir / "mdl_vars", "params.emb/0.0", b"\x1f\x8b" + b"\0" * 200)


# Orbax's JSON, of which nothing is read.


def harmless(change: Callable) -> Callable:
    """Registers a step that is read as if nothing had been changed."""
    assert change.__name__ not in CASES | HARMLESS
    HARMLESS[change.__name__] = change
    return change


def metadata(change: Callable[[dict[str, Any]], Any]) -> Callable:
    """Registers a harmless change of _METADATA."""

    def case(step_dir, manifest, outside):
        _json(step_dir / "mdl_vars" / "_METADATA", change)

    case.__name__ = change.__name__
    return harmless(case)


def _emb(actual: dict[str, Any]) -> dict[str, Any]:
    return actual["tree_metadata"]["('params', 'emb')"]


@metadata
def metadata_of_zarr_3(actual):
    actual["use_zarr3"] = True


@metadata
def metadata_of_plain_files(actual):
    actual["use_ocdbt"] = False


@metadata
def metadata_with_modules(actual):
    actual["value_metadata_tree"] = json.dumps(
        {"category": "namedtuple", "module": "os", "clazz": "system", "entries": []}
    )


@metadata
def metadata_of_ones_own(actual):
    actual["custom_metadata"] = {"__reduce__": "os.system"}


@metadata
def metadata_of_other_types(actual):
    _emb(actual)["value_metadata"]["value_type"] = "os.system"


@metadata
def metadata_of_absurd_shapes(actual):
    _emb(actual)["value_metadata"]["write_shape"] = [2**80, 1]


@metadata
def metadata_of_an_endless_list(actual):
    _emb(actual)["key_metadata"][1] = {"key": "99999999", "key_type": 1}


@metadata
def metadata_of_keys_above(actual):
    _emb(actual)["key_metadata"][1]["key"] = "../../emb"


@metadata
def metadata_that_says_it_twice(actual):
    actual["tree_metadata"]["again"] = _emb(actual)


@metadata
def metadata_without_an_array(actual):
    actual["tree_metadata"] = {
        key: x for key, x in actual["tree_metadata"].items() if "emb" not in key
    }


@hostile("have one name where they are stored")
def two_arrays_of_one_name(step_dir, manifest, outside):
    """`layer.b` beside `layer/b`."""
    leaf = manifest["leaves"]["mdl_vars/params/layer/b"]
    manifest["leaves"]["mdl_vars/params/layer.b"] = leaf


@harmless
def deep_metadata(step_dir, manifest, outside):
    (step_dir / "mdl_vars" / "_METADATA").write_text("[" * 10**6)


@harmless
def random_keys(step_dir, manifest, outside):
    def change(actual):
        item = actual["array_metadatas"][0]["array_metadata"]
        item["ext_metadata"] = {"random_key_impl": "rbg"}

    _json(step_dir / "mdl_vars" / "array_metadatas" / "process_0", change)


@harmless
def another_sharding(step_dir, manifest, outside):
    def change(actual):
        key = base64.b64encode(b"params.emb").decode()
        actual[key] = actual[key].replace("NamedSharding", "PositionalSharding")

    _json(step_dir / "mdl_vars" / "_sharding", change)


@harmless
def a_sharding_of_nothing(step_dir, manifest, outside):
    _json(step_dir / "mdl_vars" / "_sharding", lambda actual: {**actual, "%%%": "{}"})


@harmless
def other_handlers(step_dir, manifest, outside):
    handlers = {"item_handlers": {"mdl_vars": "os.system"}}
    _json(step_dir / "_CHECKPOINT_METADATA", lambda actual: handlers)
