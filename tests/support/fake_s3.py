"""A local server that implements the S3 API."""

import contextlib
import urllib.request
from collections.abc import Iterator

import pytest

from praxis_lite.host import object_stores


@contextlib.contextmanager
def s3_bucket(bucket: str = "bucket") -> Iterator[str]:
    """Starts a server, sets environment variables for clients, and yields an empty bucket's URL."""
    pytest.importorskip("obstore")
    threaded = pytest.importorskip("moto.server").ThreadedMotoServer
    server = threaded("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    object_stores._bucket.cache_clear()  # Its clients have the endpoint of an earlier server.
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {
            "AWS_ENDPOINT_URL": f"http://{host}:{port}",
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_REGION": "us-east-1",
        }.items():
            patch.setenv(name, value)
        # All servers of a process share their buckets.
        for path, method in (("moto-api/reset", "POST"), (bucket, "PUT")):
            request = urllib.request.Request(f"http://{host}:{port}/{path}", method=method)
            urllib.request.urlopen(request).close()
        try:
            yield f"s3://{bucket}"
        finally:
            server.stop()
            object_stores._bucket.cache_clear()
