"""Pages of other sites in a browser: which `Host` and `Origin` a server takes, and CORS for those that may ask."""

from __future__ import annotations

import http.client
import socket
from pathlib import Path

import pytest

from exportable_cache import load
from exportable_cache.errors import InputError

pytest.importorskip("fastapi", reason="the serve extra is not installed")

from exportable_cache.cli.server.origins import AllowedOrigins, host_name, is_loopback

from .serving import CHAT, JSON, post, served

pytestmark = pytest.mark.usefixtures("fake_backend")

EVIL = "http://evil.example"


@pytest.mark.parametrize(
    ("headers", "status", "says"),
    [
        ({}, 200, ""),
        ({"Host": "localhost:8000"}, 200, ""),
        ({"Host": "[::1]:1"}, 200, ""),
        ({"Host": "evil.example"}, 421, "Host must be a loopback name or one of 127.0.0.1, got 'evil.example'; start"),
        ({"Host": "localhost.evil.example"}, 421, "--allow-host"),
        ({"Host": "127.0.0.1.evil.example"}, 421, "--allow-host"),
        ({"Host": "evil.example", "Origin": EVIL}, 421, "--allow-host"),
        ({"Origin": EVIL}, 403, "Origin must be this server's own, got 'http://evil.example'; start the server with"),
        ({"Origin": "null"}, 403, "--allow-origin"),
        ({"Host": "localhost:1", "Origin": "http://localhost:1"}, 200, ""),
        # A page of another port on this computer is another site's.
        ({"Host": "localhost:1", "Origin": "http://localhost:2"}, 403, "--allow-origin"),
    ],
)
def test_foreign_pages_are_refused(server_address: str, headers: dict[str, str], status: int, says: str) -> None:
    found, document = post(server_address, "/v1/chat/completions", {**CHAT, "max_tokens": 1}, {**JSON, **headers})
    assert found == status and says in str(document), (found, document)


@pytest.mark.parametrize("path", ["/", "/health", "/v1/models", "/v1/cache"])
def test_every_route_asks_for_its_name(server_address: str, path: str) -> None:
    connection = http.client.HTTPConnection(server_address.removeprefix("http://"), timeout=20)
    connection.request("GET", path, headers={"Host": "evil.example"})
    assert connection.getresponse().status == 421
    connection.close()


def test_an_old_client_without_a_host_is_answered(server_address: str) -> None:
    host, port = server_address.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=20) as connection:
        connection.sendall(b"GET /health HTTP/1.0\r\n\r\n")
        assert b" 200 " in connection.recv(100)


def test_a_page_that_may_ask_gets_cors(server_bundle: Path) -> None:
    page = "https://chat.example"
    with served(load(server_bundle), allow_origins=("https://Chat.example/",), allow_hosts=("box.lan",)) as address:
        asked = {**CHAT, "max_tokens": 1}
        connection = http.client.HTTPConnection(address.removeprefix("http://"), timeout=20)
        preflight = {
            "Origin": page,
            "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Headers": "authorization,content-type,x-stainless-os",
        }
        connection.request("OPTIONS", "/v1/chat/completions", headers=preflight)
        reply = connection.getresponse()
        assert (reply.status, reply.read()) == (200, b"OK")
        assert reply.headers["Access-Control-Allow-Origin"] == page
        assert "x-stainless-os" in reply.headers["Access-Control-Allow-Headers"]
        connection.request("OPTIONS", "/v1/chat/completions", headers={**preflight, "Origin": EVIL})
        reply = connection.getresponse()
        assert reply.status == 403 and reply.headers["Access-Control-Allow-Origin"] is None and reply.read()
        # A refusal reaches the page, too.
        connection.request("POST", "/v1/chat/completions", b"{", {**JSON, "Origin": page})
        reply = connection.getresponse()
        assert reply.status == 400 and reply.headers["Access-Control-Allow-Origin"] == page
        connection.close()
        assert post(address, "/v1/chat/completions", asked, {**JSON, "Host": "box.lan:80", "Origin": page})[0] == 200
        assert post(address, "/v1/chat/completions", asked, {**JSON, "Host": "other.lan"})[0] == 421


def test_what_decides_the_names() -> None:
    assert AllowedOrigins.of("127.0.0.1", has_key=False).hosts == {"127.0.0.1"}
    assert AllowedOrigins.of("localhost", has_key=False).hosts == {"localhost"}
    # A foreign page does not know the key; at another address the name is the network's.
    assert AllowedOrigins.of("127.0.0.1", has_key=True).hosts is None
    assert AllowedOrigins.of("0.0.0.0", has_key=False).hosts is None
    assert AllowedOrigins.of("127.0.0.1", has_key=False, hosts=["*"]).hosts is None
    named = AllowedOrigins.of("0.0.0.0", has_key=True, hosts=["Box.lan"])
    assert named.takes_host("box.lan:8000") and not named.takes_host("evil.example")
    assert AllowedOrigins.of("::1", has_key=False, origins=["*"]).takes_origin(EVIL, None)


def test_names_and_what_is_none() -> None:
    names = ("A.example:80", "a.example.", "[::1]:8000", "::1", "[::1", "[::1]x", "a:b", ":80", "", "a:80:90x")
    assert [host_name(name) for name in names] == [
        "a.example", "a.example", "::1", "::1", None, None, None, None, None, "a:80:90x",
    ]  # fmt: skip
    assert all(map(is_loopback, ("127.8.9.1", "[::1]:1", "LOCALHOST.", "a.localhost")))
    assert not any(map(is_loopback, ("0.0.0.0", "128.0.0.1", "localhost.example", "2130706433", "")))


@pytest.mark.parametrize("wrong", ["", "http://x", "x/y", "user@x", "x:y"])
def test_a_wrong_name_is_refused(wrong: str) -> None:
    with pytest.raises(InputError, match="--allow-host must be a name"):
        AllowedOrigins.of("127.0.0.1", has_key=False, hosts=[wrong])


@pytest.mark.parametrize("wrong", ["", "x", "https://", "https://x/y"])
def test_a_wrong_origin_is_refused(run, server_bundle: Path, wrong: str) -> None:
    result = run("serve", server_bundle, "--allow-origin", wrong)
    assert result.exit_code == 2 and "--allow-origin must be an origin" in result.stderr
