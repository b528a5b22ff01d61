"""The interpreter inside a sandbox: runs the code that comes over its control socket, in one namespace.

Started by `luffy.sandbox` alone: `python interpreter.py CONTROL_FD SETTINGS`. Only the standard library is there, and
nothing of luffy but this file, which both sides read: the lines that they exchange are written here.

The code that it runs shares its process and can break it in any way. Nothing here is a defence: limits are enforced by
the kernel and by the other side, which reads a reply as one of a few expected lines or as a breach.
"""

import ast
import builtins
import contextlib
import io
import json
import linecache
import os
import resource
import signal
import sys
import traceback
import types
from collections.abc import Iterator
from typing import TypedDict

READY = b"ready\n"
REPLIES = ("ok", "raised", "out_of_memory")
_RESERVE_BYTES = 32 << 20
"""Address space beyond the limit of the code, so that this module can still report what happened."""


class Settings(TypedDict):
    """What the interpreter is started with, as JSON."""

    memory_bytes: int
    cpu_s: int
    file_bytes: int
    max_open_files: int
    max_threads: int
    package_folder: str | None
    """Folder to import packages from besides the standard library."""


def request_line(call: str, code: str) -> bytes:
    """A request to run `code`. JSON in ASCII escapes whatever the code contains, lone surrogates included."""
    return json.dumps([call, code]).encode() + b"\n"


def reply_line(call: str, status: str) -> bytes:
    return f"{call} {status}\n".encode()


class Interpreter:
    """One namespace, the streams of its code, and the handling of interrupts."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._module = types.ModuleType("__main__")
        self._is_running = False
        self._num_calls = 0
        self._streams = {name: _stream(fd) for name, fd in (("stdout", 1), ("stderr", 2))}
        # The namespace is that of the main module, as `pickle`, `dataclasses` and `inspect` expect.
        sys.modules["__main__"] = self._module
        sys.argv = [""]
        builtins.exit = builtins.quit = sys.exit  # type: ignore[assignment]  # as the module `site` does
        if self._settings["package_folder"]:
            sys.path.append(self._settings["package_folder"])

    def run(self, code: str) -> str:
        """Run `code`, print what it raises, and return one of `REPLIES`."""
        self._num_calls += 1
        # An earlier call may have closed the streams or changed the handling of interrupts.
        for name, fd in (("stdout", 1), ("stderr", 2)):
            if self._streams[name].closed:
                self._streams[name] = _stream(fd)
            setattr(sys, name, self._streams[name])
        sys.displayhook = sys.__displayhook__
        signal.signal(signal.SIGINT, self._interrupt)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
        _limit_memory(self._settings["memory_bytes"])
        try:
            try:
                self._is_running = True
                self._execute(code, f"<call {self._num_calls}>")
                status = "ok"
            finally:
                self._is_running = False
        except BaseException as error:  # noqa: BLE001 - the code may raise anything
            self._is_running = False  # an interrupt may have come before the line that says so
            _limit_memory(self._settings["memory_bytes"] + _RESERVE_BYTES)
            self._flush()
            status = _report(error, self._streams["stderr"])
        _limit_memory(self._settings["memory_bytes"] + _RESERVE_BYTES)
        self._flush()
        return status

    def _execute(self, code: str, name: str) -> None:
        linecache.cache[name] = (len(code), None, code.splitlines(keepends=True), name)
        # As `ast.parse` does, whose frame a syntax error would show.
        tree: ast.Module = compile(code, name, "exec", int(ast.PyCF_ONLY_AST))
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, name, "exec"), self._module.__dict__)  # noqa: S102 - what the sandbox is for
        if last is not None:
            shown = compile(ast.Interactive([last]), name, "single")
            exec(shown, self._module.__dict__)  # noqa: S102 - prints the value's repr by sys.displayhook

    def _interrupt(self, number: int, frame: types.FrameType | None) -> None:
        if self._is_running:  # one that comes too late must not break the conversation
            raise KeyboardInterrupt

    def _flush(self) -> None:
        for stream in self._streams.values():
            with contextlib.suppress(OSError, ValueError):  # the code may have closed it
                stream.flush()


def _stream(fd: int) -> io.TextIOWrapper:
    """A text stream of `fd` whose lines of both streams arrive in their order."""
    raw = io.FileIO(fd, "w", closefd=False)
    return io.TextIOWrapper(io.BufferedWriter(raw), encoding="utf-8", errors="backslashreplace", line_buffering=True)


def _report(error: BaseException, stream: io.TextIOBase) -> str:
    """Print an exception as Python does, without the frames of this module; the status of the call."""
    if isinstance(error, SystemExit) and error.code in (None, 0):
        return "ok"
    try:
        shown = traceback.TracebackException.from_exception(error)
        shown.stack = traceback.StackSummary.from_list([frame for frame in shown.stack if frame.filename != __file__])
        shown.print(file=stream)
    except BaseException:  # noqa: BLE001 - the exception's own text may fail in any way
        with contextlib.suppress(OSError):
            os.write(2, type(error).__name__.encode() + b"\n")
    return "out_of_memory" if isinstance(error, MemoryError) else "raised"


def _limit_memory(size_bytes: int) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    with contextlib.suppress(OSError, ValueError):  # the code may have lowered the hard limit
        resource.setrlimit(resource.RLIMIT_AS, (min(size_bytes, hard), hard))


def _apply(settings: Settings) -> None:
    hard_limits = {
        resource.RLIMIT_AS: settings["memory_bytes"] + _RESERVE_BYTES,
        resource.RLIMIT_CPU: settings["cpu_s"],
        resource.RLIMIT_FSIZE: settings["file_bytes"],
        resource.RLIMIT_NOFILE: settings["max_open_files"],
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_MSGQUEUE: 0,
        resource.RLIMIT_SIGPENDING: 256,
        resource.RLIMIT_NPROC: settings["max_threads"],
    }
    for kind, value in hard_limits.items():
        resource.setrlimit(kind, (value, value))


def _read_requests(control_fd: int) -> "Iterator[tuple[str, str]]":
    """Each request as its call and its code, until the other side has closed the socket."""
    rest = b""
    while chunk := os.read(control_fd, 1 << 16):
        rest += chunk
        if rest.endswith(b"\n"):  # the other side waits for the reply before it sends the next request
            yield json.loads(rest)
            rest = b""


def main(control_fd: int, settings: Settings) -> None:
    """Run requests until the other side is gone."""
    # The lowest free number: its parent's may be above the limit of open files that comes next.
    lowest_fd = os.dup(control_fd)
    os.close(control_fd)
    interpreter = Interpreter(settings)
    _apply(settings)
    os.write(lowest_fd, READY)
    for call, code in _read_requests(lowest_fd):
        os.write(lowest_fd, reply_line(call, interpreter.run(code)))


if __name__ == "__main__":
    main(int(sys.argv[1]), json.loads(sys.argv[2]))
