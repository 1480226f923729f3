"""The server: its routes, its error responses, and its main loop."""

from __future__ import annotations

import asyncio
import hmac
import json
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, MutableMapping, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from importlib.resources import files
from typing import Any, NamedTuple, TypeVar

from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.middleware.body_limit import RequestBodyLimitMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from ...decoding.completion import AnyCompleter, Completion, CompletionOptions, Piece, PromptItems
from ...decoding.context import PROTECTED, fitting_turns, protected_tokens
from ...errors import CacheFullError, DeviceMemoryError, ExportableCacheError, InputError
from ...generation.constraint import Constraint, Follower
from ...generation.sampling_options import SamplingOptions
from ...generation.templates import TemplateParser, characters_of
from ...generation.text import check_depth
from ...generation.token_text import TokenTexts
from ...generation.tool_calls import Dialect, ResponseParser
from ...models.tokenizers.text import LONG_TEXT, tokenizer_errors
from ...program.inputs.kinds import kinds_in
from .engine import METRICS_TYPE, Busy, Counts, Engine, metrics_text
from .fields import message_of
from .items import Items, ItemsRequest
from .origins import AllowedOrigins, OriginGuard
from .responses import Answer, Parser, Response, error_of
from .schema import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest, default_sampling, field_of

Result = TypeVar("Result")

#: Value of `Retry-After` for a full queue, in seconds.
_RETRY_AFTER = 1
#: Limit of connections, because each may hold a body of some megabytes.
_MOST_CONNECTIONS = 512
#: Seconds that running responses get to finish when the server stops.
_GRACE = 5
_CLIENT_CLOSED = 499
#: Tokens of a prompt that are looked at for whether the response begins within reasoning.
_PROMPT_END = 16
#: Roles of the messages that stay when turns are dropped, at the beginning of a conversation.
_SYSTEM = ("system", "developer")
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
    dialect, texts = Dialect.of(completer.tokenizer), TokenTexts(completer.tokenizer)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        engine.close()

    async def with_key(request: Request) -> None:
        given = request.headers.get("authorization", "").encode()
        if options.api_key is not None and not hmac.compare_digest(given, f"Bearer {options.api_key}".encode()):
            raise HTTPException(401, "the API key is missing or wrong; send Authorization: Bearer KEY")

    app = FastAPI(title="exportable-cache", lifespan=lifespan, openapi_url=None)
    keyed = APIRouter(dependencies=[Depends(with_key)])
    api = APIRouter(prefix="/v1", dependencies=[Depends(with_key)])
    counts = Counts()
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
        return await respond(request, body, await _unless_disconnected(request, chat_jobs(body)))

    @api.post("/completions")
    async def complete(request: Request, body: CompletionRequest) -> Any:
        chosen = replace(body.options(sampling), adapter=adapter_of(body.model))
        return await respond(request, body, await _unless_disconnected(request, text_jobs(body, chosen)))

    @api.post("/responses")
    async def respond_with_items(request: Request, body: ItemsRequest) -> Any:
        adapter_of(body.model)
        (only,), items = await _unless_disconnected(request, chat_jobs(body.chat())), Items(body)
        pieces = _pieces(engine, [only], counts)
        first = await _unless_disconnected(request, anext(pieces))
        events = _item_events(items, only.answer, first, pieces)
        if body.stream:
            return StreamingResponse(
                _named_events(events), media_type="text/event-stream", headers={"Cache-Control": "no-cache"}
            )
        return await _unless_disconnected(request, _last_response(events))

    @api.post("/embeddings")
    async def embed() -> None:
        raise HTTPException(404, "embeddings are not supported, because this server generates text; use another server")

    @keyed.post("/tokenize")
    async def tokenize(request: Request, body: TokenizeRequest) -> dict[str, Any]:
        adapter_of(options.model_name if body.model is None else body.model)
        engine.check_room()
        given = body.input()
        if isinstance(given, str):
            encode = partial(completer.encode, given, starts=body.add_special_tokens)
            encoding = engine.prepare(encode, characters=len(given))
        else:
            check_tools(given)
            encoding = encoded(given, lambda *asked: _encoded(*asked)[0])
        ids = await _unless_disconnected(request, encoding)
        return {"tokens": ids, "count": len(ids), "max_model_len": completer.max_length}

    @keyed.post("/detokenize")
    async def detokenize(request: Request, body: DetokenizeRequest) -> dict[str, Any]:
        adapter_of(options.model_name if body.model is None else body.model)
        engine.check_room()

        def decoded() -> str:
            with tokenizer_errors("the tokenizer cannot decode these tokens", "send ids from its vocabulary"):
                return str(completer.tokenizer.decode(body.tokens, skip_special_tokens=False))

        text = await _unless_disconnected(request, engine.prepare(decoded))
        return {"prompt": text, "content": text}

    @app.get("/metrics")
    async def metrics() -> PlainTextResponse:
        return PlainTextResponse(metrics_text(counts, engine), media_type=METRICS_TYPE)

    def job(prompt: _Fitted, chosen: CompletionOptions, answer: Answer) -> Job:
        def begin(follower: Follower | None) -> Completion:
            completion = completer.complete(prompt.ids, chosen, follower, prompt.items)
            completion.dropped_turns = prompt.dropped
            return completion

        return Job(begin, answer, chosen.constraint)

    async def text_jobs(body: CompletionRequest, chosen: CompletionOptions) -> list[Job]:
        engine.check_room()
        # Not the number of the request before.
        jobs, chosen = list[Job](), replace(chosen, protected=PROTECTED)
        for prompt in body.prompts():
            if isinstance(prompt, str):
                await engine.prepare(completer.check_characters, len(prompt))
                prompt = await engine.prepare(completer.encode, prompt, characters=len(prompt))
            jobs += [job(_Fitted(prompt), one, Answer()) for one in body.choices(chosen)]
        return jobs

    async def encoded(body: ChatRequest, fit: Callable[..., Result]) -> Result:
        forms, tools = body.prompts(), body.plain_tools()
        check_depth("messages", forms[0])
        check_depth("tools", tools)
        # Images take long, like long texts.
        characters = LONG_TEXT if kinds_in(forms[0]) else characters_of([forms[0], tools])
        return await engine.prepare(fit, completer, forms, tools, characters=characters)

    def adapter_of(model: str) -> str | None:
        if model not in names:
            known = ", ".join(map(repr, names))
            raise HTTPException(404, f"there is no model {model!r:.100}; this server has {known}")
        return names[model]

    def check_tools(body: ChatRequest) -> None:
        if body.plain_tools() and not dialect.takes_tools:
            raise InputError(
                "tools must be left out, because this model's chat template does not describe tools; describe them "
                "in a message"
            )

    known: dict[str, int] = {}

    async def chat_jobs(body: ChatRequest) -> list[Job]:
        tools = body.used_tools()
        check_tools(body)
        engine.check_room()
        chosen = replace(body.options(sampling), adapter=adapter_of(body.model))
        await engine.prepare(completer.check_characters, body.least_characters)
        prompt = await encoded(body, partial(_fitted, chosen.max_new_tokens, known))
        chosen = replace(chosen, protected=prompt.protected)
        if dialect.is_plain and not tools:
            return [job(prompt, one, Answer()) for one in body.choices(chosen)]
        thought = dialect.thinks("".join(map(texts.text, prompt.ids[-_PROMPT_END:])))
        schemas = {tool.function.name: tool.function.parameters for tool in tools}
        is_strict = any(tool.function.strict for tool in tools)
        parallel = body.parallel_tool_calls is not False
        form = chosen.constraint
        if body.must_call or is_strict or (form is not None and (thought or dialect.format.name == "harmony")):
            form = dialect.form(schemas, required=body.must_call, parallel=parallel, content=form, thought=thought)
        chosen = replace(chosen, constraint=form, shown=dialect.tokens)
        make: Callable[[], Parser] = partial(ResponseParser, dialect, schemas, thought, None if parallel else 1)
        if dialect.template is not None:
            rendered = completer.tokenizer.decode(prompt.ids, skip_special_tokens=False)
            make = partial(TemplateParser, dialect.template, str(rendered), [tool.plain() for tool in tools])
        return [job(prompt, one, Answer(await engine.prepare(make))) for one in body.choices(chosen)]

    async def respond(request: Request, body: ChatRequest | CompletionRequest, jobs: list[Job]) -> Any:
        response = Response(body.model, isinstance(body, ChatRequest), texts, [job.answer for job in jobs])
        pieces = _pieces(engine, jobs, counts)
        # Wait for the first piece before sending a status, because errors occur before it.
        first = await _unless_disconnected(request, anext(pieces))
        if body.stream:
            usage = body.stream_options is not None and bool(body.stream_options.include_usage)
            stream = _events(response, first, pieces, usage)
            return StreamingResponse(stream, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        return await _unless_disconnected(request, _whole(response, first, pieces))

    app.include_router(api)
    app.include_router(keyed)
    return app


@dataclass
class Job:
    """A completion to run for one choice of a response.

    Attributes:
        begin: See `Engine.run`.
        answer: Takes the pieces.
        form: See `Engine.run`.
        is_new: True before the first piece.
    """

    begin: Callable[[Follower | None], Completion]
    answer: Answer
    form: Constraint | None = None
    is_new: bool = True


class _Step(NamedTuple):
    """A piece of the choice at an index."""

    choice: int
    completion: Completion
    piece: Piece


async def _pieces(engine: Engine, jobs: list[Job], counts: Counts) -> AsyncIterator[_Step]:
    """Yield the pieces of all choices, of as many at a time as the session has rows."""
    workers = min(engine.completer.rows, len(jobs))
    if workers == 1:
        for choice, job in enumerate(jobs):
            async with aclosing(_steps(engine, choice, job, counts)) as steps:  # type: ignore[type-var]
                async for step in steps:
                    yield step
        return
    found: asyncio.Queue[_Step | Exception | None] = asyncio.Queue(1)
    numbered = iter(enumerate(jobs))

    async def work() -> None:
        try:
            for choice, job in numbered:
                async with aclosing(_steps(engine, choice, job, counts)) as steps:  # type: ignore[type-var]
                    async for step in steps:
                        await found.put(step)
        except Exception as error:
            await found.put(error)
        else:
            await found.put(None)

    tasks = [asyncio.ensure_future(work()) for _ in range(workers)]
    try:
        while workers:
            one = await found.get()
            if isinstance(one, Exception):
                raise one
            if one is None:
                workers -= 1
            else:
                yield one
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _steps(engine: Engine, choice: int, job: Job, counts: Counts) -> AsyncIterator[_Step]:
    """Yield the pieces of one choice, and count them."""
    start, completion = time.monotonic(), None
    try:
        async with aclosing(engine.run(job.begin, job.form)) as pieces:  # type: ignore[type-var]
            async for completion, piece in pieces:
                if job.is_new:
                    counts.first_token(time.monotonic() - start)
                    job.is_new = False
                yield _Step(choice, completion, piece)
    finally:
        if completion is not None:
            counts.ended(completion, time.monotonic() - start)


async def _after(first: _Step, pieces: AsyncIterator[_Step]) -> AsyncIterator[_Step]:
    async with aclosing(pieces):  # type: ignore[type-var]
        yield first
        async for step in pieces:
            yield step


async def _item_events(
    items: Items, answer: Answer, first: _Step, pieces: AsyncIterator[_Step]
) -> AsyncIterator[dict[str, Any]]:
    for event in items.begin():
        yield event
    async with aclosing(_after(first, pieces)) as steps:  # type: ignore[type-var]
        async for _, completion, piece in steps:
            for event in items.add(answer.add(piece, completion.finish_reason is not None)):
                yield event
    for event in items.finish(completion, answer):
        yield event


async def _named_events(events: AsyncIterator[dict[str, Any]]) -> AsyncIterator[bytes]:
    async with aclosing(events):  # type: ignore[type-var]
        try:
            async for event in events:
                yield f"event: {event['type']}\n".encode() + _event(event)
        except ExportableCacheError as error:
            yield b"event: error\n" + _event(
                {"type": "error", "code": "server_error", "message": str(error), "param": None}
            )


async def _last_response(events: AsyncIterator[dict[str, Any]]) -> Any:
    async with aclosing(events):  # type: ignore[type-var]
        async for event in events:
            last = event
    return last["response"]


async def _whole(response: Response, first: _Step, pieces: AsyncIterator[_Step]) -> dict[str, Any]:
    completions: dict[int, Completion] = {}
    async with aclosing(_after(first, pieces)) as steps:  # type: ignore[type-var]
        async for index, completion, piece in steps:
            completions[index] = completion
            response.add(piece, completion.finish_reason is not None, index)
    return response.whole([completions[choice] for choice in sorted(completions)])


async def _events(response: Response, first: _Step, pieces: AsyncIterator[_Step], usage: bool) -> AsyncIterator[bytes]:
    completions: dict[int, Completion] = {}
    async with aclosing(_after(first, pieces)) as steps:  # type: ignore[type-var]
        try:
            async for index, completion, piece in steps:
                head = None if index in completions else response.first(index)
                if head is not None:
                    yield _event(head)
                completions[index] = completion
                for chunk in response.chunks(completion, piece, index):
                    yield _event(chunk)
        except ExportableCacheError as error:
            # The status is already sent, so the error is an event, as in the API.
            yield _event(error_of(str(error), "server_error"))
            return
    if usage:
        yield _event(response.last([completions[choice] for choice in sorted(completions)]))
    yield _DONE


class _Fitted(NamedTuple):
    """A prompt.

    Attributes:
        ids: Its token ids.
        dropped: Number of turns that the policy for a full cache left out.
        protected: Number of first tokens that shifts keep; None for the default.
        items: Its images and audio.
    """

    ids: list[int]
    dropped: int = 0
    protected: int | None = None
    items: PromptItems | None = None


def _encoded(
    completer: AnyCompleter, forms: list[list[dict[str, Any]]], tools: list[dict[str, Any]]
) -> tuple[list[int], PromptItems | None]:
    """Return the token ids and items of the first form of messages that the chat template takes.

    Raises:
        InputError: If it takes none, with the reason why it refuses the first one.
    """
    if "developer" not in str(completer.tokenizer.chat_template):
        # OpenAI's newer name of the role, which only few templates know.
        names = {"developer": "system"}
        forms = [[{**one, "role": names.get(one["role"], one["role"])} for one in form] for form in forms]

    def encode(form: list[dict[str, Any]]) -> tuple[list[int], PromptItems | None]:
        return completer.encode_items(form, tools) if kinds_in(form) else (completer.encode(form, tools), None)

    try:
        return encode(forms[0])
    except InputError:
        for form in forms[1:]:
            with suppress(InputError):
                return encode(form)
        raise


def _fitted(
    reserve: int | None,
    known: dict[str, int],
    completer: AnyCompleter,
    forms: list[list[dict[str, Any]]],
    tools: list[dict[str, Any]],
) -> _Fitted:
    """Return the prompt of messages, without turns that the policy for a full cache drops.

    Args:
        reserve: Number of tokens to leave for the response; None for a quarter of the cache.
        known: See `protected_tokens`.
        completer: The completer.
        forms: See `_encoded`.
        tools: See `_encoded`.
    """
    if kinds_in(forms[0]):
        # The policy is to refuse, see `AnyCompleter.check_items`.
        ids, items = _encoded(completer, forms, tools)
        return _Fitted(ids, items=items)
    said, most = forms[0], completer.max_length or 0
    first = next((index for index, one in enumerate(said) if one["role"] not in _SYSTEM), len(said))

    def encode(messages: Sequence[Mapping[str, Any]]) -> list[int]:
        # The same messages of each form: the first ones, and those after the turns that are dropped.
        dropped = len(said) - len(messages)
        return _encoded(completer, [[*form[:first], *form[first + dropped :]] for form in forms], tools)[0]

    ids, dropped = fitting_turns(encode, completer, said[:first], said[first:], reserve or most // 4)
    protected = None
    if completer.on_full == "shift":
        protected = protected_tokens(
            lambda messages: _encoded(completer, [[dict(one) for one in messages]], tools)[0],
            said[:first],
            known,
            tools,
        )
    return _Fitted(ids, dropped, protected)


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
        return refuse(400, str(error), param=field_of(str(error)))

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
