"""A small server that speaks the part of the Hugging Face hub's API that `huggingface_hub` uses to read and commit."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
from huggingface_hub import constants

#: The token that may read gated repositories and write.
TOKEN = "hf_owner"


@dataclass
class Repository:
    """A repository: the files of each commit, and the commit of each branch."""

    gated: bool = False
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)

    def commit(self, files: dict[str, bytes], branch: str = "main") -> str:
        """Add a commit with these files, and return its id."""
        before = self.branches.get(branch, "")
        digest = hashlib.sha1(before.encode())
        for name, content in sorted(files.items()):
            digest.update(name.encode() + content)
        self.commits[digest.hexdigest()] = dict(files)
        self.branches[branch] = digest.hexdigest()
        return digest.hexdigest()

    @property
    def files(self) -> dict[str, bytes]:
        """The files of `main`."""
        return self.commits[self.branches["main"]]


class Hub:
    """The server.

    Attributes:
        url: Its address, for HF_ENDPOINT.
        repositories: By id.
        downloads: Paths of the files that were sent.
        breaks_after: Number of bytes after which the connection ends in each download; None for never.
    """

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.downloads: list[str] = []
        self.breaks_after: int | None = None
        hub = self

        class Handler(_Handler):
            served = hub

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"

    def add(self, name: str, files: dict[str, bytes] | None = None, gated: bool = False) -> Repository:
        """Add a repository with one commit."""
        made = self.repositories[name] = Repository(gated)
        made.commit({".gitattributes": b"", **(files or {})})
        return made


@contextmanager
def running_hub() -> Iterator[Hub]:
    """Run a hub in a thread within the block."""
    hub = Hub()
    thread = threading.Thread(target=hub.server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.server.shutdown()
        hub.server.server_close()
        thread.join()


def use_hub(monkeypatch: pytest.MonkeyPatch, hub: Hub, home: Path, token: str | None = None) -> None:
    """Make `huggingface_hub` in this process ask a hub, and keep its files and ours below `home`."""
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.url + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(home / "hub-cache"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(home / "no-token"))
    monkeypatch.setenv("EXPORTABLE_CACHE_HOME", str(home / "home"))
    if token is None:
        monkeypatch.delenv("HF_TOKEN", raising=False)
    else:
        monkeypatch.setenv("HF_TOKEN", token)


class _Refused(Exception):
    def __init__(self, status: int, code: str = "") -> None:
        super().__init__(code)
        self.status, self.code = status, code


class _Handler(BaseHTTPRequestHandler):
    served: Hub
    protocol_version = "HTTP/1.1"
    #: Otherwise each body waits 0.04 s until the client confirms the headers.
    disable_nagle_algorithm = True

    def log_message(self, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._answer(self._read)

    do_HEAD = do_GET

    def do_POST(self) -> None:
        self._answer(self._write)

    def _answer(self, respond: Any) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(length)
        try:
            respond(unquote(urlsplit(self.path).path).strip("/"), body)
        except _Refused as refused:
            self._send({"error": refused.code or "refused"}, refused.status, {"X-Error-Code": refused.code})

    @property
    def _is_owner(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {TOKEN}"

    def _repository(self, name: str) -> Repository:
        found = self.served.repositories.get(name)
        if found is None:
            raise _Refused(401 if not self._is_owner else 404, "RepoNotFound")
        return found

    def _files(self, name: str, revision: str, content: bool = False) -> tuple[str, dict[str, bytes]]:
        found = self._repository(name)
        commit = found.branches.get(revision, revision)
        if commit not in found.commits:
            raise _Refused(404, "RevisionNotFound")
        if found.gated and content and not self._is_owner:
            raise _Refused(401, "GatedRepo")
        return commit, found.commits[commit]

    def _read(self, path: str, body: bytes) -> None:
        parts = path.split("/")
        if parts == [""]:
            self._send({})
        elif path == "api/whoami-v2":
            if not self._is_owner:
                raise _Refused(401)
            self._send({"name": "user"})
        elif parts[:2] == ["api", "models"] and len(parts) in (4, 6) and parts[4:5] in ([], ["revision"]):
            name, revision = "/".join(parts[2:4]), parts[5] if len(parts) == 6 else "main"
            commit, files = self._files(name, revision)
            siblings = [{"rfilename": one, "size": len(content)} for one, content in files.items()]
            self._send({"id": name, "sha": commit, "siblings": siblings})
        elif parts[:2] == ["api", "models"] and parts[4:5] == ["tree"]:
            files = self._files("/".join(parts[2:4]), parts[5])[1]
            rows = [
                {"type": "file", "path": one, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
                for one, content in files.items()
            ]
            self._send(rows)
        elif parts[2:3] == ["resolve"]:
            self._resolve("/".join(parts[:2]), parts[3], "/".join(parts[4:]))
        else:
            raise _Refused(404)

    def _resolve(self, name: str, revision: str, file: str) -> None:
        commit, files = self._files(name, revision, content=True)
        if file not in files:
            raise _Refused(404, "EntryNotFound")
        content = files[file]
        headers = {"X-Repo-Commit": commit, "ETag": f'"{hashlib.sha1(content).hexdigest()}"', "Accept-Ranges": "bytes"}
        if self.command == "HEAD":
            self._send(content, headers=headers)
            return
        self.served.downloads.append(file)
        first = int((self.headers.get("Range") or "bytes=0-").removeprefix("bytes=").partition("-")[0])
        status = 206 if "Range" in self.headers else 200
        if status == 206:
            headers["Content-Range"] = f"bytes {first}-{len(content) - 1}/{len(content)}"
        self._send(content[first:], status, headers, self.served.breaks_after)

    def _write(self, path: str, body: bytes) -> None:
        parts = path.split("/")
        if path == "api/validate-yaml":
            self._send({"errors": [], "warnings": []})
            return
        if not self._is_owner:
            raise _Refused(401)
        if path == "api/repos/create":
            given = json.loads(body)
            name = f"{given['organization']}/{given['name']}" if given.get("organization") else f"user/{given['name']}"
            if name in self.served.repositories:
                self._send({"error": "exists", "url": f"{self.served.url}/{name}"}, 409)
                return
            self.served.add(name)
            self._send({"url": f"{self.served.url}/{name}"})
            return
        name = "/".join(parts[2:4])
        found = self._repository(name)
        if parts[4] == "branch":
            found.branches.setdefault(parts[5], found.branches["main"])
            self._send({})
        elif parts[4] == "preupload":
            asked = json.loads(body)["files"]
            self._send(
                {"files": [{"path": one["path"], "uploadMode": "regular", "shouldIgnore": False} for one in asked]}
            )
        elif parts[4] == "commit":
            self._commit(name, found, parts[5], [json.loads(line) for line in body.splitlines() if line])
        else:
            raise _Refused(404)

    def _commit(self, name: str, found: Repository, branch: str, lines: list[dict[str, Any]]) -> None:
        files = dict(found.commits[found.branches[branch]])
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "deletedFile":
                files.pop(value["path"])
        commit = found.commit(files, branch)
        url = f"{self.served.url}/{name}/commit/{commit}"
        self._send({"success": True, "commitOid": commit, "commitUrl": url, "hookOutput": ""})

    def _send(
        self, content: Any, status: int = 200, headers: dict[str, str] | None = None, breaks_after: int | None = None
    ) -> None:
        sent = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for key, value in (headers or {}).items():
            if value:
                self.send_header(key, value)
        self.send_header("Content-Type", "application/octet-stream" if content is sent else "application/json")
        self.send_header("Content-Length", str(len(sent)))
        self.end_headers()
        if self.command == "HEAD":
            return
        if breaks_after is not None and breaks_after < len(sent):
            self.wfile.write(sent[:breaks_after])
            self.close_connection = True
            return
        self.wfile.write(sent)
