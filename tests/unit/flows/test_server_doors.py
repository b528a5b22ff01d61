"""The doors of a server: a password where others reach it, and neither foreign pages nor foreign names."""

import asyncio
import os

import httpx
import pytest
from support.refusals import refused

from luffy.cli.main import main
from luffy.errors import UserError
from luffy.flows.launch import call_flow
from luffy.flows.own_pages import OwnPages
from luffy.flows.prefect_api import ServerAddress, guard, is_loopback, share_auth_string

SERVER, CLIENT = "PREFECT_SERVER_API_AUTH_STRING", "PREFECT_API_AUTH_STRING"
GOOD = "lab:correct-horse-battery"


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    """Neither variable, and what a test sets is gone after it."""
    for name in (SERVER, CLIENT):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    return monkeypatch


@pytest.mark.parametrize("host", ["0.0.0.0", "0", "::", "192.0.2.7", ""])
def test_an_address_that_others_reach_is_refused_without_a_password(host, capsys):
    assert main(["serve", "--host", host]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and said.startswith(f"error: --host {host}:"), said
    assert "export PREFECT_SERVER_API_AUTH_STRING='NAME:PASSWORD'" in said or not host


def test_the_loopback_address_needs_none_and_programs_on_this_machine_reach_a_server_of_any_address():
    for host in ("127.0.0.1", "127.9.9.9", "localhost", "::1"):
        guard(host)
        assert SERVER not in os.environ and is_loopback(host), host
    for host, reached in (("0.0.0.0", "127.0.0.1"), ("::", "[::1]"), ("192.0.2.7", "192.0.2.7")):
        assert ServerAddress(1, host).url == f"http://{reached}:1/api"


@pytest.mark.parametrize("tell", [lambda: guard("0.0.0.0"), share_auth_string], ids=["guard", "share"])
def test_an_empty_variable_is_none_and_either_is_that_of_server_and_clients(environment, tell):
    for name in (SERVER, CLIENT):
        environment.setenv(name, "")
    with refused("export"):
        guard("0.0.0.0")
    assert SERVER not in os.environ and CLIENT not in os.environ
    for variable in (SERVER, CLIENT):
        environment.setenv(variable, GOOD)
        environment.setenv(CLIENT if variable == SERVER else SERVER, "")
        tell()
        expected = (GOOD, GOOD) if variable == SERVER or tell is not share_auth_string else (None, GOOD)
        assert (os.environ.get(SERVER), os.environ.get(CLIENT)) == expected
    environment.setenv(SERVER, GOOD + "x")
    with refused("differ"):
        guard("127.0.0.1")


@pytest.mark.parametrize(
    "value", ["nocolon", ":password-alone", "lab:", "lab:short", "lab:with blank in it", "läb:1234567890ab"]
)
def test_a_weak_or_malformed_one_is_refused_without_being_shown(environment, value):
    environment.setenv(SERVER, value)
    with pytest.raises(UserError) as caught:
        guard("0.0.0.0")
    assert value not in str(caught.value) and "\n" not in str(caught.value)


def test_a_server_that_asks_for_a_password_is_one_line():
    def flow():
        request = httpx.Request("POST", "http://gpu1:4200/api/flows/")
        raise httpx.HTTPStatusError("401\nFor more", request=request, response=httpx.Response(401, request=request))

    with refused("gpu1", "PREFECT_API_AUTH_STRING"):
        call_flow(flow, {}, None)


OWN = ["127.0.0.1:4200", "localhost:9999", "LOCALHOST", "localhost.", "[::1]:4200", "192.168.1.7:4200", "gpu1:4200"]
FOREIGN = ["evil.example:4200", "localhost.evil.example", "127.0.0.1.evil.example:4200", "", "gpu1@evil.example", "a b"]


async def answer(kind, *headers):
    """What a client gets from a server that is named gpu1: the messages, and whether the application was reached."""
    sent, reached = [], []

    async def application(scope, receive, send):
        reached.append(scope)
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def receive():
        return {"type": f"{kind}.connect"}

    async def send(message):
        sent.append(message)

    encoded = [(name.encode(), value.encode()) for name, value in headers]
    await OwnPages(application, ["gpu1"])({"type": kind, "headers": encoded}, receive, send)
    return sent, bool(reached)


@pytest.mark.parametrize("kind", ["http", "websocket"])
@pytest.mark.parametrize("host", OWN)
def test_own_names_are_answered_without_origin_and_for_their_own_pages(kind, host):
    for origin in ((), (("origin", f"http://{host}"),), (("origin", f"https://{host}"),)):  # the last by a proxy
        assert asyncio.run(answer(kind, ("host", host), *origin))[1]


@pytest.mark.parametrize("kind", ["http", "websocket"])
@pytest.mark.parametrize("host", FOREIGN)
def test_a_name_that_dns_may_have_turned_here_is_refused(kind, host):
    assert not asyncio.run(answer(kind, ("host", host), ("origin", f"http://{host}")))[1]


PAGES = [
    "null",
    "",
    "http://evil.example",
    "http://127.0.0.1",
    "http://127.0.0.1:4201",
    "http://localhost:4200",
    "file://",
]


@pytest.mark.parametrize("kind", ["http", "websocket"])
@pytest.mark.parametrize("origin", PAGES)
def test_a_page_of_another_server_is_refused_on_this_machine_too(kind, origin):
    sent, reached = asyncio.run(answer(kind, ("host", "127.0.0.1:4200"), ("origin", origin)))
    assert not reached
    assert sent[0].get("status") == 403 if kind == "http" else sent[0]["type"] == "websocket.close"


def test_a_request_without_a_name_or_with_two_is_refused_and_what_is_no_request_passes():
    two = (("host", "gpu1"), ("origin", "http://gpu1"), ("origin", "http://evil.example"))
    for headers in ((), (("host", "localhost"), ("host", "127.0.0.1")), two):
        assert not asyncio.run(answer("http", *headers))[1], headers
    assert asyncio.run(answer("lifespan"))[1]


def test_its_pages_are_framed_by_no_other_and_load_no_foreign_image():
    (start,), _ = asyncio.run(answer("http", ("host", "localhost")))
    (rules,) = [value.decode() for name, value in start["headers"] if name == b"content-security-policy"]
    assert "frame-ancestors 'self'" in rules and "img-src 'self' data: blob:" in rules
