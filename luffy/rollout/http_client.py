"""JSON over HTTP to one server: an API key, bounded time-outs, retries of what may pass."""

import asyncio
import concurrent.futures
import logging
import os
import threading
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import httpx

from luffy.config.execution import ServerConfig
from luffy.errors import ClusterError, LostError

# It reports every request.
logging.getLogger("httpx").setLevel(logging.WARNING)
_Result = TypeVar("_Result")
_LOOK_S = 1.0
"""How long a wait goes on before it looks whether the loop is still there."""
_FIRST_DELAY_S = 0.5
_LONGEST_DELAY_S = 30.0
_TOO_MANY_REQUESTS = 429
_SERVER_ERROR = 500


class NoAnswer(LostError):
    """The server cannot be reached, or was silent for longer than the time-out."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a server said."""

    status: int
    body: Mapping[str, Any]
    """Empty when it was no JSON object."""
    retry_after: str | None = None

    @property
    def ok(self) -> bool:
        return 200 <= self.status < 300

    @property
    def may_pass(self) -> bool:
        """Whether the same request may succeed later: any other refusal (4xx) is final."""
        return self.status == _TOO_MANY_REQUESTS or self.status >= _SERVER_ERROR

    @property
    def complaint(self) -> str:
        """The server's own words, in one line."""
        error = self.body.get("error", self.body.get("detail", ""))
        words = error.get("message", "") if isinstance(error, Mapping) else error
        return f"status {self.status}: {' '.join(str(words).split())}".rstrip(": ")


class HTTPClient:
    """Speaks with one server; all its coroutines run in one event loop."""

    def __init__(self, url: str, config: ServerConfig) -> None:
        api_key = os.environ.get(config.api_key_variable)
        self.url = url
        self.has_key = api_key is not None
        self._config = config
        self._http = httpx.AsyncClient(
            base_url=url,
            headers={} if api_key is None else {"Authorization": f"Bearer {api_key}"},
            timeout=httpx.Timeout(config.request_timeout_s, connect=config.connect_timeout_s),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
        )

    async def ask(self, path: str, body: Mapping[str, object] | None = None) -> Answer:
        """The answer to one POST of `body` (GET without one), whatever its status; NoAnswer without one."""
        try:
            response = await self._http.request("GET" if body is None else "POST", path, json=body)
        except httpx.TimeoutException as error:
            limit = (
                self._config.connect_timeout_s
                if isinstance(error, httpx.ConnectTimeout)
                else self._config.request_timeout_s
            )
            raise NoAnswer(f"{self.url}: no answer within {limit:g} s") from error
        except httpx.HTTPError as error:
            raise NoAnswer(f"{self.url}: no answer ({str(error) or type(error).__name__})") from error
        return Answer(response.status_code, _json_object(response), response.headers.get("Retry-After"))

    async def must(self, path: str, body: Mapping[str, object]) -> Mapping[str, Any]:
        """What a request gives that is sent once; ClusterError for anything but success."""
        return self._given(path, await self.ask(path, body))

    async def must_in_the_end(self, path: str, body: Mapping[str, object]) -> Mapping[str, Any]:
        """As `must`, for a request that may be repeated: broken connections, 5xx and 429 are tried again.

        A request that timed out is not: the server had its time.
        """
        for attempt in range(self._config.max_retries):
            try:
                answer = await self.ask(path, body)
            except NoAnswer as error:
                if isinstance(error.__cause__, httpx.ReadTimeout):
                    raise
                await asyncio.sleep(_delay_s(attempt, None))
            else:
                if not answer.may_pass:
                    return self._given(path, answer)
                await asyncio.sleep(_delay_s(attempt, answer.retry_after))
        return await self.must(path, body)

    async def close(self) -> None:
        """Close its connections."""
        await self._http.aclose()

    def _given(self, path: str, answer: Answer) -> Mapping[str, Any]:
        if not answer.ok:
            kind = LostError if answer.may_pass else ClusterError
            raise kind(f"{self.url}{path}: {answer.complaint}")
        return answer.body


class LoopThread:
    """An event loop in a thread of its own: any other thread may wait there for a coroutine."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        # Daemon: a process that ends does not wait for servers.
        self._thread = threading.Thread(target=self._loop.run_forever, name="http", daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, _Result]) -> _Result:
        """What it returns or raises; a caller that is interrupted takes it back."""
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            while not concurrent.futures.wait([future], _LOOK_S).done:
                if not self._thread.is_alive():
                    raise ClusterError("the connection to the servers was closed")
            return future.result()
        except BaseException:
            future.cancel()
            raise

    @property
    def is_closed(self) -> bool:
        return self._loop.is_closed()

    def close(self) -> None:
        """Cancel what still runs, and end the loop and its thread."""
        self.run(_cancel_others())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _cancel_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


def _json_object(response: httpx.Response) -> Mapping[str, Any]:
    try:
        body = response.json()
    except ValueError:
        return {}
    return body if isinstance(body, dict) else {}


def _delay_s(attempt: int, retry_after: str | None) -> float:
    """How long to wait before the next attempt: what the server asks for (in seconds), else longer each time."""
    asked = float(retry_after) if retry_after is not None and retry_after.isdecimal() else _FIRST_DELAY_S * 2**attempt
    return min(asked, _LONGEST_DELAY_S)
