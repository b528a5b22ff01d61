"""The check that a request from a browser comes from the server's own pages.

A browser sends requests for every page that its user visits, to servers on this machine too, and Prefect's server
checks neither which page has opened a WebSocket nor by which name it was called. Two headers tell this, and no page can
change them:

- `Host`: a foreign page that had its own name point to this machine (DNS rebinding) calls the server by that name.
- `Origin`: a foreign page that calls the server by its right name is named there.

Servers are started with this check as `uvicorn --factory luffy.flows.own_pages:create_app`.
"""

import ipaddress
import json
import os
import re
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any, TypeAlias
from urllib.parse import urlsplit

from luffy.library_loading import without_collections

NAMES_VARIABLE = "LUFFY_SERVER_NAMES"
"""Environment variable with the names under which the server may be called, separated by commas."""
Message: TypeAlias = MutableMapping[str, Any]
"""A message of ASGI, or the scope of a connection."""
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
Application: TypeAlias = Callable[[Message, Receive, Send], Awaitable[None]]

_HOST = re.compile(r"(?P<name>\[[0-9a-fA-F:.]+\]|[A-Za-z0-9_.-]+)(:[0-9]{1,5})?")
_FORBIDDEN = 403
_POLICY_VIOLATION = 1008
_PAGE_RULES = b"frame-ancestors 'self'; object-src 'none'; img-src 'self' data: blob:"
"""Pages are shown in no foreign frame, where clicks could be stolen, and load no image from elsewhere: the address of
an image in a model's text would report who reads it."""


class OwnPages:
    """ASGI middleware that refuses requests and WebSockets of foreign pages (403) before `application` sees them.

    The server may be called by `names`, in any case of letters, by `localhost`, and by every IP address: DNS cannot
    make one point elsewhere.
    """

    def __init__(self, application: Application, names: Iterable[str]) -> None:
        self._application = application
        self._names = {"localhost", *(name.lower().rstrip(".") for name in names if name)}

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        async def send_with_rules(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), (b"content-security-policy", _PAGE_RULES)]
            await send(message)

        kind = scope["type"]
        refusal = self._refusal(scope["headers"]) if kind in ("http", "websocket") else None
        if refusal is None:
            await self._application(scope, receive, send_with_rules if kind == "http" else send)
        elif kind == "http":
            body = json.dumps({"exception_message": refusal}).encode()
            headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
            await send({"type": "http.response.start", "status": _FORBIDDEN, "headers": headers})
            await send({"type": "http.response.body", "body": body})
        else:
            await receive()  # the request to connect, which has to be taken first
            await send({"type": "websocket.close", "code": _POLICY_VIOLATION, "reason": refusal})

    def _refusal(self, headers: Iterable[tuple[bytes, bytes]]) -> str | None:
        """Why a request with these headers is refused, in one line; None: it is taken."""
        hosts, origins = (
            [value.decode("latin-1").lower() for key, value in headers if key.lower() == name]
            for name in (b"host", b"origin")
        )
        if len(hosts) != 1 or not self._knows(hosts[0]):
            return "this server is not known by the name in Host; start it with --name NAME to allow another one"
        if any(_place(origin) != hosts[0] for origin in origins):
            return "the request comes from a page of another server (Origin); a proxy has to pass the name on as Host"
        return None

    def _knows(self, host: str) -> bool:
        """Whether the header `Host`, in small letters, names this server."""
        found = _HOST.fullmatch(host)
        if found is None:
            return False
        name = found["name"].rstrip(".")
        try:
            return name in self._names or bool(ipaddress.ip_address(name.strip("[]")))
        except ValueError:
            return False


def _place(origin: str) -> str:
    """Host and port of an origin; empty where it has none."""
    try:
        return urlsplit(origin).netloc
    except ValueError:
        return ""


def create_app() -> Application:
    """Prefect's server behind the check; its settings come from the environment."""
    with without_collections():
        from prefect.server.api.server import create_app as create_prefect_app

        return OwnPages(create_prefect_app(), os.environ.get(NAMES_VARIABLE, "").split(","))
