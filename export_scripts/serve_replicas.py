"""Serve a bundle from several replicas under Ray Serve, which starts them and replaces those that die.

pip install 'ray[serve]'
python export_scripts/serve_replicas.py artifacts/demo --replicas 2 --port 8000

Each replica is a process with its own session and the application of `exportable-cache serve`; the header `X-Replica`
of a response names it. See docs/guides/replicas.md.
"""

from __future__ import annotations

import argparse
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from exportable_cache.errors import InputError, MissingDependencyError

REPLICA_HEADER = "X-Replica"

#: Module that Ray's proxy loads for the error of a lost replica; Ray's processes read it. A running cluster must have
#: been started with it.
_SAID = ("RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH", "exportable_cache.cli.server.proxied.middlewares")


@dataclass(frozen=True)
class ReplicaOptions:
    """Bundle and replicas to serve.

    Attributes:
        folder: Folder of the bundle; every machine of the cluster reaches it under this path.
        replicas: Number of processes, each with its own session.
        processors: Processors that Ray reserves for a replica, and threads of torch; ExecuTorch uses a thread per
            processor of the machine.
        host, port: Address of Ray's proxy.
        trust: Allow machine code in the bundle, see `load`.

    Raises:
        InputError: If a number is not positive, or the folder does not exist.
    """

    folder: Path
    replicas: int = 2
    processors: int = 1
    host: str = "127.0.0.1"
    port: int = 8000
    trust: bool = False

    def __post_init__(self) -> None:
        for name in ("replicas", "processors", "port"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if not self.folder.is_dir():
            raise InputError(f"there is no folder {self.folder}; pass a bundle that export wrote")


def start(options: ReplicaOptions) -> None:
    """Start Ray, unless this process has joined a cluster, and the replicas; return when all respond.

    Raises:
        MissingDependencyError: If Ray Serve is not installed.
    """
    if find_spec("ray") is None or find_spec("ray.serve") is None:
        raise MissingDependencyError("replicas need Ray Serve; install it: pip install 'ray[serve]'")
    os.environ.setdefault(*_SAID)
    # Otherwise Ray sends usage statistics.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray
    from ray import serve

    if not ray.is_initialized():
        ray.init(include_dashboard=False, log_to_driver=False)
    serve.start(http_options={"host": options.host, "port": options.port})
    deployment = serve.deployment(
        serve.ingress(_builder(options))(),
        name=options.folder.name,
        num_replicas=options.replicas,
        # A replica runs one request at a time. The others wait in Ray's proxy, so that they survive a replica.
        max_ongoing_requests=1,
        ray_actor_options={"num_cpus": options.processors},
    )
    serve.run(deployment.bind(), name=options.folder.name, route_prefix="/")


def _builder(options: ReplicaOptions) -> Callable[[], Any]:
    folder, trust, host = str(options.folder.resolve()), options.trust, options.host

    def build() -> Any:
        """Make the application in each replica."""
        from exportable_cache import load
        from exportable_cache.cli.server.app import ServerOptions, make_app
        from exportable_cache.decoding import Completer

        app = make_app(Completer(load(folder, trust=trust)), ServerOptions(os.path.basename(folder), host=host))
        replica = f"{os.uname().nodename}:{os.getpid()}".encode()

        async def named(scope: Any, receive: Any, send: Any) -> None:
            async def with_header(message: Any) -> None:
                if message["type"] == "http.response.start":
                    message["headers"] = [*message.get("headers", ()), (REPLICA_HEADER.lower().encode(), replica)]
                await send(message)

            await app(scope, receive, with_header)

        return named

    return build


def main() -> None:
    """Parse the command line, and serve until interrupted."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="a bundle")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--processors", type=int, default=1, help="of each replica")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--trust", action="store_true", help="machine code in the bundle may run")
    options = ReplicaOptions(**vars(parser.parse_args()))
    start(options)
    print(f"{options.replicas} replicas at http://{options.host}:{options.port}; Ctrl+C ends them", flush=True)
    signal.sigwait({signal.SIGINT, signal.SIGTERM})
    from ray import serve

    serve.shutdown()


if __name__ == "__main__":
    main()
