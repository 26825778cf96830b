"""Trains on a dataset in an object store that is larger than the disk space for local copies.

    python benchmarks/bounded_store.py [--data_gib 20] [--cache_gib 1]

A local server with the S3 API generates the files when they are requested. The script trains a
linear model for one epoch, and measures the disk space of the local copies every 20 ms. It checks
that each row was read, and that the record of the job contains every example exactly once. It also
measures how fast one thread downloads the same files into memory with obstore.
"""

import argparse
import http.server
import io
import os
import re
import resource
import tempfile
import threading
import time
import urllib.parse
from pathlib import Path

import fiddle as fdl
import jax
import jax.numpy as jnp
import numpy as np
import optax

import praxis_lite
from praxis_lite import Experiment, MeshConfig, RunConfig, register
from praxis_lite.core import Learner
from praxis_lite.experiment.recorded_examples import proof_of_examples
from praxis_lite.host.object_stores import StorePath
from praxis_lite.inputs import FromSource, NpyFiles
from praxis_lite.job.job_dir import JobDir
from praxis_lite.models import FunctionModel
from praxis_lite.tasks.loss import LossTask

WIDTH, ROWS_PER_FILE, BATCH_SIZE = 16_384, 1024, 512
NUMBERS_OF_READS = np.zeros(0, np.int64)  # Set by `main`.


class GeneratedFiles(http.server.BaseHTTPRequestHandler):
    """Answers listings and reads of the .npy files in s3://bucket/data.

    Row n of the dataset has the value n at index 0. Otherwise, all files contain the same noise.
    """

    protocol_version = "HTTP/1.1"
    num_files, num_bytes_sent = 0, 0
    file = io.BytesIO()
    noise = np.random.default_rng(0).normal(size=(ROWS_PER_FILE, WIDTH)).astype(np.float32)
    np.save(file, noise)
    content = file.getbuffer()
    size = len(content)
    rows = np.frombuffer(content[size - noise.nbytes :], np.float32).reshape(noise.shape)
    lock = threading.Lock()

    def do_GET(self):
        path, _, query = self.path.partition("?")
        if "list-type" in query:
            return self.send(200, self.listing(urllib.parse.parse_qs(query)), {})
        number = int(re.fullmatch(r"/bucket/data/(\d+)\.npy", path)[1])
        start, stop, status = 0, self.size, 200
        if byte_range := re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", "")):
            start, stop, status = int(byte_range[1]), int(byte_range[2]) + 1, 206
        headers = {"ETag": f'"{number}"', "Last-Modified": "Mon, 30 Nov 2026 00:00:00 GMT"}
        headers["Content-Range"] = f"bytes {start}-{stop - 1}/{self.size}"
        with self.lock:
            self.rows[:, 0] = np.arange(number * ROWS_PER_FILE, (number + 1) * ROWS_PER_FILE)
            content = bytes(self.content[start:stop])
            GeneratedFiles.num_bytes_sent += len(content)
        self.send(status, content, headers)

    def listing(self, query):
        start = int(query.get("continuation-token", ["0"])[0])
        stop = min(start + 1000, self.num_files)
        contents = "".join(
            f"<Contents><Key>data/{k:05}.npy</Key><LastModified>2026-11-30T00:00:00.000Z"
            f"</LastModified><ETag>{k}</ETag><Size>{self.size}</Size></Contents>"
            for k in range(start, stop)
        )
        more = f"<NextContinuationToken>{stop}</NextContinuationToken>" * (stop < self.num_files)
        return f"<ListBucketResult>{contents}{more}</ListBucketResult>".encode()

    def send(self, status, content, headers):
        self.send_response(status)
        for name, value in (headers | {"Content-Length": len(content)}).items():
            self.send_header(name, str(value))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_):
        pass


def features(example):
    """Returns 64 values and the mean of a row, and counts that the row was read."""
    row = example["x"]
    NUMBERS_OF_READS[int(row[0])] += 1
    return {"inputs": row[1:65], "targets": row[1:].mean()}


def init(key):
    """Returns the params of a linear model."""
    return {"w": jnp.zeros(64), "b": jnp.zeros(())}


def loss(params, inputs, key):
    """Returns the squared error of each row."""
    return (inputs["inputs"] @ params["w"] + params["b"] - inputs["targets"]) ** 2


@register
class Means(Experiment):
    """Predicts the mean of a row."""

    cache_bytes = 1 << 30
    shuffle_window = 6 * ROWS_PER_FILE

    def mesh(self):
        return fdl.Config(MeshConfig, ici_mesh_shape=(1, 1, 1))

    def task(self):
        learner = fdl.Config(Learner, optimizer=fdl.Partial(optax.adamw), learning_rate=1e-3)
        return fdl.Config(LossTask, fdl.Config(FunctionModel, init), loss, learner)

    def datasets(self):
        source = fdl.Config(NpyFiles, "s3://bucket/data/*.npy", cache_bytes=self.cache_bytes)
        return {
            "train": fdl.Config(
                FromSource,
                source,
                BATCH_SIZE,
                transform=features,
                shuffle=True,
                shuffle_window=self.shuffle_window,
            )
        }

    def run(self):
        return fdl.Config(RunConfig, num_train_steps=100)


def disk_bytes(folder):
    """Returns the disk space of all files in a folder."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.stat(os.path.join(parent, name)).st_blocks * 512
            except FileNotFoundError:
                continue
    return total


def main():
    """Parses the flags, and trains."""
    global NUMBERS_OF_READS
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data_gib", type=float, default=20)
    parser.add_argument("--cache_gib", type=float, default=1)
    args = parser.parse_args()
    num_files = round(args.data_gib * 2**30 / GeneratedFiles.size)
    GeneratedFiles.num_files = num_files
    NUMBERS_OF_READS = np.zeros(num_files * ROWS_PER_FILE, np.int64)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), GeneratedFiles)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    os.environ |= {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{server.server_address[1]}",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_REGION": "us-east-1",
    }
    with tempfile.TemporaryDirectory() as temporary:
        os.environ["XDG_CACHE_HOME"] = f"{temporary}/cache"
        largest, done = 0, threading.Event()

        def measure():
            nonlocal largest
            while not done.wait(0.02):
                largest = max(largest, disk_bytes(f"{temporary}/cache"))

        threading.Thread(target=measure, daemon=True).start()
        num_steps = num_files * ROWS_PER_FILE // BATCH_SIZE
        settings = {"run.num_train_steps": num_steps, "run.checkpoints.every_steps": 200}
        start = time.perf_counter()
        praxis_lite.train(
            Means,
            f"{temporary}/job",
            settings={"cache_bytes": round(args.cache_gib * 2**30), **settings},
        )
        seconds = time.perf_counter() - start
        done.set()
        proof = proof_of_examples(JobDir(Path(temporary, "job")), recorded_only=True)
        assert not proof.faults, proof.faults
        assert NUMBERS_OF_READS.min() >= 1
        num_again = int((NUMBERS_OF_READS > 1).sum())
        sent = GeneratedFiles.num_bytes_sent
        usage = resource.getrusage(resource.RUSAGE_SELF)
        print(
            f"{num_files} files, {num_files * GeneratedFiles.size / 2**30:.2f} GiB, "
            f"{len(NUMBERS_OF_READS):,} rows, each used once; checks also read {num_again}\n"
            f"downloaded: {sent / 2**30:.2f} GiB\n"
            f"largest disk space of the copies: {largest / 2**30:.3f} GiB\n"
            f"{num_steps} steps in {seconds:.0f} s with compilation, "
            f"{num_files * GeneratedFiles.size / 2**20 / seconds:.0f} MiB/s; CPU time of the "
            f"server and the job: {usage.ru_utime + usage.ru_stime:.0f} s"
        )
    files = [StorePath("s3", "bucket", f"data/{k:05}.npy") for k in range(min(16, num_files))]
    start = time.perf_counter()
    for file in files:
        file.read_bytes()
    seconds = time.perf_counter() - start
    speed = len(files) * GeneratedFiles.size / 2**20 / seconds
    print(f"one thread, into memory: {speed:.0f} MiB/s")


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    main()
