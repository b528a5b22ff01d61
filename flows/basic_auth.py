"""The address of Prefect's server, and the name and password that it requires if other machines can reach it.

The password is read from Prefect's own variables and handed on in the environment alone: never as an argument of a
command, which every user of the machine can read, and never in a file.
"""

import ipaddress
import os
import socket
from dataclasses import dataclass

from luffy.errors import UserError

LOOPBACK = "127.0.0.1"
_SERVER = "PREFECT_SERVER_API_AUTH_STRING"
_CLIENT = "PREFECT_API_AUTH_STRING"
_MIN_PASSWORD = 12


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """Where Prefect's server can be reached."""

    port: int
    host: str = LOOPBACK
    """Address that it listens at."""
    names: tuple[str, ...] = ()
    """Names under which browsers may call it, besides `localhost` and the name of this machine."""

    @property
    def url(self) -> str:
        """The API, for programs on this machine."""
        return f"http://{reachable_host(self.host)}:{self.port}/api"

    @property
    def own_names(self) -> tuple[str, ...]:
        """Every name under which it may be called, besides `localhost`."""
        return (*self.names, socket.gethostname(), socket.getfqdn(), self.host)

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine reaches it."""
        return is_loopback(self.host)


def guard(host: str) -> None:
    """Give server and clients one auth string, from whichever variable is set.

    Empty variables are removed: Prefect's server would take an empty one for a password. Raises UserError where the
    variables differ or hold no `name:password`, and where neither is set although other machines can reach `host`.
    """
    _remove_empty()
    given = {name: value for name in (_SERVER, _CLIENT) if (value := os.environ.get(name))}
    if not given:
        if is_loopback(host):
            return
        raise UserError(
            f"--host {host}: other machines can reach this address, and whoever reaches Prefect's server can run code "
            f"on this machine; export {_SERVER}='NAME:PASSWORD' first, and {_CLIENT} with the same value "
            "for every client, or stay with 127.0.0.1"
        )
    if len(set(given.values())) > 1:
        raise UserError(f"{_SERVER} and {_CLIENT} differ; set both to one value, or only one of them")
    ((variable, value), *_) = given.items()
    if not is_loopback(host):
        _check(variable, value)
    os.environ[_SERVER] = os.environ[_CLIENT] = value


def share_auth_string() -> None:
    """Pass the auth string of the server that this process starts to its clients; empty variables are removed."""
    _remove_empty()
    if value := os.environ.get(_SERVER):
        os.environ.setdefault(_CLIENT, value)


def _remove_empty() -> None:
    for name in (_SERVER, _CLIENT):
        if os.environ.get(name) == "":
            del os.environ[name]


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches the address; UserError for a name that has no address."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        raise UserError(
            f"--host {host}: is no address of this machine; give one, 127.0.0.1 (this machine alone) or 0.0.0.0 (all)"
        ) from None
    return all(ipaddress.ip_address(str(address[0]).partition("%")[0]).is_loopback for *_, address in found)


def reachable_host(host: str) -> str:
    """The host of a URL by which this machine reaches a server that listens at `host`."""
    local = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)  # noqa: S104 - compared, not bound
    return f"[{local}]" if ":" in local else local


def _check(variable: str, value: str) -> None:
    name, separator, password = value.partition(":")
    if not (value.isascii() and value.isprintable() and " " not in value and name and separator):
        raise UserError(f"{variable}: has the form NAME:PASSWORD, of printable ASCII characters without blanks")
    if len(password) < _MIN_PASSWORD:
        raise UserError(
            f"{variable}: the password needs at least {_MIN_PASSWORD} characters, since nothing slows down those who "
            "guess; `openssl rand -base64 18` makes one"
        )
