"""Resolves the paths that users specify: local paths, and hf://, gs:// and s3:// URLs.

Code that reads a user's path calls `local_file`, `local_folder` or `local_files`. These download
URLs and return local paths, because datasets, safetensors and memory maps need files. Code that
writes calls `output_file` for a single file, or `uploaded` for a folder. Job directories
(`praxis_lite.job.mirror`) and checkpoints access object stores directly.
"""

import contextlib
import fnmatch
import glob
import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import xxhash

from praxis_lite.core.errors import ConfigError
from praxis_lite.host import hub
from praxis_lite.host.atomic_files import user_cache
from praxis_lite.host.bounded_copies import StoredFile
from praxis_lite.host.hub import RepoType, is_hub_url
from praxis_lite.host.object_stores import AnyPath, ObjectStatus, StorePath, is_store_url

__all__ = ("is_url", "local_file", "local_files", "local_folder", "output_file", "uploaded")

_NUM_THREADS = 16  # Number of files that are transferred at a time.


def is_url(path: str | os.PathLike[str]) -> bool:
    """Returns whether a path is an hf://, gs:// or s3:// URL."""
    return is_hub_url(path) or is_store_url(path)


def local_folder(
    path: str | os.PathLike[str],
    patterns: tuple[str, ...] | None = None,
    repo_type: RepoType = "model",
) -> Path:
    """Returns a local folder with the files of a path, which are downloaded if it is a URL.

    Files in object stores are downloaded again only after one of them has changed. "~" is expanded
    in local paths.

    Args:
      path: Path of a folder, hf://org/name[@revision], or the URL of a folder in a store.
      patterns: Globs of the files to download, or None for all files.
      repo_type: Type of the repository, if the path is an hf:// URL.

    Raises:
      ConfigError: The URL is invalid or cannot be read, or the folder in the store has no such
        files.
    """
    if is_hub_url(path):
        return hub.downloaded_folder(path, patterns, repo_type)
    if not is_store_url(path):
        return Path(os.path.expanduser(os.fspath(path)))
    folder = StorePath.opened(path)
    names = folder.files()
    if patterns is not None:
        names = {n: s for n, s in names.items() if any(fnmatch.fnmatch(n, p) for p in patterns)}
    if not names:
        condition = "" if patterns is None else f" that match {', '.join(patterns)}"
        raise ConfigError(f"{path} has no files{condition}. Correct the URL, or upload the files.")
    return _downloaded(folder, {name: status.tag for name, status in names.items()})


def local_file(path: str | os.PathLike[str]) -> Path:
    """Returns a local path of a file, which is downloaded if its path is a URL.

    Raises:
      ConfigError: The URL is invalid or cannot be read.
      FileNotFoundError: The file does not exist in the store.
    """
    if is_hub_url(path):
        return Path(hub.downloaded_files(os.fspath(path)))
    if not is_store_url(path):
        return Path(os.path.expanduser(os.fspath(path)))
    file = StorePath.opened(path)
    return _downloaded(file.parent, {file.name: file.stat().tag}) / file.name


def local_files(pattern: str) -> str:
    """Returns a glob of local files; if the given glob is a URL, its matches are downloaded.

    Raises:
      ConfigError: The URL is invalid or cannot be read.
    """
    if is_hub_url(pattern):
        return hub.downloaded_files(pattern)
    if not is_store_url(pattern):
        return os.path.expanduser(pattern)
    folder, wildcards, files = _listed(pattern)
    if not files:
        return pattern  # The caller reports that nothing matches.
    copies = _downloaded(folder, {name: status.tag for name, status in files.items()})
    return os.path.join(glob.escape(str(copies)), wildcards)


def stored_files(pattern: str) -> list[StoredFile]:
    """Lists the files in an object store that match a URL with wildcards.

    Raises:
      ConfigError: The URL is invalid or cannot be read.
    """
    folder, _, files = _listed(pattern)
    return [
        StoredFile(folder / name, status.st_size, status.st_mtime_ns, status.tag)
        for name, status in files.items()
    ]


def _listed(pattern: str) -> tuple[StorePath, str, dict[str, ObjectStatus]]:
    """Returns a folder, a glob relative to it, and the status of each match by relative path."""
    # List only the folder before the first wildcard.
    parts = pattern.split("/")
    num_fixed = next((i for i, part in enumerate(parts) if glob.has_magic(part)), len(parts) - 1)
    folder = StorePath.opened("/".join(parts[:num_fixed]))
    wildcards = "/".join(parts[num_fixed:])
    matches = re.compile(_glob_regex(wildcards)).fullmatch
    files = {name: status for name, status in folder.files().items() if matches(name)}
    return folder, wildcards, files


def output_file(path: str | os.PathLike[str]) -> AnyPath:
    """Converts the path of an output file to a path that `write_atomically` accepts.

    Raises:
      ConfigError: The path is a URL that cannot be written.
    """
    if is_hub_url(path):
        raise ConfigError(
            f"{path} is on the Hugging Face Hub; expected a local path, or a gs:// or s3:// URL."
        )
    return StorePath.opened(path, writes=True) if is_store_url(path) else Path(path)


def check_upload(url: str | os.PathLike[str]) -> None:
    """Checks that a URL can be written and, in an object store, that its folder is empty.

    Raises:
      ConfigError: The URL is invalid or cannot be reached or written, or its folder has files.
    """
    if is_hub_url(url):
        hub.check_upload(os.fspath(url))
    elif StorePath.opened(url, writes=True).newest_files():
        raise ConfigError(f"{url} already has files. Choose a new or an empty folder.")


@contextlib.contextmanager
def uploaded(url: str | os.PathLike[str], last: str) -> Iterator[Path]:
    """Yields an empty temporary folder, whose files are uploaded at exit.

    Args:
      url: hf://org/name[@branch], or the URL of an empty folder in a store.
      last: Name of the file to upload last. Readers ignore a folder without this file.

    Raises:
      ConfigError: See `check_upload`; or the upload fails.
    """
    if is_hub_url(url):
        with hub.uploaded(os.fspath(url)) as folder:
            yield folder
        return
    check_upload(url)
    target = StorePath.opened(url)
    with tempfile.TemporaryDirectory(prefix="praxis_lite_upload") as temporary:
        yield Path(temporary)
        files = [path for path in Path(temporary).rglob("*") if path.is_file()]

        def upload(file: Path) -> None:
            (target / str(file.relative_to(temporary))).upload(file)

        with ThreadPoolExecutor(_NUM_THREADS) as pool:
            list(pool.map(upload, (file for file in files if file.name != last)))
        for file in files:
            if file.name == last:
                upload(file)


def _downloaded(folder: StorePath, tags: Mapping[str, str]) -> Path:
    """Downloads files into the user's cache.

    Args:
      folder: The folder in the store.
      tags: Tag of the version to download for each file, keyed by path relative to the folder.

    Returns:
      A local folder that contains exactly these files, in these or newer versions.
    """
    target = _cached(folder, tags)
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".") as temporary:
        new = Path(temporary, "new")
        with ThreadPoolExecutor(_NUM_THREADS) as pool:
            downloaded = pool.map(lambda name: (folder / name).download(new / name), tags)
            # A file may have changed since it was listed.
            target = _cached(folder, dict(zip(tags, downloaded, strict=True)))
        with contextlib.suppress(OSError):  # Another process may have downloaded the files.
            os.rename(new, target)
    return target


def _cached(folder: StorePath, tags: Mapping[str, str]) -> Path:
    """Returns the local folder for these versions of files."""
    versions = "\n".join([str(folder), *(f"{name} {tag}" for name, tag in sorted(tags.items()))])
    return user_cache() / "stores" / xxhash.xxh3_128_hexdigest(versions.encode())


def _glob_regex(pattern: str) -> str:
    """Translates a glob, in which `**/` matches any number of folders, to a regular expression."""
    regex = ""
    for part in re.split(r"(\*\*/|\*|\?|\[[^]]*\])", pattern):
        special = {"**/": "(?:.*/)?", "*": "[^/]*", "?": "[^/]"}
        if part.startswith("[") and len(part) > 1:
            regex += part.replace("[!", "[^")
        else:
            regex += special.get(part) or re.escape(part)
    return regex
