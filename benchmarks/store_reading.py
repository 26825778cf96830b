"""Compares the speed of reading from a store with fsspec, Grain and TensorStore.

    pip install s3fs
    python benchmarks/store_reading.py [--mib 128] [--turns 5] [--latency_ms 20] [--mib_per_s 50]

A separate process serves a temporary folder with the S3 API. It can delay each answer
(--latency_ms) and limit the speed of each connection (--mib_per_s), as real stores do. All ways to
read the same data take turns. Each reads from the store in every turn, because local copies are
deleted before it. The script prints medians, and the ratio of our speed to that of each other way.
"""

import argparse
import contextlib
import http.server
import itertools
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.parse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import numpy as np

MIB = 1 << 20
NUM_FILES = 8
ROW_TOKENS = 1025
# A state of matrices and of small vectors, as in a model with unstacked layers.
MATRIX, NUM_VECTORS = (1024, 1024), 200


class FolderServer(http.server.BaseHTTPRequestHandler):
    """Serves the files in a folder as the objects of the bucket s3://bucket."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    folder, latency, speed = Path(), 0.0, 0.0

    def do_GET(self) -> None:
        time.sleep(self.latency)
        path, _, query = self.path.partition("?")
        file = self.folder / urllib.parse.unquote(path).removeprefix("/bucket").strip("/")
        arguments = dict(urllib.parse.parse_qsl(query, keep_blank_values=True))
        if "list-type" in arguments:
            return self.send(200, {}, self.listing(arguments))
        if not file.is_file():
            return self.send(404, {}, b"<Error><Code>NoSuchKey</Code></Error>")
        status = file.stat()
        headers = {
            "ETag": f'"{status.st_mtime_ns}"',
            "Last-Modified": time.strftime(
                "%a, %d %b %Y %H:%M:%S GMT", time.gmtime(status.st_mtime)
            ),
            "Accept-Ranges": "bytes",
        }
        start, stop, code = 0, status.st_size, 200
        if given := self.headers.get("Range", "").removeprefix("bytes="):
            first, _, last = given.partition("-")
            start = int(first) if first else max(0, stop - int(last))
            stop = min(stop, int(last) + 1) if first and last else stop
            headers["Content-Range"], code = f"bytes {start}-{stop - 1}/{status.st_size}", 206
        self.start(code, headers, stop - start)
        if self.command == "GET":
            with file.open("rb") as opened:
                step = stop - start if not self.speed else MIB
                for offset in range(start, stop, max(1, step)):
                    began = time.perf_counter()
                    num_bytes = min(step, stop - offset)
                    self.connection.sendfile(opened, offset, num_bytes)
                    if self.speed:
                        due = began + num_bytes / MIB / self.speed
                        time.sleep(max(0.0, due - time.perf_counter()))

    do_HEAD = do_GET

    def do_PUT(self) -> None:
        file = self.folder / urllib.parse.unquote(self.path).removeprefix("/bucket").strip("/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(self.rfile.read(int(self.headers["Content-Length"])))
        self.send(200, {"ETag": f'"{file.stat().st_mtime_ns}"'}, b"")

    def do_POST(self) -> None:
        """Deletes the listed objects. Clients send POST requests only for this."""
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        keys = re.findall("<Key>(.*?)</Key>", body)
        for key in keys:
            (self.folder / key).unlink(missing_ok=True)
        deleted = "".join(f"<Deleted><Key>{key}</Key></Deleted>" for key in keys)
        self.send(200, {}, f"<DeleteResult>{deleted}</DeleteResult>".encode())

    def listing(self, arguments: dict[str, str]) -> bytes:
        """Returns ListObjectsV2's answer, in which all objects fit."""
        prefix, delimiter = arguments.get("prefix", ""), arguments.get("delimiter", "")
        contents, prefixes = "", set()
        for file in sorted(self.folder.rglob("*")):
            key = str(file.relative_to(self.folder))
            if not file.is_file() or not key.startswith(prefix):
                continue
            rest = key[len(prefix) :]
            if delimiter and delimiter in rest:
                prefixes.add(prefix + rest.partition(delimiter)[0] + delimiter)
                continue
            status = file.stat()
            changed = time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(status.st_mtime))
            contents += (
                f"<Contents><Key>{key}</Key><LastModified>{changed}</LastModified>"
                f"<ETag>&quot;{status.st_mtime_ns}&quot;</ETag><Size>{status.st_size}</Size>"
                "</Contents>"
            )
        folders = "".join(
            f"<CommonPrefixes><Prefix>{name}</Prefix></CommonPrefixes>" for name in sorted(prefixes)
        )
        return (
            "<ListBucketResult><IsTruncated>false</IsTruncated>"
            f"{contents}{folders}</ListBucketResult>"
        ).encode()

    def start(self, code: int, headers: dict[str, str], length: int) -> None:
        self.send_response(code)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(length))
        self.end_headers()

    def send(self, code: int, headers: dict[str, str], content: bytes) -> None:
        self.start(code, headers, len(content))
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        pass


def serve(folder: str, latency_ms: float, mib_per_s: float) -> None:
    """Serves a folder until standard input is closed, and prints the port."""
    import threading

    handler = FolderServer
    handler.folder, handler.latency, handler.speed = Path(folder), latency_ms / 1000, mib_per_s
    server_class = http.server.ThreadingHTTPServer
    # With the default of 5, clients that open many connections wait for a second.
    server_class.request_queue_size = 128
    server = server_class(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(server.server_address[1], flush=True)
    sys.stdin.read()


@contextlib.contextmanager
def bucket(folder: Path, latency_ms: float, mib_per_s: float) -> Iterator[None]:
    """Starts a server, and sets the variables of its clients."""
    settings = json.dumps([str(folder), latency_ms, mib_per_s])
    with subprocess.Popen(
        [sys.executable, __file__, "--serve", settings],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as server:
        assert server.stdin is not None and server.stdout is not None
        os.environ |= {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{server.stdout.readline().strip()}",
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_REGION": "us-east-1",
            "AWS_DEFAULT_REGION": "us-east-1",
        }
        try:
            yield
        finally:
            server.stdin.close()


def write_data(folder: Path, mib: int) -> None:
    """Writes `mib` MiB of JSON lines, Parquet and ArrayRecord files each."""
    import pyarrow
    import pyarrow.parquet
    from array_record.python.array_record_module import ArrayRecordWriter

    rng = np.random.default_rng(0)
    words = [
        "".join(rng.choice(list("abcdefghijklmnopqrstuvwxyz"), rng.integers(2, 10)))
        for _ in range(5000)
    ]
    for number in range(NUM_FILES):
        texts, size = [], 0
        while size < mib * MIB / NUM_FILES:
            texts.append(" ".join(words[k] for k in rng.integers(0, 5000, 300)))
            size += len(texts[-1]) + len('{"text": ""}\n')
        lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
        (folder / f"{number}.jsonl").write_text(lines)
        # Without compression, so that the size is about the same.
        table = pyarrow.table({"text": texts})
        pyarrow.parquet.write_table(
            table,
            folder / f"{number}.parquet",
            compression="none",
            use_dictionary=False,
            row_group_size=1000,
        )
        writer = ArrayRecordWriter(str(folder / f"{number}.array_record"), "group_size:1")
        num_rows = mib * MIB // NUM_FILES // (ROW_TOKENS * 4)
        for row in rng.integers(0, 2**31, (num_rows, ROW_TOKENS), np.int32):
            writer.write(row.tobytes())
        writer.close()


def decoded(record: bytes) -> dict[str, np.ndarray]:
    """Returns the tokens in a record."""
    return {"ids": np.frombuffer(record, np.int32)}


def count(examples: Any) -> int:
    """Reads all examples, and returns their number."""
    return sum(1 for _ in examples)


def examples_of(source: Any) -> Iterator[Any]:
    """Yields the examples of one of our sources in order."""
    source.check()
    for index in range(len(source)):
        yield source[index]


def readers_of_data(local: Path) -> dict[str, dict[str, Callable[[], int]]]:
    """Returns the ways to read each format, keyed by format and name. Ours is the first."""
    import fsspec
    import grain
    import pyarrow.parquet

    from praxis_lite.inputs import ArrayRecords, FromSource, JsonLines, Parquet

    def filesystem() -> Any:
        return fsspec.filesystem("s3", skip_instance_cache=True)

    def fsspec_lines() -> int:
        s3, num = filesystem(), 0
        for path in sorted(s3.glob("s3://bucket/data/*.jsonl")):
            with s3.open(path, "rb") as lines:
                num += count(json.loads(line) for line in lines)
        return num

    def streamed_lines() -> int:
        import datasets

        files = [f"s3://bucket/data/{number}.jsonl" for number in range(NUM_FILES)]
        return count(datasets.load_dataset("json", data_files=files, split="train", streaming=True))

    def fsspec_parquet() -> int:
        s3, num = filesystem(), 0
        for path in sorted(s3.glob("s3://bucket/data/*.parquet")):
            with s3.open(path, "rb") as file:
                for batch in pyarrow.parquet.ParquetFile(file).iter_batches(1000):
                    num += count(batch.to_pylist())
        return num

    def grain_parquet() -> int:
        files = [f"s3://bucket/data/{number}.parquet" for number in range(NUM_FILES)]
        return count(grain.experimental.ParquetIterDataset(files))

    def fsspec_records() -> int:
        # Grain's and ArrayRecord's readers need local files.
        filesystem().get("s3://bucket/data/*.array_record", f"{local}/records/")
        files = sorted(map(str, (local / "records").glob("*")))
        source = grain.sources.ArrayRecordDataSource(files)
        return count(decoded(source[index]) for index in range(len(source)))

    records = "s3://bucket/data/*.array_record"

    def bounded_records() -> int:
        source = ArrayRecords(records, decode=decoded, cache_bytes=1 << 30)
        window = 2 * len(source) // NUM_FILES
        data = FromSource(source, 64, shuffle=True, shuffle_window=window)
        num_batches = -(-len(source) // 64)  # An epoch, and the first rows of the next one.
        count(itertools.islice(data.batches(), num_batches))
        return len(source)

    return {
        "JSON lines": {
            "ours": lambda: count(examples_of(JsonLines("s3://bucket/data/*.jsonl"))),
            "fsspec": fsspec_lines,
            "datasets, streaming": streamed_lines,
        },
        "Parquet": {
            "ours": lambda: count(examples_of(Parquet("s3://bucket/data/*.parquet"))),
            "fsspec and pyarrow": fsspec_parquet,
            "Grain": grain_parquet,
        },
        "ArrayRecord": {
            "ours": lambda: count(examples_of(ArrayRecords(records, decode=decoded))),
            "fsspec, then Grain": fsspec_records,
        },
        "ArrayRecord, shuffled, with cache_bytes": {
            "ours": bounded_records,
            "fsspec, then Grain": fsspec_records,
        },
    }


def state_of(mib: int) -> tuple[Any, Any, Any]:
    """Returns (state, layout, mesh) for a state of `mib` MiB on one device."""
    import jax
    from jax.sharding import PartitionSpec

    from praxis_lite.core import MeshConfig, StateLayout, TrainState, make_mesh

    shapes = {f"w{k}": MATRIX for k in range(mib * MIB // (4 * np.prod(MATRIX)))}
    shapes |= {f"b{k}": (1024,) for k in range(NUM_VECTORS)}
    layout = StateLayout(
        TrainState(
            jax.ShapeDtypeStruct((), np.int32),
            {"params": {k: jax.ShapeDtypeStruct(v, np.float32) for k, v in shapes.items()}},
            {},
        ),
        TrainState(PartitionSpec(), {"params": dict.fromkeys(shapes, PartitionSpec())}, {}),
        {"replica": 1, "data": 1, "mdl": 1},
    )
    mesh = make_mesh(MeshConfig(ici_mesh_shape=(1, 1, 1)))
    rng = np.random.default_rng(0)
    arrays = {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    state = TrainState(np.int32(1), {"params": arrays}, {})
    return jax.device_put(state, layout.shardings(mesh)), layout, mesh


def readers_of_checkpoint(mib: int, local: Path) -> dict[str, Callable[[], int]]:
    """Saves a state, and returns the ways to restore it."""
    import fsspec
    import jax
    import tensorstore as ts

    from praxis_lite.checkpoints.checkpoints import Checkpoints
    from praxis_lite.checkpoints.steps.save_settings import SaveSettings
    from praxis_lite.host.object_stores import StorePath, kvstore_context, kvstore_of

    state, layout, mesh = state_of(mib)
    url = "s3://bucket/checkpoints"
    data = {"next_batch": 0, "skipped": []}
    with Checkpoints(url, saving=SaveSettings()) as saved:
        saved.save(1, state, layout, data, is_last=True)
    names = sorted(state.mdl_vars["params"])

    def ours() -> int:
        with Checkpoints(url) as saved:
            restored = jax.block_until_ready(saved.restore(layout, mesh).state)
        return len(restored.mdl_vars["params"])

    def read(base: dict[str, Any]) -> int:
        context = ts.Context({"cache_pool": {"total_bytes_limit": 10**8}, **kvstore_context()})
        opening = [
            ts.open(
                {
                    "driver": "zarr",
                    "kvstore": {"driver": "ocdbt", "base": base, "path": f"params.{name}/"},
                },
                open=True,
                read=True,
                context=context,
            )
            for name in names
        ]
        reading = [array.result().read() for array in opening]
        arrays = [jax.device_put(array.result()) for array in reading]
        return len(jax.block_until_ready(arrays))

    def tensorstore() -> int:
        return read(kvstore_of(StorePath("s3", "bucket", "checkpoints/1/mdl_vars")))

    def with_fsspec() -> int:
        s3 = fsspec.filesystem("s3", skip_instance_cache=True)
        s3.get("s3://bucket/checkpoints/1/mdl_vars", f"{local}/step", recursive=True)
        return read({"driver": "file", "path": f"{local}/step/"})

    return {"ours": ours, "TensorStore": tensorstore, "fsspec, then TensorStore": with_fsspec}


def compare(name: str, readers: dict[str, Callable[[], int]], args: Any, local: Path) -> None:
    """Prints a line with the median speed of each reader, in MiB/s, and the ratios."""
    times: dict[str, list[float]] = {reader: [] for reader in readers}
    for turn in range(args.turns + 1):
        counts = set()
        for reader, act in readers.items():
            # A thread may still be downloading files of the next epoch.
            shutil.rmtree(local, ignore_errors=True)
            local.mkdir(exist_ok=True)
            start = time.perf_counter()
            counts.add(act())
            if turn:  # The first turn also imports packages.
                times[reader].append(time.perf_counter() - start)
        assert len(counts) == 1, counts
    speeds = {reader: args.mib / statistics.median(times[reader]) for reader in readers}
    ours = speeds["ours"]
    for reader, speed in speeds.items():
        print(f"| {name} | {reader} | {speed:,.0f} | {ours / speed:.2f} |", flush=True)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--mib", type=int, default=128)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--latency_ms", type=float, default=0)
    parser.add_argument("--mib_per_s", type=float, default=0, help="of a connection; 0: unlimited")
    parser.add_argument("--only", default="", help="part of the name of the rows")
    parser.add_argument("--serve", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(*args.serve)
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder, local = Path(temporary, "bucket"), Path(temporary, "cache")
        (folder / "data").mkdir(parents=True)
        local.mkdir()
        os.environ["XDG_CACHE_HOME"] = str(local)
        with bucket(folder, args.latency_ms, args.mib_per_s):
            write_data(folder / "data", args.mib)
            rows = readers_of_data(local)
            if args.only.lower() in "checkpoint":
                rows["checkpoint"] = readers_of_checkpoint(args.mib, local)
            print("| data | read by | MiB/s | our speed / this |\n| --- | --- | --- | --- |")
            for name, readers in rows.items():
                if args.only.lower() in name.lower():
                    compare(name, readers, args, local)


if __name__ == "__main__":
    main()
