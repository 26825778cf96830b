"""The HTTP endpoints, which answer with a JSON body or server-sent events."""

import asyncio
import contextlib
import hmac
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from typing import Any, TypeVar

import numpy as np
import orjson
import prometheus_client
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from praxis_lite.host.host_names import has_allowed_host
from praxis_tools.serve import bodies, requests
from praxis_tools.serve.answer import Answer, Delta
from praxis_tools.serve.api_error import ApiError
from praxis_tools.serve.engine import Engine
from praxis_tools.serve.requests import Limits
from praxis_tools.serve.served_model import ServedModel

MAX_BODY_BYTES = 4 << 20  # Maximum size of a request body.
BODY_SECONDS = 30.0  # Maximum time for a client to send the body.
# Recorded as the outcome of requests whose client has disconnected.
_CLIENT_GONE = ApiError(499, "The client has disconnected.", code="client_gone")
_PREFIX = "praxis_lite_serve"  # Prefix of the metric names in /metrics.
T = TypeVar("T")


def application(model: ServedModel, engine: Engine, limits: Limits) -> Starlette:
    """Returns the ASGI application that serves a model."""
    registry = prometheus_client.CollectorRegistry()
    registry.register(_EngineCollector(engine))
    answers = prometheus_client.Counter(
        f"{_PREFIX}_answers", "Answers by path and status.", ["path", "status"], registry=registry
    )
    card = {
        "id": model.name,
        "object": "model",
        "created": 0,
        "owned_by": "praxis_lite",
        "max_model_len": model.max_length,
    }

    def generation_endpoint(
        parse: Callable[[bytes], requests.Request],
    ) -> Callable[[HttpRequest], Awaitable[Response]]:
        async def endpoint(http: HttpRequest) -> Response:
            body = await _body(http)

            def tokenized() -> tuple[requests.Request, list[np.ndarray]]:
                request = parse(body)
                return request, model.tokenize(request)

            # Do this outside of the event loop, because templates and long texts can be slow.
            request, prompts = await asyncio.to_thread(tokenized)
            answer = Answer(request, prompts, model, engine, limits.seconds)
            return await _response(http, answer, model.name)

        return endpoint

    async def models(http: HttpRequest) -> Response:
        return _json({"object": "list", "data": [card]})

    async def named_model(http: HttpRequest) -> Response:
        if http.path_params["name"] != model.name:
            raise ApiError(
                404,
                f"There is no such model; this server only serves {model.name}.",
                param="model",
                code="model_not_found",
            )
        return _json(card)

    async def health(http: HttpRequest) -> Response:
        if engine.is_draining:
            return _json({"status": "draining"}, 503)
        return _json({"status": "ok"})

    async def metrics(http: HttpRequest) -> Response:
        text = prometheus_client.generate_latest(registry)
        return Response(text, media_type=prometheus_client.CONTENT_TYPE_LATEST)

    routes = {
        ("POST", "/v1/completions"): generation_endpoint(requests.completion),
        ("POST", "/v1/chat/completions"): generation_endpoint(requests.chat),
        ("GET", "/v1/models"): models,
        ("GET", "/v1/models/{name:path}"): named_model,
        ("GET", "/health"): health,
        ("GET", "/metrics"): metrics,
    }

    async def unknown_url(http: HttpRequest, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return _error(
            ApiError(
                error.status_code,
                f"{http.method} {http.url.path}: {error.detail}. Use one of "
                f"{', '.join(map(' '.join, routes))}.",
                code="unknown_url",
            )
        )

    async def failed(http: HttpRequest, error: Exception) -> Response:
        return _error(
            ApiError(500, "The server failed. Its output shows the reason.", code="failed")
        )

    return Starlette(
        routes=[
            Route(path, _checked(path, endpoint, limits, answers), methods=[method])
            for (method, path), endpoint in routes.items()
        ],
        exception_handlers={HTTPException: unknown_url, Exception: failed},
    )


def _checked(
    path: str,
    endpoint: Callable[[HttpRequest], Awaitable[Response]],
    limits: Limits,
    answers: prometheus_client.Counter,
) -> Callable[[HttpRequest], Awaitable[Response]]:
    """Wraps an endpoint to check the host and the API key, and to count answers."""

    async def checked(http: HttpRequest) -> Response:
        try:
            hosts = http.headers.getlist("host")
            if limits.hosts is not None and not has_allowed_host(hosts, limits.hosts):
                raise ApiError(
                    403,
                    f"The Host header is {', '.join(hosts)!a:.80}, but this server only answers "
                    "requests from the same machine. Start it with --host to allow other machines.",
                )
            _check_key(http, limits.api_key)
            response = await endpoint(http)
        except ClientDisconnect:
            response = _error(_CLIENT_GONE)
        except ApiError as error:
            response = _error(error)
        answers.labels(path, response.status_code).inc()
        return response

    return checked


class _EngineCollector(Collector):
    """Collects an engine's metrics for each request to /metrics."""

    def __init__(self, engine: Engine):
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        engine = self._engine
        for kind, name, value, text in (
            (GaugeMetricFamily, "rows", engine.num_rows, "Rows decoded at the same time."),
            (GaugeMetricFamily, "rows_taken", engine.num_in_rows, "Rows with an answer."),
            (GaugeMetricFamily, "answers_waiting", engine.num_waiting, "Answers in the queue."),
            (CounterMetricFamily, "prompts", engine.num_prompts, "Prompts read."),
            (CounterMetricFamily, "tokens", engine.num_tokens, "Tokens generated."),
        ):
            yield kind(f"{_PREFIX}_{name}", text, value=value)


def _check_key(http: HttpRequest, key: str | None) -> None:
    if key is None or not http.url.path.startswith("/v1/"):
        return
    given = http.headers.get("authorization", "").removeprefix("Bearer ")
    if not hmac.compare_digest(given.encode(), key.encode()):
        raise ApiError(
            401,
            "The API key is missing or wrong. Send Authorization: Bearer KEY.",
            code="invalid_api_key",
        )


async def _body(http: HttpRequest) -> bytes:
    """Reads a request body; raises ApiError if it is not JSON, is too large or arrives too late."""
    kind = http.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        # Browsers let any website send other content types here without a preflight request.
        raise ApiError(
            415,
            f"The Content-Type is {kind!a:.80}; expected application/json.",
        )
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for piece in http.stream():
                body += piece
                if len(body) > MAX_BODY_BYTES:
                    raise ApiError(
                        413,
                        f"The body exceeds {MAX_BODY_BYTES} bytes. Send a shorter prompt.",
                        code="body_too_large",
                    )
    except TimeoutError:
        raise ApiError(
            408, f"The body did not arrive within {BODY_SECONDS:g} s. Send it again."
        ) from None
    return bytes(body)


async def _response(http: HttpRequest, answer: Answer, name: str) -> Response:
    deltas = answer.deltas()
    try:
        if not answer.request.stream:
            all_deltas = await _unless_disconnected(http, _collect(deltas))
            return _json(bodies.complete_body(answer, name, all_deltas))
        # Wait for the first token, because the HTTP status can only report errors until then.
        first = await _unless_disconnected(http, anext(deltas))
    except BaseException:
        answer.cancel()
        raise
    return _EventStream(answer, _events(answer, name, first, deltas))


async def _collect(deltas: AsyncIterator[Delta]) -> list[Delta]:
    return [delta async for delta in deltas]


async def _unless_disconnected(http: HttpRequest, result: Awaitable[T]) -> T:
    """Awaits a result; raises ApiError if the client disconnects first."""

    async def disconnect() -> None:
        while (await http.receive())["type"] != "http.disconnect":
            pass

    answered, disconnected = asyncio.ensure_future(result), asyncio.ensure_future(disconnect())
    try:
        await asyncio.wait([answered, disconnected], return_when=asyncio.FIRST_COMPLETED)
        if answered.done():
            return answered.result()
        raise _CLIENT_GONE
    finally:
        answered.cancel()
        disconnected.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await disconnected


class _EventStream(StreamingResponse):
    """A stream of server-sent events; unfinished generations are cancelled when the stream ends."""

    def __init__(self, answer: Answer, events: AsyncIterator[bytes]):
        super().__init__(
            events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"}
        )
        self._answer = answer

    async def __call__(self, *scope_receive_send: Any) -> None:
        try:
            await super().__call__(*scope_receive_send)
        finally:
            self._answer.cancel()


async def _events(
    answer: Answer, name: str, first: Delta, deltas: AsyncIterator[Delta]
) -> AsyncIterator[bytes]:
    for chunk in bodies.first_chunks(answer, name):
        yield _event(chunk)
    yield _event(bodies.chunk(answer, name, first))
    try:
        async for delta in deltas:
            yield _event(bodies.chunk(answer, name, delta))
    except ApiError as error:
        yield _event(error.body())
        return
    if answer.request.include_usage:
        yield _event(bodies.usage_chunk(answer, name))
    yield b"data: [DONE]\n\n"


def _event(content: Mapping[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(content) + b"\n\n"


def _json(content: Mapping[str, Any], status: int = 200, headers: Any = None) -> Response:
    return Response(orjson.dumps(content), status, headers, "application/json")


def _error(error: ApiError) -> Response:
    return _json(error.body(), error.status, error.headers)
