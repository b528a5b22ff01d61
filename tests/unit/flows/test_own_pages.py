"""Requests of foreign pages, and under foreign names, never reach Prefect's application."""

import asyncio

import pytest

from luffy.flows.own_pages import OwnPages

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
    assert asyncio.run(answer(kind, ("host", host)))[1]
    assert asyncio.run(answer(kind, ("host", host), ("origin", f"http://{host}")))[1]
    assert asyncio.run(answer(kind, ("host", host), ("origin", f"https://{host}")))[1]  # before it stands a proxy


@pytest.mark.parametrize("kind", ["http", "websocket"])
@pytest.mark.parametrize("host", FOREIGN)
def test_a_name_that_dns_may_have_turned_here_is_refused(kind, host):
    assert not asyncio.run(answer(kind, ("host", host), ("origin", f"http://{host}")))[1]


@pytest.mark.parametrize("kind", ["http", "websocket"])
@pytest.mark.parametrize(
    "origin",
    [
        "null",
        "",
        "http://evil.example",
        "http://127.0.0.1",
        "http://127.0.0.1:4201",
        "http://localhost:4200",
        "file://",
    ],
)
def test_a_page_of_another_server_is_refused_on_this_machine_too(kind, origin):
    sent, reached = asyncio.run(answer(kind, ("host", "127.0.0.1:4200"), ("origin", origin)))
    assert not reached
    assert sent[0].get("status") == 403 if kind == "http" else sent[0]["type"] == "websocket.close"


def test_a_request_without_a_name_or_with_two_is_refused():
    assert not asyncio.run(answer("http"))[1]
    assert not asyncio.run(answer("http", ("host", "localhost"), ("host", "127.0.0.1")))[1]
    assert not asyncio.run(
        answer("http", ("host", "gpu1"), ("origin", "http://gpu1"), ("origin", "http://evil.example"))
    )[1]


def test_its_pages_are_framed_by_no_other_and_load_no_foreign_image():
    (start,), _ = asyncio.run(answer("http", ("host", "localhost")))
    (rules,) = [value.decode() for name, value in start["headers"] if name == b"content-security-policy"]
    assert "frame-ancestors 'self'" in rules and "img-src 'self' data: blob:" in rules


def test_what_is_no_request_passes():
    async def start():
        seen = []

        async def application(scope, receive, send):
            seen.append(scope["type"])

        await OwnPages(application, [])({"type": "lifespan"}, None, None)
        return seen

    assert asyncio.run(start()) == ["lifespan"]
