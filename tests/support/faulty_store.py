"""A proxy in front of a store's server that fails on purpose.

Each request fails with a probability, in a way that a seeded generator chooses. The kinds of
faults are those of networks and of overloaded stores. The hard ones are requests that are carried
out although the client sees an error, because a retry then finds its own first attempt.
"""

import collections
import contextlib
import dataclasses
import logging
import os
import random
import re
import signal
import threading
import time
import urllib.parse
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.fake_gcs import gcs_bucket
from tests.support.fake_s3 import s3_bucket
from tests.support.store_proxy import Answer, Handler, Request, StoreProxy

KINDS = (
    "connection reset",
    "connection reset, request carried out",
    "status 503",
    "status 503, request carried out",
    "status 429",
    "truncated body",
    "delay",
    "request repeated",
    "outdated listing",
)
_DELAY_SECONDS = 0.3


@dataclasses.dataclass
class Kill:
    """A process to kill at a request.

    Attributes:
      pid: The process.
      request: Pattern of the request's method and unquoted path.
      nth: Number of matching requests until the kill.
      carried_out: Whether the last request is forwarded before the kill.
    """

    pid: int
    request: str
    nth: int
    carried_out: bool


class FaultyProxy(StoreProxy):
    """A proxy that injects faults and kills.

    Args:
      target: URL of the server.
      seed: Seed of the faults.
      rate: Probability of a fault, for each request.

    Attributes:
      injected: The kinds of the injected faults, in order.
      kill: The process to kill, or None.
    """

    def __init__(self, target: str, seed: int, rate: float):
        super().__init__(target)
        self.injected: list[str] = []
        self.kill: Kill | None = None
        self._rate, self._random, self._lock = rate, random.Random(seed), threading.Lock()
        # Earlier answers of each listing.
        self._listings: dict[str, list[Answer]] = collections.defaultdict(list)

    def handle(self, request: Request, handler: Handler) -> None:
        if self._is_killed(request):
            return handler.reset()
        answer, kind = None, ""
        with self._lock:
            if self._random.random() < self._rate:
                kind = self._random.choice(self._applicable(request))
                self.injected.append(kind)
            if kind == "outdated listing":
                answer = self._random.choice(self._listings[request.path])
        if kind == "delay":
            time.sleep(_DELAY_SECONDS)
        if answer is None and kind not in ("connection reset", "status 503", "status 429"):
            answer = self.forward(request)
            if kind == "request repeated":
                answer = self.forward(request)
            if answer.status == 200 and _is_listing(request):
                with self._lock:
                    self._listings[request.path].append(answer)
        if kind.startswith("connection reset"):
            return handler.reset()
        if kind.startswith("status"):
            answer = Answer(int(kind[7:10]), {}, b"<Error><Code>SlowDown</Code></Error>")
        assert answer is not None, "The request was forwarded."
        handler.send(answer, is_truncated=kind == "truncated body")

    def _is_killed(self, request: Request) -> bool:
        """Kills the process if its request has come, and returns whether it did."""
        with self._lock:
            kill = self.kill
            # obstore encodes most characters of names in Google Cloud Storage.
            line = f"{request.method} {urllib.parse.unquote(request.path)}"
            if kill is None or not re.search(kill.request, line):
                return False
            kill.nth -= 1
            if kill.nth:
                return False
            self.kill = None
        if kill.carried_out:
            self.forward(request)
        os.kill(kill.pid, signal.SIGKILL)
        return True

    def _applicable(self, request: Request) -> list[str]:
        excluded = set()
        if request.method != "GET":
            excluded.add("truncated body")
        if request.path not in self._listings:
            excluded.add("outdated listing")
        return [kind for kind in KINDS if kind not in excluded]


def _is_listing(request: Request) -> bool:
    """Returns whether a request lists objects, in the protocol of S3 or of GCS."""
    path, _, query = request.path.partition("?")
    return request.method == "GET" and ("list-type=2" in query or path.endswith("/o"))


@contextlib.contextmanager
def faulty_bucket(scheme: str, seed: int, rate: float) -> Iterator[tuple[str, FaultyProxy, Any]]:
    """Starts the server of an "s3" or "gs" store behind a proxy; see `s3_bucket`.

    Yields:
      The URL of an empty bucket, the proxy, and an obstore client that does not use the proxy.
    """
    stores = pytest.importorskip("obstore.store")
    logging.getLogger("werkzeug").disabled = True  # It prints each request.
    servers = {"s3": s3_bucket, "gs": gcs_bucket}
    with servers[scheme]() as url, pytest.MonkeyPatch.context() as patch:
        options = {"client_options": {"allow_http": True}}
        if scheme == "s3":
            target = os.environ["AWS_ENDPOINT_URL"]
            client = stores.S3Store("bucket", **options)
        else:
            target = os.environ["TENSORSTORE_GCS_HTTP_URL"]
            client = stores.GCSStore("bucket", **options)
        proxy = FaultyProxy(target, seed, rate)
        for name, text in os.environ.items():
            if target in text:
                patch.setenv(name, text.replace(target, proxy.url))
        try:
            yield url, proxy, client
        finally:
            proxy.close()
