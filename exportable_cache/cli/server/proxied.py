"""A middleware for Ray Serve's proxy, which otherwise sends nothing if a replica dies while it responds.

It needs only Starlette. Ray's proxy calls `middlewares`, which an environment variable names, see
docs/guides/replicas.md.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from starlette.middleware import Middleware

from .responses import error_of

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]

#: Value of `Retry-After` for a lost request, in seconds.
RETRY_AFTER = 1
LOST = "the replica that was processing this request is gone, and its response is lost; send the request again"


class LostAnswers:
    """Completes responses that an application does not finish.

    If nothing was sent, the response is status 503 with `Retry-After` and an error in the API's format. A stream of
    events ends with an error event. Any other unfinished response stays cut off.

    Args:
        app: ASGI application.
    """

    def __init__(self, app: Application) -> None:
        self._app = app

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Run the application, and complete its response."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        sent = _Sent(send)
        await self._app(scope, receive, sent)
        error = json.dumps(error_of(LOST, "server_error")).encode()
        if not sent.has_begun:
            headers = [(b"content-type", b"application/json"), (b"retry-after", str(RETRY_AFTER).encode())]
            await send({"type": "http.response.start", "status": 503, "headers": headers})
            await send({"type": "http.response.body", "body": error})
        elif sent.is_stream and not sent.has_ended:
            await send({"type": "http.response.body", "body": b"data: " + error + b"\n\n"})


class _Sent:
    """Forwards messages, and records how far the response has come."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.has_begun = self.has_ended = self.is_stream = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.has_begun = True
            kinds = (value for name, value in message.get("headers", ()) if name.lower() == b"content-type")
            self.is_stream = any(value.startswith(b"text/event-stream") for value in kinds)
        elif message["type"] == "http.response.body":
            self.has_ended = not message.get("more_body", False)
        await self._send(message)


def middlewares() -> list[Middleware]:
    """Return the middlewares for `RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH`."""
    return [Middleware(LostAnswers)]
