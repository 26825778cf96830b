"""Downloads and uploads repositories of the Hugging Face Hub, which are specified by hf:// URLs."""

import contextlib
import functools
import logging
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Literal, NamedTuple

from praxis_lite.core.errors import ConfigError, shortened

__all__ = ("is_hub_url",)

RepoType = Literal["model", "dataset"]
_LOGGER = logging.getLogger(__name__)
_SCHEME = "hf://"
# hf://[datasets/]org/name[@revision][/path], as in huggingface_hub.
_URL = re.compile(
    r"hf://(?P<type>datasets/|models/)?(?P<name>[\w.-]+/[\w.-]+)"
    r"(@(?P<revision>refs/(?:pr|convert)/[^/]+|[^/]+))?(/(?P<path>.+))?"
)
# Timeout of the Hub's first response. huggingface_hub itself waits forever.
_TIMEOUT_S = 8.0


class _Location(NamedTuple):
    """A parsed URL."""

    repo_type: RepoType
    name: str
    revision: str | None
    path: str | None


def is_hub_url(path: str | os.PathLike[str]) -> bool:
    """Returns whether a path is an hf:// URL."""
    return os.fspath(path).startswith(_SCHEME)


def repo_name(url: str | os.PathLike[str]) -> str:
    """Returns the repository's name, such as "org/name"."""
    return _parsed(os.fspath(url), "model").name


def downloaded_folder(
    url: str | os.PathLike[str], patterns: tuple[str, ...] | None, repo_type: RepoType
) -> Path:
    """Downloads a repository into the cache of huggingface_hub, once per process.

    If the Hub cannot be reached, the latest files in the cache are used.

    Args:
      url: hf://org/name[@revision].
      patterns: Globs of the files to download, or None for all files.
      repo_type: Type of the repository. The URL of a dataset may also be hf://datasets/org/name.

    Raises:
      ConfigError: The URL is invalid; the repository or revision does not exist or may not be read;
        or the Hub cannot be reached, and the files are not in the cache.
    """
    url = os.fspath(url)
    location = _parsed(url, repo_type)
    if location.path is not None:
        raise ConfigError(
            f"{url} contains the path {location.path!r}; expected a complete repository. Use "
            f"{url.removesuffix('/' + location.path)}."
        )
    return _downloaded(url, location, patterns)


def downloaded_files(url: str) -> str:
    """Downloads the files of a dataset that match a URL, and returns the glob of the local files.

    Args:
      url: hf://datasets/org/name[@revision]/glob.

    Raises:
      ConfigError: The URL contains no path; or see `downloaded_folder`.
    """
    location = _parsed(url, "model")
    if location.path is None:
        raise ConfigError(
            f"{url} specifies no files. Append their path or glob in the repository, such as "
            "hf://datasets/org/name/data/*.jsonl."
        )
    # huggingface_hub matches patterns with fnmatch, which does not support `**`.
    pattern = location.path.replace("**/", "*")
    return os.path.join(_downloaded(url, location._replace(path=None), (pattern,)), location.path)


def check_upload(url: str) -> None:
    """Creates the repository and branch of a URL if necessary, and checks that it can be written.

    A new repository is private.

    Raises:
      ConfigError: The URL is invalid, the Hub cannot be reached, or a permission is missing.
    """
    name, revision = _target(url)
    with _hub_errors(url, "write to"):
        api = _hub().HfApi()
        # This request has a timeout and needs no token.
        with contextlib.suppress(_errors().RepositoryNotFoundError):
            api.model_info(name, timeout=_TIMEOUT_S)
        api.create_repo(name, private=True, exist_ok=True)
        api.auth_check(name, write=True)
        if revision is not None:
            api.create_branch(name, branch=revision, exist_ok=True)


@contextlib.contextmanager
def uploaded(url: str) -> Iterator[Path]:
    """Yields an empty temporary folder, whose files are uploaded as one commit at exit.

    Safetensors files that an earlier upload left in the repository are removed.

    Args:
      url: hf://org/name[@branch].

    Raises:
      ConfigError: See `check_upload`; or the upload fails.
    """
    check_upload(url)
    name, revision = _target(url)
    with tempfile.TemporaryDirectory(prefix="praxis_lite_upload") as folder:
        yield Path(folder)
        with _hub_errors(url, "write to"):
            _hub().HfApi().upload_folder(
                repo_id=name,
                folder_path=folder,
                revision=revision,
                commit_message="Export a model with praxis_lite",
                delete_patterns=["*.safetensors", "*.safetensors.index.json"],
            )


def _target(url: str) -> tuple[str, str | None]:
    """Returns the name of the repository and the branch to upload to."""
    location = _parsed(url, "model")
    if location.path is not None or location.repo_type != "model":
        raise ConfigError(f"{url} is not a model repository; expected hf://org/name[@branch].")
    return location.name, location.revision


def _parsed(url: str, repo_type: RepoType) -> _Location:
    match = _URL.fullmatch(url)
    if match is None:
        raise ConfigError(
            f"{shortened(url)} is not a valid URL of a repository; expected "
            "hf://org/name[@revision], or hf://datasets/org/name[@revision] for a dataset."
        )
    types: dict[str | None, RepoType] = {None: repo_type, "models/": "model"}
    actual = types.get(match["type"], "dataset")
    if repo_type == "dataset" and actual == "model":
        raise ConfigError(f"{url} is a model; expected hf://datasets/org/name[@revision].")
    return _Location(actual, match["name"], match["revision"], match["path"])


@functools.cache
def _downloaded(url: str, location: _Location, patterns: tuple[str, ...] | None) -> Path:
    unreachable = None
    with _hub_errors(url, "read"):
        try:
            _hub().HfApi().repo_info(
                location.name,
                repo_type=location.repo_type,
                revision=location.revision,
                timeout=_TIMEOUT_S,
            )
        except (OSError, _errors().HTTPError) as error:
            if _status(error) in range(400, 500):
                raise
            unreachable = error
        try:
            folder = _hub().snapshot_download(
                location.name,
                repo_type=location.repo_type,
                revision=location.revision,
                allow_patterns=None if patterns is None else list(patterns),
                local_files_only=unreachable is not None,
            )
        except _errors().LocalEntryNotFoundError as error:
            raise unreachable or error from None
    if unreachable is not None:
        _LOGGER.warning("%s cannot be reached; using the cached copy of %s", _endpoint(), url)
    return Path(folder)


@contextlib.contextmanager
def _hub_errors(url: str, action: str) -> Iterator[None]:
    """Converts errors of huggingface_hub to ConfigErrors."""
    errors = _errors()
    try:
        yield
    except errors.GatedRepoError:
        problem = "requires that its owners grant you access"
        fix = f"Request access on the page of {repo_name(url)}, then set HF_TOKEN"
    except errors.RepositoryNotFoundError:
        problem = (
            f"does not exist on {_endpoint()}, or is private and your token cannot {action} it"
        )
        fix = "Correct the name, or set HF_TOKEN (or run `hf auth login`)"
    except errors.RevisionNotFoundError:
        problem = "has a revision that does not exist"
        fix = "Correct the branch, tag or commit after @"
    except (OSError, errors.HTTPError) as error:
        status = _status(error)
        if status in (401, 403):
            problem = f"refuses permission to {action} it (HTTP status {status})"
            fix = f"Set HF_TOKEN to a token that can {action} it (or run `hf auth login`)"
        else:
            reason = shortened(" ".join(f"{type(error).__name__}: {error}".split()), 200)
            problem = f"is on {_endpoint()}, which cannot be reached ({reason})"
            fix = "Check the network and HF_ENDPOINT"
            if action == "read":
                fix += "; or copy the repository here (`hf download`) and specify its directory"
    else:
        return
    raise ConfigError(f"{url} {problem}. {fix}.")


def _status(error: BaseException) -> int | None:
    """Returns the HTTP status of an error, or None if there was no response."""
    if not isinstance(error, _errors().HfHubHTTPError):
        return None
    return error.response.status_code


def _endpoint() -> str:
    from huggingface_hub import constants

    return constants.ENDPOINT


def _errors() -> ModuleType:
    from huggingface_hub import errors

    return errors


def _hub() -> ModuleType:
    import huggingface_hub  # Imported here because importing it takes a second.
    import huggingface_hub.utils

    if not sys.stderr.isatty():  # Progress bars would fill log files.
        huggingface_hub.utils.disable_progress_bars()
    return huggingface_hub
