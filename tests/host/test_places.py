"""URLs of object stores are read and written like local paths, or raise a clear error."""

import http.server
import os
import socket
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from praxis_lite import ConfigError
from praxis_lite.host import object_stores, optional_packages
from praxis_lite.host.atomic_files import write_atomically
from praxis_lite.host.object_stores import ObjectChanged, StorePath
from praxis_lite.host.places import check_upload, local_file, local_folder, output_file, uploaded
from praxis_lite.inputs.sources.files.paths import matching_files

pytest.importorskip("obstore")


@pytest.fixture
def store(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    object_stores._bucket.cache_clear()
    return StorePath.opened("memory://bucket/folder")


def write(store, *names):
    for name in names:
        (store / name).write_bytes(name.encode())


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("*.txt", ["a.txt", "b[1].txt"]),
        ("**/*.txt", ["a.txt", "b[1].txt", "sub/c.txt", "sub/deep/d.txt"]),
        ("sub/?.txt", ["sub/c.txt"]),
        ("[!b]*.txt", ["a.txt"]),
        ("a.txt", ["a.txt"]),
    ],
)
def test_a_glob_yields_the_files_that_it_matches_on_disk(store, pattern, names):
    write(store, "a.txt", "b[1].txt", "c.jsonl", "sub/c.txt", "sub/deep/d.txt")
    files = matching_files(f"memory://bucket/folder/{pattern}")
    assert [Path(file).read_text() for file in files] == names


def test_a_glob_without_matches_names_the_url(store):
    write(store, "a.txt")
    with pytest.raises(ConfigError, match=r"memory://bucket/folder/\*.npz.*nothing"):
        matching_files("memory://bucket/folder/*.npz")


def test_a_folder_is_downloaded_again_only_after_a_change(store, monkeypatch):
    write(store, "config.json", "model.bin", "sub/vocab.json")
    downloads = []
    download = StorePath.download
    monkeypatch.setattr(
        StorePath,
        "download",
        lambda self, file: (downloads.append(self.name), download(self, file))[1],
    )
    folder = local_folder(str(store), ("*.json",))
    assert sorted(path.name for path in folder.rglob("*.json")) == ["config.json", "vocab.json"]
    assert not list(folder.rglob("model.bin"))
    assert local_folder(str(store), ("*.json",)) == folder and len(downloads) == 2
    (store / "config.json").write_bytes(b"new")
    assert (local_folder(str(store), ("*.json",)) / "config.json").read_text() == "new"
    assert (folder / "config.json").read_text() == "config.json"


def test_files_are_read_and_written(store):
    file = output_file("memory://bucket/folder/report.html")
    write_atomically(file, b"page")
    assert local_file(str(file)).read_bytes() == b"page"
    with pytest.raises(FileNotFoundError, match="absent"):
        local_file("memory://bucket/folder/absent")


def test_an_export_is_uploaded_with_its_last_file_last(store, monkeypatch):
    written = []
    upload = StorePath.upload
    monkeypatch.setattr(
        StorePath, "upload", lambda self, file: (written.append(self.name), upload(self, file))
    )
    with uploaded(str(store), "config.json") as folder:
        (folder / "config.json").write_text("{}")
        (folder / "z.bin").write_bytes(b"z")
    assert written == ["z.bin", "config.json"]
    with pytest.raises(ConfigError, match="already has files"), uploaded(str(store), "x"):
        pass


def test_an_object_that_a_killed_process_left_is_no_file_and_is_removed_with_its_folder(store):
    write(store, ".writable", ".listed-0123", "sub/.listed-4567")
    check_upload(str(store))
    assert store.files() == store.newest_files() == {}
    store.remove_folder()
    assert not store.exists()


def test_conditional_writes_fail_if_the_object_has_changed(store):
    file = store / "lease"
    version = file.write_bytes(b"1", "create")
    with pytest.raises(ObjectChanged):
        file.write_bytes(b"2", "create")
    newer = file.write_bytes(b"2", version)
    with pytest.raises(ObjectChanged):
        file.write_bytes(b"3", version)
    file.write_bytes(b"3", newer)
    assert file.read_bytes() == b"3"


def test_a_missing_package_is_named_with_its_extra(monkeypatch):
    def missing(name):
        raise ModuleNotFoundError(name=name.partition(".")[0])

    monkeypatch.setattr(optional_packages.importlib, "import_module", missing)
    object_stores._bucket.cache_clear()
    with pytest.raises(ConfigError, match=r"gs://bucket needs obstore.*praxis_lite\[gcs\]"):
        StorePath.opened("gs://bucket/x")
    monkeypatch.setattr(optional_packages, "is_installed", lambda package: False)
    with pytest.raises(ConfigError, match=r"s3://bucket needs boto3.*praxis_lite\[s3\]"):
        StorePath.opened("s3://bucket/x")


@pytest.mark.parametrize("url", ["s3://", "s3:///key", "gs://"])
def test_a_url_without_a_bucket_is_rejected(url):
    with pytest.raises(ConfigError, match="BUCKET"):
        StorePath.opened(url)


class FixedResponse(http.server.BaseHTTPRequestHandler):
    """Answers every request with the `status` and `body` of the server."""

    def do_GET(self):
        self.send_response(self.server.status)
        self.send_header("Content-Length", str(len(self.server.body)))
        self.end_headers()
        self.wfile.write(self.server.body)

    def log_message(self, *_):
        pass


@pytest.fixture
def endpoint(monkeypatch):
    object_stores._bucket.cache_clear()
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "x")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "x")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    yield lambda url: monkeypatch.setenv("AWS_ENDPOINT_URL", url)
    object_stores._bucket.cache_clear()


@pytest.mark.parametrize(
    ("status", "body", "message"),
    [
        (403, b"<Error><Code>AccessDenied</Code></Error>", "refuses permission.*AWS_PROFILE"),
        (404, b"<Error><Code>NoSuchBucket</Code></Error>", "bucket s3://bucket does not exist"),
        (301, b"<Error><Code>PermanentRedirect</Code></Error>", "AWS_REGION"),
    ],
)
def test_a_refusal_of_the_store_raises_a_clear_error(endpoint, status, body, message):
    with http.server.HTTPServer(("127.0.0.1", 0), FixedResponse) as server:
        server.status, server.body = status, body
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        endpoint(f"http://127.0.0.1:{server.server_address[1]}")
        with pytest.raises(ConfigError, match=message):
            StorePath.opened("s3://bucket/job")
        server.shutdown()


@pytest.mark.slow
def test_a_store_that_cannot_be_reached_raises_a_clear_error(endpoint):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    endpoint(f"http://127.0.0.1:{port}")
    with pytest.raises(ConfigError, match="cannot be reached.*AWS_ENDPOINT_URL"):
        StorePath.opened("s3://bucket/job")


@pytest.mark.slow
def test_a_store_that_never_answers_raises_an_error_within_ten_seconds(endpoint):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint(f"http://127.0.0.1:{silent.getsockname()[1]}")
        start = time.monotonic()
        with pytest.raises(ConfigError, match="cannot be reached"):
            StorePath.opened("s3://bucket/job")
        assert time.monotonic() - start < 10


@pytest.mark.slow
def test_a_checkpoint_request_that_is_never_answered_is_repeated():
    """In a new process, because TensorStore reads its variables once."""
    program = """
        import socket
        import tensorstore as ts
        from praxis_lite.host import object_stores
        from praxis_lite.host.object_stores import StorePath, kvstore_context, kvstore_of

        object_stores._TENSORSTORE["TENSORSTORE_CURL_LOW_SPEED_TIME_SECONDS"] = "1"
        with socket.create_server(("127.0.0.1", 0)) as silent:
            spec = kvstore_of(StorePath("s3", "bucket", "folder"))
            spec["endpoint"] = f"http://127.0.0.1:{silent.getsockname()[1]}"
            context = ts.Context(kvstore_context())
            write = ts.KvStore.open(spec, context=context).result().write("key", b"value")
            silent.settimeout(30)
            connections = [silent.accept() for _ in range(2)]
            write.cancel()
            print("repeated")
    """
    keys = {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x", "AWS_REGION": "us-east-1"}
    # A test before this one may have set the time limits of this process.
    ours = {name: x for name, x in os.environ.items() if not name.startswith("TENSORSTORE_")}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        env={**ours, **keys},
        capture_output=True,
        text=True,
    )
    assert done.stdout == "repeated\n", done.stderr
