"""An application at an address."""

from __future__ import annotations

import socket
from collections.abc import Callable

import uvicorn
from fastapi import FastAPI

from ...errors import InputError

#: Connections beyond this are refused: each may hold a body of some megabytes.
_MOST_CONNECTIONS = 512
#: Seconds for which answers that are being given may go on when the server is ended.
_GRACE = 5


def run(app: FastAPI, host: str, port: int, started: Callable[[str], None]) -> None:
    """Serve until interrupted, which ends it well.

    Args:
        app: What answers.
        host, port: Where to listen; port 0 for a free one.
        started: Called with the address, before requests are taken.

    Raises:
        InputError: If nothing can listen there.
    """
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
        # A second interrupt cancels the messages by which a server tells that it ends, with a traceback.
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
            f"cannot listen at {host}, port {port}: {error.strerror or error}; choose another with --host and --port"
        ) from error
    return found
