"""An environment of the package verifiers in a process of its own.

    process = shared_process(config.package)
    process.description.tools                                # what it has
    rows = process.call("tasks", split="train", start=0, stop=10)
    messages = await process.awaited("reset", episode=1, split="train", row=3, digest=...)

The process ends when this one ends, however that happens: by the end of its input, and by the kernel's signal.
"""

import asyncio
import atexit
import contextlib
import itertools
import json
import logging
import os
import queue
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from luffy.config.data import VerifiersPackage
from luffy.errors import ConfigError, DataError, EnvironmentFault, LostError, LuffyError
from luffy.json_text import parse_json
from luffy.processes import die_with, end_group, signal_group

logger = logging.getLogger(__name__)
_HOST = Path(__file__).with_name("verifiers_host.py")
_START_FACTOR = 10
"""The time limit of loading, which may import a lot and build data sets, in multiples of the limit of a call."""
_ALIVE_S = 10.0
"""A process whose event loop does not answer for so long after a call's time limit is hung as a whole."""
_QUIET_S = 10.0
"""Loading that takes longer is logged once."""
_CLOSE_S = 15.0
"""The process gives the environment's teardown 10 seconds."""
_LOG_LEVEL, _HASH_SEED = "VF_LOG_LEVEL", "PYTHONHASHSEED"
"""The child gets these, unless they are set: verifiers logs every step, and the order of sets must not differ."""
Reply = Mapping[str, object]


class HostedFault(LuffyError):
    """The environment failed in one episode."""


@dataclass(frozen=True, slots=True)
class HostedDescription:
    """Properties of an environment, as its process reports them."""

    version: str
    """Version of the package verifiers."""
    kind: str
    """Its class."""
    tools: Sequence[Mapping[str, Any]]
    """In the form of OpenAI's protocol."""
    functions: Sequence[str]
    """Names of its reward functions and metrics."""
    tasks: Mapping[str, int]
    """Number of tasks of each split, `train` and `eval`."""


class VerifiersProcess:
    """The process of one environment. Calls may come from any thread and any event loop."""

    def __init__(self, package: VerifiersPackage) -> None:
        """Start it and wait until the environment is loaded; ConfigError where it cannot be used."""
        self._package = package
        self._where = f"the environment {package.environment} of verifiers"
        self._numbers = itertools.count()
        self._episodes = itertools.count()
        self._lock = threading.Lock()
        self._ending = threading.Lock()
        self._requests: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._waiting: dict[int, Future[object]] = {}
        self._lost: LuffyError | None = None
        # The kernel's signal follows the forking thread: the reader lasts as long as the process does.
        started: queue.Queue[subprocess.Popen[bytes] | OSError] = queue.Queue()
        self._reader = threading.Thread(target=self._run, args=(started,), name="verifiers", daemon=True)
        self._reader.start()
        process = started.get()
        if isinstance(process, OSError):
            raise ConfigError(f"environment.python: {package.python} cannot be started ({process.strerror})")
        self._process = process
        threading.Thread(target=self._write, name="verifiers requests", daemon=True).start()
        request: dict[str, object] = {"environment": package.environment, "arguments": package.arguments}
        limit_s = _START_FACTOR * package.call_timeout_s
        still = threading.Timer(_QUIET_S, logger.warning, ("%s still loads, for %g s at most", self._where, limit_s))
        still.daemon = True
        still.start()
        try:
            found = self._result("load", limit_s, directory=str(Path.cwd()), **request)
        except LuffyError:
            self.close()
            raise
        finally:
            still.cancel()
        self.description = HostedDescription(**cast(dict[str, Any], found))

    @property
    def pid(self) -> int:
        """Process id; the process leads its own group."""
        return self._process.pid

    @property
    def is_lost(self) -> bool:
        """Whether it has ended, or was ended because it hung."""
        return self._lost is not None

    def new_episode(self) -> int:
        return next(self._episodes)

    def call(self, op: str, **request: object) -> object:
        """The reply to a request.

        Raises HostedFault where the environment fails, DataError for a task that is not there, EnvironmentFault where
        the process has died or hangs, LostError where it was killed.
        """
        return self._result(op, self._package.call_timeout_s, **request)

    async def awaited(self, op: str, **request: object) -> object:
        """As `call`, without holding up the event loop."""
        number, reply = self._send(op, request)
        try:
            return await asyncio.wait_for(asyncio.wrap_future(reply), self._package.call_timeout_s)
        except TimeoutError:
            raise await asyncio.to_thread(self._late, op, number, self._package.call_timeout_s) from None

    def close(self) -> None:
        """End the process, after the environment's own teardown; may be called again."""
        self._requests.put(None)
        self._reader.join(_CLOSE_S)
        self._kill()
        self._reader.join()

    def _write(self) -> None:
        """Pass requests on until None ends the input; in a thread, since a process that hangs does not read them."""
        pipe = cast(Any, self._process.stdin)
        with contextlib.suppress(OSError), pipe:  # it has died: the reader says so
            while (request := self._requests.get()) is not None:
                pipe.write(request)
                pipe.flush()

    def _run(self, started: "queue.Queue[subprocess.Popen[bytes] | OSError]") -> None:
        parent = os.getpid()
        try:
            process = subprocess.Popen(
                [self._package.python, str(_HOST)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={_LOG_LEVEL: "ERROR", _HASH_SEED: "0", **os.environ},
                start_new_session=True,
                preexec_fn=lambda: die_with(parent, signal.SIGKILL),
            )
        except OSError as error:
            started.put(error)
            return
        started.put(process)
        end = f"has died (process {process.pid}); the log has its last words"
        for line in cast(Any, process.stdout):
            try:
                reply = parse_json(line)
                number = reply["id"]
            except (ValueError, LookupError, TypeError) as error:
                end = f"wrote a line that is no reply ({error}); its process was ended"
                self._lose(EnvironmentFault(f"{self._where} {end}"))
                break
            with self._lock:
                waiting = self._waiting.pop(number, None)
            if waiting is None or not waiting.set_running_or_notify_cancel():
                continue  # it came too late
            if "ok" in reply:
                waiting.set_result(reply["ok"])
            elif "fault" in reply:
                waiting.set_exception(HostedFault(f"{self._where}: {reply['fault']}"))
            elif "task" in reply:
                waiting.set_exception(DataError(f"{self._where}: {reply['task']}; prepare the data again"))
            else:
                waiting.set_exception(ConfigError(f"environment: {self._where} cannot be used: {reply['refused']}"))
        with self._ending:
            end_group(process)
        if process.returncode == -signal.SIGKILL:  # from outside, unless it hung, which `_late` has said by then
            why = f"was killed (process {process.pid}; is this machine short of memory?); the same command continues"
            self._lose(LostError(f"{self._where} {why}"))
        else:
            self._lose(EnvironmentFault(f"{self._where} {end}"))

    def _lose(self, error: LuffyError) -> None:
        """Fail all pending calls and all later ones with `error`."""
        with self._lock:
            self._lost = self._lost or error
            waiting, self._waiting = list(self._waiting.values()), {}
        self._requests.put(None)
        for reply in waiting:
            if reply.set_running_or_notify_cancel():
                reply.set_exception(self._lost)

    def _send(self, op: str, request: Reply) -> tuple[int, "Future[object]"]:
        number, reply = next(self._numbers), Future[object]()
        with self._lock:
            if self._lost is not None:
                raise self._lost
            self._waiting[number] = reply
        line = json.dumps({"id": number, "op": op, **request}) + "\n"
        self._requests.put(line.encode())
        return number, reply

    def _kill(self) -> None:
        with self._ending:
            if self._process.returncode is None:
                signal_group(self._process.pid, signal.SIGKILL)

    def _result(self, op: str, timeout_s: float, **request: object) -> object:
        number, reply = self._send(op, request)
        try:
            return reply.result(timeout_s)
        except TimeoutError:
            raise self._late(op, number, timeout_s) from None

    def _late(self, op: str, number: int, timeout_s: float) -> LuffyError:
        """The error for a call past its time limit: one episode hangs, or the whole process, which is then killed."""
        limit = f"did not answer ({op}) within {timeout_s:g} s (environment.call_timeout_s)"
        try:
            _, alive = self._send("cancel", {"target": number})
            alive.result(_ALIVE_S)
        except TimeoutError:
            self._lose(EnvironmentFault(f"{self._where} {limit} and hangs as a whole; its process was ended"))
            self._kill()
        except LuffyError as lost:
            return lost
        return self._lost or HostedFault(f"{self._where} {limit}")


_shared: dict[tuple[int, str], VerifiersProcess] = {}
_sharing = threading.Lock()


def shared_process(package: VerifiersPackage) -> VerifiersProcess:
    """The process of an environment, one for all that use it here; it ends with this process."""
    own = {name: getattr(package, name) for name in VerifiersPackage.model_fields}  # `package` may be of a subclass
    key = os.getpid(), json.dumps(own)  # a fork has no thread that reads the replies
    with _sharing:
        process = _shared.get(key)
        if process is None or process.is_lost:
            process = _shared[key] = VerifiersProcess(package)
            atexit.register(process.close)
        return process
