"""A Prefect API for one run: the configured one, or that of `luffy serve`, if it answers, else an embedded server that
ends with this process; and the address, name and password of a server.

The password is read from Prefect's own variables and handed on in the environment alone: never as an argument of a
command, which every user of the machine can read, and never in a file.

Everything here happens before `prefect` is imported, since Prefect reads its environment then. Prefect's own embedded
server is not used: it survives a `kill -9` of the flow.
"""

import atexit
import http.client
import ipaddress
import logging
import os
import random
import signal
import socket
import sys
import time
import tomllib
import urllib.error
import urllib.parse
import urllib.request
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import luffy
from luffy.errors import LuffyError, UserError
from luffy.pipeline.lock import holder_of, is_shared, stage_lock
from luffy.processes import end_group, start_marked

logger = logging.getLogger(__name__)
LOOPBACK = "127.0.0.1"
AUTH_VARIABLE = "PREFECT_SERVER_API_AUTH_STRING"
"""Environment variable with the `name:password` that the server requires."""
_CLIENT = "PREFECT_API_AUTH_STRING"
_FILES_VARIABLE = "LUFFY_PREFECT_FILES"
_MIN_PASSWORD = 12
_API_VARIABLE = "PREFECT_API_URL"
NO_TELEMETRY = {"PREFECT_SERVER_ANALYTICS_ENABLED": "false", "DO_NOT_TRACK": "1"}
_DEFAULTS = {**NO_TELEMETRY, "PREFECT_CLI_PROMPT": "false", "PREFECT_LOGGING_EXTRA_LOGGERS": "luffy"}
_LOCAL_NAMES = (LOOPBACK, "localhost", "::1")
_MAX_HEALTH_BYTES = 64
SERVING_FOLDER = "serving"
"""Folder of a workspace's Prefect whose lock the process holds that serves the workspace."""
SERVER_FILE = "server.url"
"""File beside that folder with the address of its server, where that requires no password."""
_START_TIMEOUT_S = 300.0
_STOP_TIMEOUT_S = 3.0
_SERVER_PORTS = (20_000, 32_000)
"""Below Linux's `ip_local_port_range`, which begins at 32768, and above the ports that well-known services have."""
_PORT_TRIES = 100


def set_environment(home: Path, *, debug: bool) -> None:
    """Point Prefect at `home` and keep its logs off the terminal; what the user has set stays.

    UserError where the working directory has settings of Prefect's, which can run programs and send data away, unless
    the environment says that they count.
    """
    if (found := _settings_of_the_folder()) and not os.environ.get(_FILES_VARIABLE):
        raise UserError(
            f"{found.absolute()} has settings of Prefect's, with which whoever made the folder could run programs; "
            f"remove them or give them in the environment (PREFECT_API_URL=...), or let them count: {_FILES_VARIABLE}=1"
        )
    home.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("PREFECT_HOME", str(home))
    for name, value in _DEFAULTS.items():
        os.environ.setdefault(name, value)
    # The command line prints failures in one line; Prefect would print a traceback for each.
    os.environ.setdefault("PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL", "WARNING" if debug else "CRITICAL")
    share_auth_string()
    # Without an HTTP proxy to this machine, for Prefect's client, too. Where both are read, the lower-case name takes
    # precedence.
    spared = [host.strip() for host in (os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or "").split(",")]
    if "*" not in spared:
        # Without the brackets of an IPv6 address: httpx would read its end as a port.
        served = reachable_host(os.environ.get("PREFECT_SERVER_API_HOST", LOOPBACK)).strip("[]")
        known = dict.fromkeys([*filter(None, spared), *_LOCAL_NAMES, served])
        os.environ["no_proxy"] = os.environ["NO_PROXY"] = ",".join(known)


def prefect_api(home: Path) -> "ApiServer | None":
    """Make PREFECT_API_URL name an API for this run in a workspace, whose folder of Prefect is `home`.

    Returns None if the configured one answers, or that of `luffy serve` in the workspace, else an embedded server that
    is starting: call its `wait` before the first request. It stops at the exit of this process, after Prefect has sent
    its last events and logs there (exit handlers run in reverse, and Prefect's are registered later).
    """
    configured = configured_api()
    for found in (configured, served_api(home)):
        if found is not None and answers(found, timeout_s=5.0):
            os.environ[_API_VARIABLE] = found
            return None
    if configured is not None:
        sys.stderr.write(f"note: no Prefect API at {configured}; using an embedded server for this run\n")
    own_home = Path(os.environ["PREFECT_HOME"])
    own_home.mkdir(parents=True, exist_ok=True)
    if is_shared(own_home):  # others may write it, and SQLite does not work for several machines
        own_home = own_home / "embedded" / socket.gethostname()
    server = ApiServer(own_home)
    atexit.register(server.stop)
    os.environ[_API_VARIABLE] = server.url
    return server


def served_api(home: Path) -> str | None:
    """The API of the `luffy serve` that serves the workspace on this machine; None without one, or with a password."""
    try:
        holder = holder_of(home / SERVING_FOLDER)
        is_here = holder is not None and holder.endswith(f" on {socket.gethostname()}")
        found = (home / SERVER_FILE).read_text(encoding="utf-8") if is_here else ""
        # A server without a password is on the loopback address; to no other is a password of the environment sent.
        return found if urllib.parse.urlsplit(found).hostname in _LOCAL_NAMES else None
    except (OSError, ValueError):  # it ends at this moment, the file is damaged, or another user's
        return None


def configured_api() -> str | None:
    """The API address that Prefect would use: from the environment, the project's files or the active profile."""
    if os.environ.get(_API_VARIABLE):
        return os.environ[_API_VARIABLE]
    project = _toml(Path("pyproject.toml")).get("tool", {}).get("prefect", {})
    for settings in (_toml(Path("prefect.toml")), project):
        if url := settings.get("api", {}).get("url"):
            return url
    profiles = _toml(Path(os.environ["PREFECT_HOME"]) / "profiles.toml")
    active = os.environ.get("PREFECT_PROFILE") or profiles.get("active")
    return profiles.get("profiles", {}).get(active, {}).get(_API_VARIABLE)


def answers(url: str, timeout_s: float) -> bool:
    """Whether a Prefect API answers at `url`, and not another server."""
    try:
        is_local = urllib.parse.urlsplit(url).hostname in _LOCAL_NAMES
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({} if is_local else None))
        with opener.open(f"{url.rstrip('/')}/health", timeout=timeout_s) as response:
            return response.status == http.client.OK and response.read(_MAX_HEALTH_BYTES).strip() == b"true"
    except urllib.error.HTTPError as error:
        # The server is there; Prefect's client authenticates itself.
        return error.code in (http.client.UNAUTHORIZED, http.client.FORBIDDEN)
    except (OSError, ValueError, http.client.HTTPException):
        return False


class ApiServer:
    """A Prefect server on this machine, ended by the kernel when this process dies.

    Without `port` it is embedded: on a free port, without UI and background services. With one it has both.
    """

    def __init__(self, home: Path, port: int | None = None, host: str = LOOPBACK) -> None:
        home.mkdir(parents=True, exist_ok=True)
        with ExitStack() as starting:
            # The first start migrates the database: one server at a time.
            starting.enter_context(stage_lock(home, waiting=partial(logger.warning, "%s: waiting for %s", home)))
            self._starting = starting.pop_all()
        # Embedded, it has written all that it was told, and has nothing else to do.
        self._grace_s = 0.0 if port is None else _STOP_TIMEOUT_S
        mode = {"PREFECT__SERVER_EPHEMERAL": "1"} if port is None else {"PREFECT_SERVER_API_PORT": str(port)}
        port = port or free_port()
        self.url = f"http://{reachable_host(host)}:{port}/api"
        self.log_path = home / "server.log"
        root = str(Path(luffy.__file__).parents[1])
        # What Prefect itself starts as its ephemeral server (3.7), behind the check of `own_pages`.
        command = [sys.executable, "-m", "uvicorn", "--app-dir", root, "--factory", "luffy.flows.own_pages:create_app"]
        command += ["--host", host, "--port", str(port), "--log-level", "error", "--lifespan", "on"]
        environment = {**os.environ, **mode, _API_VARIABLE: self.url, "PREFECT_HOME": str(home)}
        with self.log_path.open("ab") as log:
            # In a session of its own: a Ctrl-C is for the flow, which must still report how it ended.
            self._process, _ = start_marked(command, log, environment, sent=signal.SIGKILL)

    def wait(self) -> None:
        """Return once the server answers; raises LuffyError if it does not within five minutes."""
        deadline = time.monotonic() + _START_TIMEOUT_S
        with self._starting:
            while not answers(self.url, timeout_s=1.0):
                if self._process.poll() is not None or time.monotonic() > deadline:
                    raise LuffyError(f"the Prefect server did not start; see {self.log_path}")
                time.sleep(0.05)

    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def stop(self) -> None:
        """End the server."""
        self._starting.close()
        if not self.has_ended():
            end_group(self._process, self._grace_s)


def free_port() -> int:
    """A free loopback port.

    A server binds it seconds later. So it is not among those that Linux gives to connections, which any other process
    might have taken by then.
    """
    chance = random.SystemRandom()  # the other generators are seeded by what is trained
    for _ in range(_PORT_TRIES):
        port = chance.randrange(*_SERVER_PORTS)
        with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_STREAM) as bound:
            bound.bind((LOOPBACK, port))
            return port
    raise LuffyError(f"none of {_PORT_TRIES} ports that were tried is free")


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """Where Prefect's server can be reached."""

    port: int
    host: str = LOOPBACK
    names: tuple[str, ...] = ()
    """Names under which browsers may call it, besides `localhost` and the name of this machine."""

    @property
    def url(self) -> str:
        """The API, for programs on this machine."""
        return f"http://{reachable_host(self.host)}:{self.port}/api"


def guard(host: str) -> None:
    """Give server and clients one auth string, from whichever variable is set.

    Empty variables are removed: Prefect's server would take an empty one for a password. Raises UserError where the
    variables differ or hold no `name:password`, and where neither is set although other machines can reach `host`.
    """
    share_auth_string()
    given = {name: value for name in (AUTH_VARIABLE, _CLIENT) if (value := os.environ.get(name))}
    if not given:
        if is_loopback(host):
            return
        raise UserError(
            f"--host {host}: other machines can reach this address, and whoever reaches Prefect's server can run code "
            f"on this machine; export {AUTH_VARIABLE}='NAME:PASSWORD' first, and {_CLIENT} with the same value "
            "for every client, or stay with 127.0.0.1"
        )
    if len(set(given.values())) > 1:
        raise UserError(f"{AUTH_VARIABLE} and {_CLIENT} differ; set both to one value, or only one of them")
    ((variable, value), *_) = given.items()
    if not is_loopback(host):
        name, separator, password = value.partition(":")
        if not (value.isascii() and value.isprintable() and " " not in value and name and separator):
            raise UserError(f"{variable}: has the form NAME:PASSWORD, of printable ASCII characters without blanks")
        if len(password) < _MIN_PASSWORD:
            raise UserError(
                f"{variable}: the password needs at least {_MIN_PASSWORD} characters, since nothing slows down those "
                "who guess; `openssl rand -base64 18` makes one"
            )
    os.environ[AUTH_VARIABLE] = os.environ[_CLIENT] = value


def share_auth_string() -> None:
    """Pass the auth string of the server that this process starts to its clients; empty variables are removed."""
    for name in (AUTH_VARIABLE, _CLIENT):
        if os.environ.get(name) == "":
            del os.environ[name]
    if value := os.environ.get(AUTH_VARIABLE):
        os.environ.setdefault(_CLIENT, value)


def _settings_of_the_folder() -> Path | None:
    """The first file of the working directory from which Prefect would take settings."""
    variables, own, project = Path(".env"), Path("prefect.toml"), Path("pyproject.toml")
    if own.exists():
        return own
    if "prefect" in _toml(project).get("tool", {}):
        return project
    with suppress(OSError):
        return variables if "PREFECT_" in variables.read_text(encoding="utf-8", errors="replace").upper() else None
    return None


def _toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}  # Prefect itself reports an unreadable file


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
