"""The server: its routes, its error responses, and its main loop."""

from __future__ import annotations

import asyncio
import hmac
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from importlib.resources import files
from typing import Any, TypeVar

from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.middleware.body_limit import RequestBodyLimitMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from ...decoding.completion import AnyCompleter, Completion, CompletionOptions, Piece
from ...errors import CacheFullError, DeviceMemoryError, ExportableCacheError, InputError
from ...generation.sampling_options import SamplingOptions
from ...generation.token_text import TokenTexts
from .engine import Busy, Engine
from .origins import AllowedOrigins, OriginGuard
from .responses import Response, error_of
from .schema import ChatRequest, CompletionRequest, default_sampling, message_of

Result = TypeVar("Result")

#: Value of `Retry-After` for a full queue, in seconds.
_RETRY_AFTER = 1
#: Limit of connections, because each may hold a body of some megabytes.
_MOST_CONNECTIONS = 512
#: Seconds that running responses get to finish when the server stops.
_GRACE = 5
_CLIENT_CLOSED = 499
_DONE = b"data: [DONE]\n\n"
#: The page may only contact its own server, and no other site may embed it.
_PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; connect-src 'self'; script-src 'unsafe-inline'; "
    "style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
}


@dataclass(frozen=True)
class ServerOptions:
    """Options of the server.

    Attributes:
        model_name: Name of the model in requests and responses.
        most_waiting: Length of the request queue; further requests are refused.
        api_key: Key that requests must carry, or None.
        most_bytes: Largest body of a request.
        host: Address to listen on, which decides the accepted Host headers, see `AllowedOrigins.of`.
        allow_hosts: Further names in Host headers.
        allow_origins: Origins of other sites whose pages may send requests, such as "https://example.org".
        sampling: Default sampling of requests; None for that of the checkpoint, see `default_sampling`.
    """

    model_name: str
    most_waiting: int = 64
    api_key: str | None = None
    most_bytes: int = 8 * 2**20
    host: str = "127.0.0.1"
    allow_hosts: tuple[str, ...] = ()
    allow_origins: tuple[str, ...] = ()
    sampling: SamplingOptions | None = None

    def allowed(self) -> AllowedOrigins:
        """Return the accepted names and origins.

        Raises:
            InputError: If one is not valid.
        """
        return AllowedOrigins.of(self.host, self.api_key is not None, self.allow_hosts, self.allow_origins)


class ClientGone(Exception):
    """The client has closed the connection."""


def make_app(completer: AnyCompleter, options: ServerOptions) -> FastAPI:
    """Return the application over one session. Any ASGI server runs it, in one process.

    Args:
        completer: AnyCompleter over the session, which no other caller may use meanwhile.
        options: Options of the server.
    """
    engine = Engine(completer, options.most_waiting)
    sampling = options.sampling or default_sampling(completer.settings)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        engine.close()

    async def with_key(request: Request) -> None:
        given = request.headers.get("authorization", "").encode()
        if options.api_key is not None and not hmac.compare_digest(given, f"Bearer {options.api_key}".encode()):
            raise HTTPException(401, "the API key is missing or wrong; send Authorization: Bearer KEY")

    app = FastAPI(title="exportable-cache", lifespan=lifespan, openapi_url=None)
    api = APIRouter(prefix="/v1", dependencies=[Depends(with_key)])
    app.state.engine = engine
    _handle_errors(app, completer, options)
    # The middleware that is added last is outermost.
    app.add_middleware(RequestBodyLimitMiddleware, max_body_size=options.most_bytes)
    app.add_middleware(_BodyTooLong, most_bytes=options.most_bytes)
    app.add_middleware(OriginGuard, allowed=options.allowed())

    @app.get("/", response_class=HTMLResponse, include_in_schema=False)
    async def page() -> HTMLResponse:
        return HTMLResponse((files(__package__) / "page.html").read_text(encoding="utf-8"), headers=_PAGE_HEADERS)

    @app.get("/health")
    async def health() -> dict[str, Any]:
        return {"status": "ok", "waiting": engine.waiting, "answered": engine.answered}

    def about(model: str) -> dict[str, Any]:
        held = completer.max_length
        fields = {"id": model, "object": "model", "created": 0, "owned_by": "exportable-cache"}
        return {**fields, "max_model_len": held, "chat": completer.takes_messages}

    #: The adapter of each model name.
    names = {options.model_name: None, **{f"{options.model_name}:{one}": one for one in completer.adapters}}

    @api.get("/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [about(model) for model in names]}

    @api.get("/models/{model:path}")
    async def model(model: str) -> dict[str, Any]:
        adapter_of(model)
        return about(model)

    @api.get("/cache")
    async def cache() -> dict[str, Any]:
        return await engine.call(cache_fill, completer)

    @api.post("/chat/completions")
    async def chat(request: Request, body: ChatRequest) -> Any:
        adapter_of(body.model)
        return await respond(request, body, lambda: completer.encode(body.prompt()))

    @api.post("/completions")
    async def complete(request: Request, body: CompletionRequest) -> Any:
        adapter_of(body.model)
        text = body.text()
        return await respond(request, body, lambda: completer.encode(text) if isinstance(text, str) else text)

    def adapter_of(model: str) -> str | None:
        if model not in names:
            known = ", ".join(map(repr, names))
            raise HTTPException(404, f"there is no model {model!r:.100}; this server has {known}")
        return names[model]

    async def respond(request: Request, body: ChatRequest | CompletionRequest, ids: Callable[[], list[int]]) -> Any:
        completion_options: CompletionOptions = replace(body.options(sampling), adapter=adapter_of(body.model))
        response = Response(body.model, isinstance(body, ChatRequest), TokenTexts(completer.tokenizer))
        pieces = engine.run(
            lambda follower: completer.complete(ids(), completion_options, follower), completion_options.constraint
        )
        # Wait for the first piece before sending a status, because errors occur before it.
        first = await _unless_disconnected(request, anext(pieces))
        if body.stream:
            usage = body.stream_options is not None and bool(body.stream_options.include_usage)
            stream = _events(response, first, pieces, usage)
            return StreamingResponse(stream, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        return await _unless_disconnected(request, _whole(response, first, pieces))

    app.include_router(api)
    return app


async def _whole(
    response: Response, first: tuple[Completion, Piece], pieces: AsyncIterator[tuple[Completion, Piece]]
) -> dict[str, Any]:
    completion, piece = first
    response.add(piece)
    async with aclosing(pieces):  # type: ignore[type-var]
        async for _, piece in pieces:
            response.add(piece)
    return response.whole(completion)


async def _events(
    response: Response, first: tuple[Completion, Piece], pieces: AsyncIterator[tuple[Completion, Piece]], usage: bool
) -> AsyncIterator[bytes]:
    completion, piece = first
    async with aclosing(pieces):  # type: ignore[type-var]
        try:
            head = response.first()
            if head is not None:
                yield _event(head)
            yield _event(response.chunk(completion, piece))
            async for completion, piece in pieces:
                yield _event(response.chunk(completion, piece))
        except ExportableCacheError as error:
            # The status is already sent, so the error is an event, as in the API.
            yield _event(error_of(str(error), "server_error"))
            return
    if usage:
        yield _event(response.last(completion))
    yield _DONE


def _event(document: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


async def _unless_disconnected(request: Request, work: Awaitable[Result]) -> Result:
    """Return the result of `work`, or cancel it if the client disconnects.

    Raises:
        ClientGone: If the client disconnects.
    """
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        for one in (task, gone):
            one.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def cache_fill(completer: AnyCompleter) -> dict[str, Any]:
    """Return the number of tokens in each layer. Slots are None if a layer keeps one state for any number of tokens."""
    length = completer.length
    layers = [
        {"kind": kind, "slots": slots, "filled": None if slots is None else min(length, slots)}
        for kind, slots in completer.layers
    ]
    return {"length": length, "max_length": completer.max_length, "layers": layers}


class _BodyTooLong:
    """Replaces Starlette's plain-text response to a long body, which bypasses all handlers, by the API's format."""

    def __init__(self, app: ASGIApp, most_bytes: int) -> None:
        self._app, self._most_bytes = app, most_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_replaced = False

        async def checked(message: MutableMapping[str, Any]) -> None:
            nonlocal is_replaced
            if message["type"] == "http.response.start" and message["status"] == 413:
                is_replaced = True
                error = error_of(f"the body must have at most {self._most_bytes} bytes (Content Too Large); send less")
                await JSONResponse(error, 413)(scope, receive, send)
            elif not is_replaced:
                await send(message)

        await self._app(scope, receive, checked)


def _handle_errors(app: FastAPI, completer: AnyCompleter, options: ServerOptions) -> None:
    def refuse(status: int, message: str, kind: str = "invalid_request_error", **more: Any) -> JSONResponse:
        headers = {"Retry-After": str(_RETRY_AFTER)} if status == 503 else None
        return JSONResponse(error_of(message, kind, **more), status, headers=headers)

    @app.exception_handler(HTTPException)
    async def of_http(request: Request, error: HTTPException) -> JSONResponse:
        return refuse(error.status_code, str(error.detail))

    @app.exception_handler(RequestValidationError)
    async def of_fields(request: Request, error: RequestValidationError) -> JSONResponse:
        wrong = error.errors()[0]
        if wrong["type"] == "json_invalid":
            return refuse(400, f"the body must be valid JSON: {wrong.get('ctx', {}).get('error', '')}"[:200])
        if "json" not in request.headers.get("content-type", ""):
            return refuse(400, "Content-Type must be application/json; send this header")
        sentence, field = message_of(wrong)
        return refuse(400, sentence, param=field)

    @app.exception_handler(UnicodeEncodeError)
    async def of_text(request: Request, error: UnicodeEncodeError) -> JSONResponse:
        # Lone surrogates, which neither pydantic nor a tokenizer can encode.
        got = ascii(error.object[error.start : error.start + 1])
        return refuse(400, f"the request must be valid UTF-8 text, got the lone surrogate {got}; leave it out")

    @app.exception_handler(CacheFullError)
    async def of_room(request: Request, error: CacheFullError) -> JSONResponse:
        # litellm recognises an overflow by the beginning of this sentence, langchain by the code in it.
        code = "context_length_exceeded"
        held = f"This model's maximum context length is {completer.max_length} tokens ({code})"
        field = "messages" if request.url.path.endswith("/chat/completions") else "prompt"
        return refuse(400, f"{held}: {error}", code=code, param=field)

    @app.exception_handler(InputError)
    async def of_input(request: Request, error: InputError) -> JSONResponse:
        return refuse(400, str(error))

    @app.exception_handler(DeviceMemoryError)
    async def of_memory(request: Request, error: DeviceMemoryError) -> JSONResponse:
        return refuse(503, str(error), "server_error")

    @app.exception_handler(Busy)
    async def of_queue(request: Request, error: Busy) -> JSONResponse:
        message = f"the request queue is full (limit {options.most_waiting}); retry later"
        return refuse(503, message, "overloaded_error")

    @app.exception_handler(ClientGone)
    async def of_client(request: Request, error: ClientGone) -> JSONResponse:
        return refuse(_CLIENT_CLOSED, "the client closed the connection")

    @app.exception_handler(Exception)
    async def of_anything(request: Request, error: Exception) -> JSONResponse:
        return refuse(500, f"unexpected {type(error).__name__}; the server's log has more", "server_error")


def run(app: FastAPI, host: str, port: int, started: Callable[[str], None]) -> None:
    """Serve until interrupted.

    Args:
        app: The application.
        host: Address to listen on.
        port: Port to listen on; 0 for a free one.
        started: Called with the URL before requests are accepted.

    Raises:
        InputError: If the server cannot listen there.
    """
    import uvicorn

    listening = _listen(host, port)
    shown = f"[{host}]" if ":" in host else host
    started(f"http://{shown}:{listening.getsockname()[1]}")
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        limit_concurrency=_MOST_CONNECTIONS,
        timeout_graceful_shutdown=_GRACE,
        server_header=False,
        # Off, because a second interrupt would cancel lifespan messages with a traceback.
        lifespan="off",
    )
    try:
        uvicorn.Server(config).run(sockets=[listening])
    except KeyboardInterrupt:
        pass
    finally:
        app.state.engine.close()


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        found = socket.socket(family, kind, protocol)
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind(address)
        found.listen(128)
    except OSError as error:
        raise InputError(
            f"cannot listen on {host}, port {port}: {error.strerror or error}; choose another with --host and --port"
        ) from error
    return found
