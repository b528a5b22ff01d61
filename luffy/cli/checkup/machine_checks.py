"""Checks of the machine: disk, shared memory, open files, ports, clock, the Prefect server, and keys."""

import os
import resource
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from shutil import disk_usage

from luffy.cli.checkup.finding import Finding, broken, note, ok
from luffy.cli.console import size_words
from luffy.config import ExperimentConfig
from luffy.config.execution import ServerConfig
from luffy.errors import ConfigError, WorkspaceError
from luffy.http_client import missing_key
from luffy.pipeline.disk import free_bytes
from luffy.pipeline.inherited_environment import complaints_about_variables
from luffy.pipeline.workspace import MIN_FREE_BYTES, Workspace

_COMFORTABLE_BYTES = 10 << 30
_MIN_SHARED_BYTES = 1 << 30
"""Size of /dev/shm, where Ray keeps objects and NCCL buffers; the default of containers is 64 MiB."""
_MIN_OPEN_FILES = 4096
_MAX_SKEW_S = 5.0
_OLDEST_NOW = datetime(2026, 1, 1, tzinfo=UTC).timestamp()
"""A clock before this release was written is wrong."""
_GC = "luffy gc lists what can be deleted; or give another --workspace"


def check_workspace(workspace: Workspace, free: Callable[[Path], int] = free_bytes) -> Finding:
    """Whether the workspace is writable and its disk has free space."""
    left = free(workspace.root)
    if left < MIN_FREE_BYTES:
        return broken("disk", f"{workspace.root}: {size_words(left)} free", _GC)
    try:
        if workspace.root.exists():
            workspace.prepare()
    except WorkspaceError as error:
        return broken("disk", str(error), "give another --workspace, or correct its permissions")
    found = f"{workspace.root}: {size_words(left)} free"
    return ok("disk", found) if left >= _COMFORTABLE_BYTES else note("disk", found, f"checkpoints need room: {_GC}")


def check_shared_memory(folder: Path = Path("/dev/shm")) -> Finding:  # noqa: S108 - not for files of ours
    """Whether /dev/shm is large enough for Ray and NCCL."""
    if not folder.is_dir():
        return note("shared memory", f"there is no {folder}", "mount a tmpfs there: cluster: ray needs it")
    total = disk_usage(folder).total
    if total >= _MIN_SHARED_BYTES:
        return ok("shared memory", f"{folder}: {size_words(total)}")
    remedy = "in a container: --shm-size=16g or --ipc=host; cluster: ray and several GPUs need it"
    return note("shared memory", f"{folder}: {size_words(total)}", remedy)


def check_open_files(limit: int | None = None) -> Finding:
    """Whether this process may open as many files as many sessions and engines need."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0] if limit is None else limit
    if soft == resource.RLIM_INFINITY or soft >= _MIN_OPEN_FILES:
        return ok("open files", "no limit" if soft == resource.RLIM_INFINITY else f"up to {soft}")
    return note("open files", f"limit is {soft}; many sandbox sessions or a Ray cluster need more", "ulimit -n 65536")


def check_ports(port: int, is_prefect: Callable[[str], bool]) -> Finding:
    """Whether `luffy serve` could take `port` and the next one on the loopback address."""
    taken = [number for number in (port, port + 1) if not _can_bind(number)]
    if not taken:
        return ok("ports", f"{port} and {port + 1} are free")
    if port in taken and is_prefect(f"http://127.0.0.1:{port}/api"):
        return ok("ports", f"a Prefect server answers at {port}")
    words = " and ".join(map(str, taken))
    return note("ports", f"{words}: taken by another program", "luffy serve --port NUMBER, with another number")


def check_clock(workspace: Workspace, now: Callable[[], float] = time.time) -> Finding:
    """Whether this machine's clock is plausible, and agrees with that of the workspace's file system."""
    remedy = "let the machines synchronise their clocks: timedatectl set-ntp true"
    moment = now()
    if moment < _OLDEST_NOW:
        return broken("clock", f"it is {datetime.fromtimestamp(moment, UTC):%Y-%m-%d} by this machine's clock", remedy)
    folder = workspace.root if workspace.root.is_dir() else None
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".probe-") as probe:
            skew = Path(probe.name).stat().st_mtime - now()
    except OSError as error:
        return note("clock", f"not compared with the disk's: {error.strerror}", "make the workspace writable")
    if abs(skew) > _MAX_SKEW_S:
        return note("clock", f"the file system's clock is {skew:+.0f} s from this machine's", remedy)
    return ok("clock", f"{datetime.fromtimestamp(moment, UTC):%Y-%m-%d %H:%M} UTC, as the file system's")


def check_prefect(url: str | None, answers: Callable[[str], bool]) -> Finding:
    """Whether the configured Prefect server answers."""
    if url is None:
        return ok("prefect", "no server is configured; every run starts an embedded one")
    if answers(url):
        return ok("prefect", f"a server answers at {url}")
    return note(
        "prefect", f"nothing answers at {url}; runs use an embedded server", "luffy serve, or unset the address"
    )


def check_variables() -> Iterator[Finding]:
    """Whether a stage, and Ray on this machine, can work with the environment variables that they would inherit."""
    of_all = complaints_about_variables(os.environ, starts_ray=False)
    for line in complaints_about_variables(os.environ, starts_ray=True):
        found, _, remedy = line.partition("; ")
        yield broken("environment", found, remedy) if line in of_all else note("environment", found, remedy)


def check_keys(config: ExperimentConfig) -> Iterator[Finding]:
    """Whether the environment variables that should hold API keys are set; their values are shown nowhere."""
    execution = config.execution
    servers = [("execution.server", execution.server)] if execution.server.urls else []
    servers += [(f"execution.teachers.{name}", server) for name, server in execution.teachers.items()]
    servers += [("execution.rl_teacher", execution.rl_teacher)] if execution.rl_teacher.urls else []
    for setting, server in servers:
        yield _check_key(setting, server)


def _check_key(setting: str, server: ServerConfig) -> Finding:
    try:
        complaint = missing_key(server, setting)
    except ConfigError as error:
        return broken("keys", str(error), f"export {server.api_key_variable} again")
    if complaint is not None:
        return broken("keys", complaint, f"export {server.api_key_variable}=...")
    return ok("keys", f"{setting}: {server.api_key_variable} is set or not needed")


def _can_bind(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
