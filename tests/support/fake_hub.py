"""A server on the loopback interface that implements the Hugging Face Hub's API, without Xet."""

import base64
import contextlib
import dataclasses
import hashlib
import http.server
import json
import os
import re
import threading
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

READER, WRITER = "hf_reader", "hf_writer"


@dataclasses.dataclass
class Repo:
    """A repository.

    Attributes:
      branches: Commit of each branch.
      commits: Files of each commit.
      refusal: Value of X-Error-Code in responses, such as "GatedRepo", or None.
      is_private: Whether reading requires a token.
    """

    branches: dict[str, str] = dataclasses.field(default_factory=dict)
    commits: dict[str, dict[str, bytes]] = dataclasses.field(default_factory=dict)
    refusal: str | None = None
    is_private: bool = False

    def commit(self, branch: str, files: dict[str, bytes]) -> str:
        """Makes a commit with these files and returns its hash."""
        content = repr((branch, len(self.commits), sorted(files.items())))
        sha = hashlib.sha1(content.encode()).hexdigest()
        self.branches[branch], self.commits[sha] = sha, files
        return sha


class FakeHub:
    """The state of the server.

    Attributes:
      endpoint: Value for HF_ENDPOINT.
      repos: Repositories by (type, name), such as ("models", "org/name").
      requests: Methods and paths of the requests so far.
    """

    def __init__(self) -> None:
        self.endpoint = ""
        self.repos: dict[tuple[str, str], Repo] = {}
        self.requests: list[str] = []
        self.blobs: dict[str, bytes] = {}

    def add(self, name: str, folder: Path, repo_type: str = "models", **settings: Any) -> Repo:
        """Adds a repository with the files in a folder."""
        files = {
            str(path.relative_to(folder)): path.read_bytes()
            for path in sorted(folder.rglob("*"))
            if path.is_file()
        }
        repo = self.repos[repo_type, name] = Repo(**settings)
        repo.commit("main", files)
        return repo

    def environment(self, home: Path, token: str | None = None) -> dict[str, str]:
        """Returns environment variables for clients that use `home` as their cache."""
        tokens = {} if token is None else {"HF_TOKEN": token}
        return {
            "HF_ENDPOINT": self.endpoint,
            "HF_HOME": str(home),
            "HF_HUB_DISABLE_XET": "1",
            **tokens,
        }


@contextlib.contextmanager
def fake_hub() -> Iterator[FakeHub]:
    """Starts the server, and stops it at exit."""
    hub = FakeHub()
    handler = type("Handler", (_Handler,), {"hub": hub})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    hub.endpoint = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()


@contextlib.contextmanager
def client_of(hub: FakeHub, monkeypatch, home: Path, token: str | None = None) -> Iterator[None]:
    """Makes huggingface_hub in this process use a server, which it reads from os.environ once."""
    from huggingface_hub import constants

    with monkeypatch.context() as patch:
        for name, value in hub.environment(home, token).items():
            patch.setenv(name, value)
        if token is None:
            patch.delenv("HF_TOKEN", raising=False)
        patch.setattr(constants, "ENDPOINT", hub.endpoint)
        template = hub.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        patch.setattr(constants, "HF_HUB_CACHE", os.path.join(home, "hub"))
        patch.setattr(constants, "HF_TOKEN_PATH", os.path.join(home, "token"))
        patch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        yield


class _Refused(Exception):
    """A response with an error; the arguments are the HTTP status and the value of X-Error-Code."""


class _Handler(http.server.BaseHTTPRequestHandler):
    hub: FakeHub
    protocol_version = "HTTP/1.1"
    # Otherwise each body waits 40 ms for the acknowledgement of the headers before it.
    disable_nagle_algorithm = True

    def log_message(self, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._answer()

    do_HEAD = do_POST = do_PUT = do_GET

    def _answer(self) -> None:
        body = self._body()
        path = urllib.parse.urlsplit(self.path).path
        self.hub.requests.append(f"{self.command} {path}")
        try:
            for pattern, method in _ROUTES:
                if match := re.fullmatch(pattern, path):
                    parts = {k: urllib.parse.unquote(x or "") for k, x in match.groupdict().items()}
                    return getattr(self, method)(body, **parts)
            self._send(404, {"error": f"no route for {path}"})
        except _Refused as refused:
            status, code = refused.args
            self._send(status, {"error": code}, {"X-Error-Code": code, "X-Error-Message": code})

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        chunks = []
        while length := int(self.rfile.readline(), 16):
            chunks.append(self.rfile.read(length))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(chunks)

    def _send(self, status: int, content: Any, headers: dict[str, str] | None = None) -> None:
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    @property
    def _token(self) -> str:
        return self.headers.get("Authorization", "").removeprefix("Bearer ")

    def _repo(self, repo_type: str, name: str, *, writes: bool = False) -> Repo:
        repo = self.hub.repos.get((repo_type, name))
        if repo is None or (repo.is_private and not self._token):
            raise _Refused(404 if self._token else 401, "RepoNotFound")
        if repo.refusal is not None:
            raise _Refused(403, repo.refusal)
        if writes and self._token != WRITER:
            raise _Refused(403, "Forbidden")
        return repo

    def _commit(self, repo: Repo, revision: str) -> str:
        sha = repo.branches.get(revision or "main", revision)
        if sha not in repo.commits:
            raise _Refused(404, "RevisionNotFound")
        return sha

    def info(self, body: bytes, type: str, name: str, revision: str = "") -> None:
        repo = self._repo(type, name)
        sha = self._commit(repo, revision) if repo.commits or revision else None
        files = [{"rfilename": path} for path in repo.commits.get(sha, ())]
        fields = {"id": name, "sha": sha, "siblings": files, "private": repo.is_private}
        self._send(200, {**fields, "tags": [], "downloads": 0, "likes": 0})

    def tree(self, body: bytes, type: str, name: str, revision: str) -> None:
        repo = self._repo(type, name)
        files = repo.commits[self._commit(repo, revision)]
        entries = [
            {"type": "file", "path": path, "size": len(x), "oid": hashlib.sha1(x).hexdigest()}
            for path, x in files.items()
        ]
        self._send(200, entries)

    def resolve(self, body: bytes, type: str, name: str, revision: str, path: str) -> None:
        repo = self._repo(type.rstrip("/") or "models", name)
        sha = self._commit(repo, revision)
        if path not in repo.commits[sha]:
            raise _Refused(404, "EntryNotFound")
        content = repo.commits[sha][path]
        etag = hashlib.sha1(content).hexdigest()
        self._send(200, content, {"ETag": f'"{etag}"', "X-Repo-Commit": sha})

    def create(self, body: bytes) -> None:
        fields = json.loads(body)
        name = f"{fields['organization']}/{fields['name']}"
        if not self._token:
            raise _Refused(401, "Unauthorized")
        if self._token != WRITER:
            raise _Refused(403, "Forbidden")
        key = (fields.get("type", "model") + "s", name)
        if key in self.hub.repos:
            url = f"{self.hub.endpoint}/{name}"
            return self._send(409, {"error": "You already created this repo", "url": url})
        is_private = fields.get("visibility") == "private" or bool(fields.get("private"))
        self.hub.repos[key] = repo = Repo(is_private=is_private)
        repo.commit("main", {".gitattributes": b""})
        self._send(200, {"url": f"{self.hub.endpoint}/{name}"})

    def may_write(self, body: bytes, type: str, name: str) -> None:
        self._repo(type, name, writes=True)
        self._send(200, {})

    def branch(self, body: bytes, type: str, name: str, revision: str) -> None:
        repo = self._repo(type, name, writes=True)
        if revision in repo.branches:
            return self._send(409, {"error": "Reference already exists"})
        repo.branches[revision] = repo.branches["main"]
        self._send(200, {})

    def preupload(self, body: bytes, type: str, name: str, revision: str) -> None:
        self._commit(self._repo(type, name, writes=True), revision)
        files = [
            {
                "path": file["path"],
                "uploadMode": "lfs" if file["path"].endswith(".safetensors") else "regular",
                "shouldIgnore": False,
            }
            for file in json.loads(body)["files"]
        ]
        self._send(200, {"files": files})

    def lfs(self, body: bytes, name: str) -> None:
        self._repo("models", name, writes=True)
        objects = [
            {
                "oid": item["oid"],
                "size": item["size"],
                "actions": {"upload": {"href": f"{self.hub.endpoint}/blobs/{item['oid']}"}},
            }
            for item in json.loads(body)["objects"]
        ]
        self._send(200, {"transfer": "basic", "objects": objects})

    def blob(self, body: bytes, oid: str) -> None:
        assert hashlib.sha256(body).hexdigest() == oid
        self.hub.blobs[oid] = body
        self._send(200, {})

    def commit(self, body: bytes, type: str, name: str, revision: str) -> None:
        repo = self._repo(type, name, writes=True)
        files = dict(repo.commits[self._commit(repo, revision)])
        for line in body.splitlines():
            item = json.loads(line)
            value = item["value"]
            if item["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif item["key"] == "lfsFile":
                files[value["path"]] = self.hub.blobs[value["oid"]]
            elif item["key"] == "deletedFile":
                del files[value["path"]]
        sha = repo.commit(revision, files)
        url = f"{self.hub.endpoint}/{name}/commit/{sha}"
        self._send(200, {"success": True, "commitOid": sha, "commitUrl": url})


_REPO = r"/api/(?P<type>models|datasets)/(?P<name>[^/]+/[^/]+)"
# Path of each request, and the method that responds.
_ROUTES = (
    (r"/api/repos/create", "create"),
    (_REPO, "info"),
    (rf"{_REPO}/revision/(?P<revision>[^/]+)", "info"),
    (rf"{_REPO}/tree/(?P<revision>[^/]+)", "tree"),
    (rf"{_REPO}/auth-check/write", "may_write"),
    (rf"{_REPO}/branch/(?P<revision>[^/]+)", "branch"),
    (rf"{_REPO}/preupload/(?P<revision>[^/]+)", "preupload"),
    (rf"{_REPO}/commit/(?P<revision>[^/]+)", "commit"),
    (r"/(?P<name>[^/]+/[^/]+)\.git/info/lfs/objects/batch", "lfs"),
    (r"/blobs/(?P<oid>\w+)", "blob"),
    (
        r"/(?P<type>datasets/)?(?P<name>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<path>.+)",
        "resolve",
    ),
)
