"""Paths in object stores: gs:// and s3:// URLs, and memory:// in tests.

obstore sends the requests. Unlike fsspec and etils.epath, it supports conditional writes and
timeouts, and is a single package without dependencies. Credentials, regions and endpoints come from
the environment variables and files that each store's own tools use, such as AWS_PROFILE,
AWS_ENDPOINT_URL and GOOGLE_APPLICATION_CREDENTIALS.

Writes are atomic: readers see either the old or the new content of an object. Object stores have no
folders and no renames; here, a folder exists if it contains an object.
"""

import contextlib
import dataclasses
import errno
import fnmatch
import functools
import operator
import os
import re
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

from praxis_lite.core.errors import ConfigError, shortened
from praxis_lite.host.optional_packages import optional_module, require_package

__all__ = (
    "AnyPath",
    "ObjectChanged",
    "ObjectStatus",
    "StorePath",
    "StoreUnreachable",
    "is_store_url",
    "kvstore_context",
    "kvstore_of",
    "remove_folder",
)

_T = TypeVar("_T")
_SCHEMES = ("gs", "s3", "memory")
_URL = re.compile(
    rf"(?P<scheme>{'|'.join(_SCHEMES)})://(?P<bucket>[^/]+)(/(?P<key>.*))?", re.DOTALL
)


class _Limits(NamedTuple):
    """Limits on the time and the retries of a request.

    obstore retries some kinds of requests. If the store still cannot be reached,
    `StorePath._retried` retries any request.

    Attributes:
      attempt: Maximum seconds for an attempt.
      connection: Maximum seconds to connect.
      num_retries: Maximum number of retries in obstore.
      obstore_seconds: Maximum seconds for the attempts in obstore.
      seconds: Maximum seconds for the attempts of `StorePath._retried`.
    """

    attempt: int
    connection: int
    num_retries: int
    obstore_seconds: float
    seconds: float


_RETRY_SECONDS = 180.0
_PATIENT = _Limits(300, 10, 100, _RETRY_SECONDS, _RETRY_SECONDS)
# Retries inside obstore do not call `StorePath.guard`.
_GUARDED = _Limits(300, 10, 0, 0.0, _RETRY_SECONDS)
_QUICK = _Limits(4, 3, 3, 8.0, 2.0)
# Maximum time for the first access to a store.
_FIRST_SECONDS = 9.0
# By default, TensorStore waits forever for an answer. It only reads these variables.
_TENSORSTORE = {
    "TENSORSTORE_CURL_CONNECT_TIMEOUT_SECONDS": "10",
    "TENSORSTORE_CURL_LOW_SPEED_TIME_SECONDS": "120",
}
_CREDENTIALS = {
    "s3": "Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, to an identity that "
    "can {action} it",
    "gs": "Run `gcloud auth application-default login`, or set GOOGLE_APPLICATION_CREDENTIALS, "
    "with an identity that can {action} it",
}
# Name of the metadata field that identifies an object's version in conditional writes. Listings of
# Google Cloud Storage do not contain it.
_VERSIONS = {"s3": "e_tag", "gs": "version", "memory": "e_tag"}
# Prefixes of the names of temporary objects, which `newest_files` and `opened` write and delete. A
# killed process may leave one behind.
_MARKERS = (".listed-", ".writable")
_ENDPOINTS = {"s3": "AWS_REGION and AWS_ENDPOINT_URL", "gs": "GOOGLE_BASE_URL"}


class ObjectChanged(Exception):
    """A conditional write failed, because the object exists or has changed."""


class StoreUnreachable(ConfigError):
    """A request failed, but may succeed if it is repeated."""


class ObjectStatus(NamedTuple):
    """The status of an object, with the field names of os.stat_result.

    Attributes:
      st_ino: A number that identifies the content within this process.
      tag: The ETag, which identifies the content.
      version: The version for conditional writes: the ETag, or the generation in Google Cloud
        Storage, which is "" in listings.
    """

    st_size: int
    st_mtime: float
    st_mtime_ns: int
    st_ino: int
    tag: str
    version: str


def is_store_url(path: object) -> bool:
    """Returns whether a path is the URL of an object store, or a StorePath."""
    return isinstance(path, StorePath) or str(path).partition("://")[0] in _SCHEMES


@dataclasses.dataclass(frozen=True, order=True)
class StorePath:
    """A path in an object store, with the methods of pathlib.Path that jobs and checkpoints need.

    If an object is missing, methods raise FileNotFoundError. Other errors of the store raise
    ConfigError, except a failed conditional write (ObjectChanged).

    Attributes:
      scheme: "gs", "s3" or "memory".
      bucket: Name of the bucket.
      key: The path in the bucket, without leading and trailing slashes.
      is_quick: Whether requests fail within 15 seconds, instead of being retried for minutes.
      guard: Called before each attempt to write or delete an object, to check that this process may
        still do so, for example because it holds a lease. If it raises, nothing is changed. Paths
        below this path have the same guard.
    """

    scheme: str
    bucket: str
    key: str
    is_quick: bool = dataclasses.field(default=False, compare=False, repr=False)
    guard: Callable[[], None] | None = dataclasses.field(default=None, compare=False, repr=False)

    @classmethod
    def opened(
        cls, url: "str | os.PathLike[str] | StorePath", *, writes: bool = False
    ) -> "StorePath":
        """Parses a URL, and checks within 10 seconds that the bucket can be used.

        Args:
          url: The URL. A StorePath is returned without a check.
          writes: Whether to check that objects can be written.

        Raises:
          ConfigError: The URL is invalid, a package is missing, the store cannot be reached, or the
            bucket does not exist or cannot be read or written.
        """
        if isinstance(url, StorePath):
            return url
        match = _URL.fullmatch(os.fspath(url))
        if match is None:
            raise ConfigError(
                f"{shortened(str(url))} is not a valid URL; expected gs://BUCKET/PATH or "
                "s3://BUCKET/PATH."
            )
        parts = [part for part in (match["key"] or "").split("/") if part]
        path = cls(match["scheme"], match["bucket"], "/".join(parts))
        if path.scheme != "memory":
            path._check(writes)
        return path

    def __str__(self) -> str:
        return f"{self.scheme}://{self.bucket}/{self.key}".rstrip("/")

    def __truediv__(self, name: str) -> "StorePath":
        return dataclasses.replace(self, key=f"{self.key}/{name}".strip("/"))

    @property
    def name(self) -> str:
        return self.key.rpartition("/")[2] or self.bucket

    @property
    def parent(self) -> "StorePath":
        return dataclasses.replace(self, key=self.key.rpartition("/")[0])

    def absolute(self) -> "StorePath":
        return self

    def mkdir(self, parents: bool = False, exist_ok: bool = False) -> None:
        """Does nothing, because there are no folders."""

    def read_bytes(self) -> bytes:
        return self.read_version()[0]

    def read_range(self, start: int, end: int) -> bytes:
        """Returns the bytes from `start` up to, but not including, `end`."""
        return self._retried(
            "read", lambda store: bytes(store.get_range(self.key, start=start, end=end))
        )

    def read_version(self) -> tuple[bytes, ObjectStatus]:
        """Returns the content and the status of the same version of the object."""

        def read(store: Any) -> tuple[bytes, ObjectStatus]:
            found = store.get(self.key)
            return bytes(found.bytes()), _status(self.scheme, found.meta)

        return self._retried("read", read)

    def write_bytes(self, content: bytes, mode: "Literal['create'] | str | None" = None) -> str:
        """Writes the object atomically, and returns its version.

        Args:
          content: The content.
          mode: None to create or replace the object, "create" to only create it, or a version to
            only replace this version.

        Raises:
          ObjectChanged: The object exists (with "create"), or does not have the given version. If
            the answer to a request was lost, this may be the version that this call has written.
        """
        put_mode: Any = "overwrite" if mode is None else mode
        if mode not in (None, "create"):
            put_mode = {_VERSIONS[self.scheme]: mode}
        try:
            put = self._retried("write", lambda store: store.put(self.key, content, mode=put_mode))
        except FileNotFoundError:  # The version to replace was deleted.
            raise ObjectChanged(str(self)) from None
        return put[_VERSIONS[self.scheme]]

    def append_bytes(self, content: bytes) -> None:
        """Appends to the object, or creates it. Several processes may do so at the same time.

        Args:
          content: The bytes to append, which must be unique: an object that contains them is not
            changed, because the answer to an earlier request may have been lost.
        """
        while True:
            try:
                before, status = self.read_version()
                version = status.version
            except FileNotFoundError:
                before, version = b"", "create"
            if content in before:
                return
            with contextlib.suppress(ObjectChanged):
                self.write_bytes(before + content, version)
                return

    def unlink(self, missing_ok: bool = True) -> None:
        """Deletes the object. `missing_ok` is ignored: stores do not report whether it existed."""
        with contextlib.suppress(FileNotFoundError):
            self._retried("delete", lambda store: store.delete(self.key))

    def stat(self) -> ObjectStatus:
        return _status(self.scheme, self._retried("read", lambda store: store.head(self.key)))

    def is_file(self) -> bool:
        try:
            self.stat()
        except FileNotFoundError:
            return False
        return True

    def is_dir(self) -> bool:
        return self._retried("list", lambda store: any(store.list(self.key or None, chunk_size=1)))

    def exists(self) -> bool:
        return self.is_file() or self.is_dir()

    def folders(self) -> list[str]:
        """Returns the sorted names of the folders in this folder."""
        prefixes = self._listed()["common_prefixes"]
        return sorted(prefix.rstrip("/").rpartition("/")[2] for prefix in prefixes)

    def files(self) -> dict[str, ObjectStatus]:
        """Returns the status of each object in this folder, keyed and sorted by relative path."""
        return _without_markers(self._objects())

    def _objects(self) -> dict[str, ObjectStatus]:
        def found(store: Any) -> list[Any]:
            return [meta for batch in store.list(self.key or None) for meta in batch]

        metas = sorted(self._retried("list", found), key=lambda meta: meta["path"])
        start = len(self.key) + 1 if self.key else 0
        return {meta["path"][start:]: _status(self.scheme, meta) for meta in metas}

    def newest_files(self) -> dict[str, ObjectStatus]:
        """Returns `files` from a listing that is not outdated.

        Some stores answer with listings that lack the last changes. This method therefore writes a
        temporary object, and repeats the listing until it contains this object.

        Raises:
          ConfigError: The object does not appear in listings.
        """
        return _without_markers(self._newest_objects())

    def _newest_objects(self) -> dict[str, ObjectStatus]:
        marker = self / f".listed-{secrets.token_hex(8)}"
        marker.write_bytes(b"")
        deadline = time.monotonic() + _RETRY_SECONDS
        while marker.name not in (objects := self._objects()):
            if time.monotonic() > deadline:
                raise ConfigError(
                    f"{self}: listings are outdated; {marker.name} has not appeared within "
                    f"{_RETRY_SECONDS:.0f} s. Use a store that shows new objects in listings."
                )
            time.sleep(0.2)
        marker.unlink()
        del objects[marker.name]
        return objects

    def iterdir(self) -> "list[StorePath]":
        """Returns the objects and folders directly in this folder."""
        found = self._listed()
        keys = [*found["common_prefixes"], *(meta["path"] for meta in found["objects"])]
        return [dataclasses.replace(self, key=key.rstrip("/")) for key in sorted(keys)]

    def glob(self, pattern: str) -> "list[StorePath]":
        """Returns the objects and folders directly in this folder whose names match a pattern."""
        return [path for path in self.iterdir() if fnmatch.fnmatch(path.name, pattern)]

    def remove_folder(self, is_removed: Callable[[str], bool] = lambda name: True) -> None:
        """Deletes all objects below this folder, or only those whose relative names qualify."""
        keys = [f"{self.key}/{name}" for name in self._newest_objects() if is_removed(name)]
        for start in range(0, len(keys), 1000):
            batch = keys[start : start + 1000]
            try:
                self._retried("delete", operator.methodcaller("delete", batch))
            except FileNotFoundError:  # A repeated request; Google Cloud Storage stops there.
                for key in batch:
                    dataclasses.replace(self, key=key).unlink()

    def download(self, file: Path) -> str:
        """Downloads the object to a local file, in chunks, and returns its tag."""
        file.parent.mkdir(parents=True, exist_ok=True)

        def download(store: Any) -> str:
            found = store.get(self.key)
            with file.open("wb") as out:
                for chunk in found.stream(min_chunk_size=1 << 23):
                    out.write(chunk)
            return _status(self.scheme, found.meta).tag

        return self._retried("read", download)

    def upload(self, file: Path) -> None:
        """Uploads a local file to the object, in several parts if it is large."""
        self._retried("write", lambda store: store.put(self.key, file))

    def _listed(self) -> Any:
        return self._retried("list", lambda store: store.list_with_delimiter(self.key or None))

    def _retried(self, action: str, request: Callable[[Any], _T]) -> _T:
        """Returns `request(store)`, and retries it for some time if the store cannot be reached.

        obstore itself does not retry deletions, conditional writes and truncated listings.
        """
        limits, guard = _QUICK if self.is_quick else _PATIENT, None
        if self.guard is not None and action in ("write", "delete"):
            limits, guard = _GUARDED, self.guard
        store, pause = _bucket(self.scheme, self.bucket, limits), 0.1
        deadline = time.monotonic() + limits.seconds
        while True:
            if guard is not None:
                guard()
            try:
                with _store_errors(self, action):
                    return request(store)
            except StoreUnreachable:
                if time.monotonic() + pause > deadline:
                    raise
            time.sleep(pause)
            pause = min(2 * pause, 10.0)

    def _check(self, writes: bool) -> None:
        """Checks access by listing the folder and, if `writes`, writing and deleting an object."""
        _bucket(self.scheme, self.bucket, _QUICK)  # Import obstore here, not in the thread.
        quick = dataclasses.replace(self, is_quick=True)
        raised: list[BaseException] = []
        done = threading.Event()

        def check() -> None:
            try:
                quick.is_dir()
                if writes:
                    (quick / ".writable").write_bytes(b"")
                    (quick / ".writable").unlink()
            except BaseException as error:
                raised.append(error)
            done.set()

        threading.Thread(target=check, daemon=True).start()
        if not done.wait(_FIRST_SECONDS):
            raise _unreachable(self, f"no answer within {_FIRST_SECONDS:.0f} s")
        if raised:
            raise raised[0]


AnyPath = Path | StorePath


def remove_folder(folder: AnyPath) -> None:
    """Deletes a folder and everything in it. Ignores errors."""
    if isinstance(folder, StorePath):
        with contextlib.suppress(ConfigError):
            folder.remove_folder()
    else:
        shutil.rmtree(folder, ignore_errors=True)


def kvstore_of(folder: AnyPath) -> dict[str, Any]:
    """Returns the TensorStore key-value store spec of a folder."""
    if isinstance(folder, Path):
        return {"driver": "file", "path": f"{folder}/"}
    for name, value in _TENSORSTORE.items():
        os.environ.setdefault(name, value)
    spec = {"bucket": folder.bucket, "path": f"{folder.key}/" if folder.key else ""}
    if folder.scheme == "gs":
        return {"driver": "gcs", **spec}
    if folder.scheme == "memory":
        raise ConfigError(
            f"{folder}: checkpoints cannot be stored in memory://. Use s3:// or gs://."
        )
    if endpoint := os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL"):
        spec |= {"endpoint": endpoint}
    if region := os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION"):
        spec |= {"aws_region": region}
    return {"driver": "s3", **spec}


def kvstore_context() -> dict[str, Any]:
    """Returns the TensorStore context resources that the specs of `kvstore_of` require."""
    if "AWS_ACCESS_KEY_ID" in os.environ:
        # By default, the AWS SDK also reads ~/.aws, and prints an error if it does not exist.
        return {"aws_credentials": {"type": "environment"}}
    return {}


def _without_markers(objects: dict[str, ObjectStatus]) -> dict[str, ObjectStatus]:
    return {
        name: status
        for name, status in objects.items()
        if not name.rpartition("/")[2].startswith(_MARKERS)
    }


@functools.cache
def _bucket(scheme: str, bucket: str, limits: _Limits) -> Any:
    """Returns obstore's client for a bucket."""
    if scheme == "s3":
        require_package("boto3", f"s3://{bucket}")
    stores = optional_module("obstore.store", f"{scheme}://{bucket}")
    if scheme == "memory":  # The objects exist only in one client.
        return stores.MemoryStore() if limits == _PATIENT else _bucket(scheme, bucket, _PATIENT)
    options: dict[str, Any] = {
        "client_options": {
            "timeout": f"{limits.attempt}s",
            "connect_timeout": f"{limits.connection}s",
            "allow_http": True,
        },
        "retry_config": {
            "max_retries": limits.num_retries,
            "retry_timeout": timedelta(seconds=limits.obstore_seconds),
        },
    }
    if scheme == "gs":
        return stores.GCSStore(bucket, **options)
    if "AWS_ACCESS_KEY_ID" not in os.environ:
        # Unlike obstore, boto3 reads profiles and logins from `aws sso`.
        auth = optional_module("obstore.auth.boto3", f"s3://{bucket} without AWS_ACCESS_KEY_ID")
        try:
            options["credential_provider"] = auth.Boto3CredentialProvider()
        except ValueError:
            fix = _CREDENTIALS["s3"].format(action="read")
            raise ConfigError(f"s3://{bucket}: found no credentials. {fix}.") from None
    return stores.S3Store(bucket, **options)


def _status(scheme: str, meta: Any) -> ObjectStatus:
    modified, tag = meta["last_modified"].timestamp(), (meta["e_tag"] or "").strip('"')
    version = meta[_VERSIONS[scheme]] or ""
    return ObjectStatus(meta["size"], modified, int(modified * 1e9), hash(tag), tag, version)


@contextlib.contextmanager
def _store_errors(path: StorePath, action: str) -> Iterator[None]:
    """Converts obstore's errors to FileNotFoundError, ObjectChanged or ConfigError."""
    exceptions = optional_module("obstore.exceptions", str(path))
    try:
        yield
        return
    except (exceptions.AlreadyExistsError, exceptions.PreconditionError):
        raise ObjectChanged(str(path)) from None
    except FileNotFoundError as error:  # obstore raises it instead of its NotFoundError.
        if "NoSuchBucket" not in str(error):
            raise FileNotFoundError(errno.ENOENT, "No such object", str(path)) from None
        text = str(error)
    except (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError):
        text = " 403 "
    except exceptions.BaseError as error:
        text = str(error).partition("\n\nDebug source")[0]
    bucket = f"{path.scheme}://{path.bucket}"
    if "NoSuchBucket" in text or (action == "list" and " 404 " in text):
        raise ConfigError(
            f"{path}: the bucket {bucket} does not exist. Correct the URL, or create the bucket."
        ) from None
    if re.search(r" 40[13] |InvalidAccessKeyId|SignatureDoesNotMatch", text):
        fix = _CREDENTIALS[path.scheme].format(action=action)
        raise ConfigError(f"{path}: {bucket} refuses permission to {action} it. {fix}.") from None
    unreachable = _unreachable(path, shortened(" ".join(text.split()), 300))
    if re.search(r" 4(?!08|29)\d\d ", text):  # The same request would fail again.
        raise ConfigError(str(unreachable)) from None
    raise unreachable from None


def _unreachable(path: StorePath, reason: str) -> StoreUnreachable:
    return StoreUnreachable(
        f"{path}: the store cannot be reached ({reason}). Check the network and "
        f"{_ENDPOINTS.get(path.scheme, 'the URL')}."
    )
