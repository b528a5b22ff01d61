"""A session: runs calls in an interpreter's process, watches their limits, and says in words how they ended.

The start and the end of what a call prints are kept; the rest is counted.
"""

import asyncio
import secrets
import signal
import time
import weakref
from dataclasses import dataclass

from luffy.config.sandbox import SandboxLimits
from luffy.sandbox.interpreter import REPLIES, reply_line, request_line
from luffy.sandbox.interpreter_process import InterpreterProcess
from luffy.sandbox.python_session import ExecutionResult, ExecutionStatus

_LOOK_S = 0.25
"""Longest time between two looks at a running call."""
_SHORTEST_LOOK_S = 0.005
_DRAIN_S = 0.005
"""Pause between reads of a call that prints too much, so that it does not keep the event loop busy."""
_MOST_READS = 32
"""A pipe holds as much as one read takes, or 1 MiB where the code has enlarged it."""
_DEATH_S = 2.0
"""Longest time between a dying process's closing of its control socket and its death."""


@dataclass(frozen=True, slots=True)
class _Stop:
    """A reason to stop a call, or why the session is over."""

    status: ExecutionStatus
    why: str
    is_final: bool = False
    """Whether the interpreter is killed at once."""


class PrintedOutput:
    """Collects bytes in bounded memory."""

    def __init__(self, shown_bytes: int) -> None:
        self._shown = shown_bytes
        self._head = bytearray()
        self._tail = bytearray()
        self._tail_size = shown_bytes - shown_bytes // 2
        self.size = 0
        """Bytes printed so far, those left out included."""

    def add(self, chunk: bytes) -> None:
        self.size += len(chunk)
        room = self._shown - self._tail_size - len(self._head)
        self._head += chunk[:room]
        self._tail += chunk[room:]
        if len(self._tail) > 2 * self._tail_size:  # not at each chunk, which would copy the tail for every line
            del self._tail[: -self._tail_size]

    def text(self) -> str:
        """Everything, or the start, how much was left out, and the end."""
        if self.size <= self._shown:
            return (self._head + self._tail).decode(errors="replace")
        tail, start = self._tail[-self._tail_size :], 0
        while start < min(3, len(tail)) and tail[start] & 0xC0 == 0x80:  # the rest of a character that was cut
            start += 1
        end = tail[start:].decode(errors="replace")
        return f"{self.start()}\n[... {self.size - self._shown} bytes of output left out ...]\n{end}"

    def start(self) -> str:
        """The start alone: all that does not depend on when an endless output was stopped."""
        for cut in range(min(4, len(self._head))):  # a character has at most four bytes
            try:
                return self._head[: len(self._head) - cut].decode()
            except UnicodeDecodeError:
                continue
        return self._head.decode(errors="replace")


class InterpreterSession:
    """A `PythonSession` over a started process. Its process ends with it, also when it is garbage."""

    def __init__(self, process: InterpreterProcess, limits: SandboxLimits) -> None:
        self._process = process
        self._limits = limits
        self._turn = asyncio.Lock()
        self._over: _Stop | None = None
        self._release = weakref.finalize(self, process.release)
        # The timer holds the process alone, or no session would become garbage before its time.
        self._timer = asyncio.get_running_loop().call_later(limits.session_wall_s, process.kill)
        self._deadline = time.monotonic() + limits.session_wall_s

    async def run(self, code: str) -> ExecutionResult:
        """Run `code` after the calls before it; see `PythonSession`."""
        async with self._turn:
            started = time.monotonic()
            if self._over is not None:
                output, status = f"[not run: the session is over: {self._over.why}]", ExecutionStatus.ENDED
            else:
                output, status = await self._call(code)
            return ExecutionResult(output, status, self._over is not None, time.monotonic() - started)

    async def close(self) -> None:
        """End the interpreter; a call in flight returns `killed`."""
        self._over = self._over or _Stop(ExecutionStatus.KILLED, "it was closed")
        self._timer.cancel()
        if self._release.alive:
            self._process.kill()
            await self._process.exit_code()
            async with self._turn:
                self._release()

    async def _call(self, code: str) -> tuple[str, ExecutionStatus]:
        call = secrets.token_hex(8)
        expected = {reply_line(call, status): ExecutionStatus(status) for status in REPLIES}
        reading = _Reading(self._process, self._limits)
        answer = asyncio.ensure_future(self._process.ask(request_line(call, code)))
        try:
            stop = await self._watch(answer, reading)
            if stop is not None and not stop.is_final:
                self._process.interrupt()
                await asyncio.wait({answer}, timeout=self._limits.interrupt_grace_s)
            reading.finish()
            reply = answer.result() if answer.done() else b""
            status = expected.get(reply)
            if status is None or (stop is not None and stop.is_final):
                self._over = stop = stop or await self._breach(reply)
                self._process.kill()
                await self._process.exit_code()
            stop = stop or self._excess(reading.printed)
            if stop is None:
                assert status is not None
                return reading.printed.text(), status
            # Only the start of endless output is reproducible.
            text = reading.printed.start() if stop.status is ExecutionStatus.OUTPUT_LIMIT else reading.printed.text()
            outcome = "the session is over and its names are lost" if self._over else "names defined before are kept"
            line_end = "" if text.endswith("\n") or not text else "\n"
            return f"{text}{line_end}[stopped: {stop.why}; {outcome}]", stop.status
        except BaseException:  # cancelled: the code is still running
            self._over = self._over or _Stop(ExecutionStatus.KILLED, "an earlier call was cancelled")
            raise
        finally:
            reading.stop()
            if self._over is not None:
                self._timer.cancel()
                self._process.kill()
                # Closed only once the event loop has let go of the control socket.
                answer.add_done_callback(lambda _: self._release())
                answer.cancel()

    async def _watch(self, answer: "asyncio.Future[bytes]", reading: "_Reading") -> _Stop | None:
        """Wait for the reply, or for the first limit that the call reaches."""
        limits = self._limits
        cpu_before, started = self._process.cpu_s(), time.monotonic()
        while True:
            cpu_s, wall_s = self._process.cpu_s(), time.monotonic() - started
            if answer.done():
                return None
            stop = self._limit_reached(cpu_s, cpu_s - cpu_before, wall_s, reading.printed)
            if stop is not None:
                return stop
            left_s = min(limits.call_wall_s - wall_s, (limits.call_cpu_s - cpu_s + cpu_before) / limits.max_threads)
            timeout_s = max(_SHORTEST_LOOK_S, min(_LOOK_S, left_s))
            awaited: set[asyncio.Future[bytes] | asyncio.Future[None]] = {answer, reading.too_much}
            await asyncio.wait(awaited, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)

    def _limit_reached(self, session_cpu_s: float, cpu_s: float, wall_s: float, printed: PrintedOutput) -> _Stop | None:
        limits, status = self._limits, ExecutionStatus
        if excess := self._excess(printed):
            return excess
        if self._process.num_files() > limits.max_files:
            return _Stop(status.FILE_LIMIT, f"the session has more than {limits.max_files} files in /tmp", True)
        if session_cpu_s >= limits.session_cpu_s:
            return _Stop(status.TIMED_OUT, f"the session used {limits.session_cpu_s:g} s of CPU time", True)
        if cpu_s >= limits.call_cpu_s:
            return _Stop(status.TIMED_OUT, f"the call used {limits.call_cpu_s:g} s of CPU time")
        if wall_s >= limits.call_wall_s:
            return _Stop(status.TIMED_OUT, f"the call took {limits.call_wall_s:g} s")
        return None

    def _excess(self, printed: PrintedOutput) -> _Stop | None:
        most = self._limits.printed_bytes
        if printed.size <= most:
            return None
        return _Stop(ExecutionStatus.OUTPUT_LIMIT, f"the call printed more than {most} bytes")

    async def _breach(self, reply: bytes) -> _Stop:
        """Why there is no proper reply although no limit of the call was reached."""
        if reply:
            return _Stop(ExecutionStatus.CORRUPTED, "the code wrote to the sandbox's control socket")
        if self._over is not None:
            return self._over
        if time.monotonic() >= self._deadline:
            return _Stop(ExecutionStatus.TIMED_OUT, f"the session took {self._limits.session_wall_s:g} s")
        try:
            async with asyncio.timeout(_DEATH_S):
                code = await self._process.exit_code()
        except TimeoutError:
            return _Stop(ExecutionStatus.KILLED, "the code closed the sandbox's control socket")
        number = -code if code < 0 else code - 128
        named = f"by signal {number} ({signal.Signals(number).name})" if number in set(signal.Signals) else ""
        return _Stop(ExecutionStatus.KILLED, f"the interpreter ended {named or f'with exit code {code}'}")


class _Reading:
    """Reads what a call prints while it runs, slowly once that is more than it may."""

    def __init__(self, process: InterpreterProcess, limits: SandboxLimits) -> None:
        self.printed = PrintedOutput(limits.shown_output_bytes)
        self._process = process
        self._most = limits.printed_bytes
        self._loop = asyncio.get_running_loop()
        self._pause: asyncio.TimerHandle | None = None
        self.too_much: asyncio.Future[None] = self._loop.create_future()
        """Done once more has been printed than the call may."""
        self._loop.add_reader(process.output_fd, self._read)

    def finish(self) -> None:
        """Take up what is still in the pipe; what threads go on printing is left to the next call."""
        for _ in range(_MOST_READS):
            if chunk := self._process.read_output():
                self.printed.add(chunk)

    def stop(self) -> None:
        if self._pause is not None:
            self._pause.cancel()
        if self._process.output_fd >= 0:
            self._loop.remove_reader(self._process.output_fd)

    def _read(self) -> None:
        chunk = self._process.read_output()
        if chunk:
            self.printed.add(chunk)
        if chunk == b"":
            self._loop.remove_reader(self._process.output_fd)
        elif self.printed.size > self._most:
            if not self.too_much.done():
                self.too_much.set_result(None)
            self._loop.remove_reader(self._process.output_fd)
            self._pause = self._loop.call_later(_DRAIN_S, self._read)
