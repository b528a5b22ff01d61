"""JSON over HTTP to one server: an API key, deadlines, and retries of failures that may pass."""

import asyncio
import concurrent.futures
import email.utils
import json
import logging
import math
import os
import random
import threading
import time
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import httpx
from httpx import codes

from luffy.config.execution import ServerConfig
from luffy.errors import ClusterError, ConfigError, LostError
from luffy.json_text import parse_json

logger = logging.getLogger(__name__)
# It reports every request.
logging.getLogger("httpx").setLevel(logging.WARNING)
_Result = TypeVar("_Result")
_LOOK_S = 1.0
"""Interval at which a caller that waits checks that the loop is still running."""
_CONNECT_TIMEOUT_S = 10.0
_FIRST_DELAY_S = 0.5
_LONGER_FOR_RATES = 8
"""Factor of the delays after a 429: such limits are usually counted by the minute."""
_LONGEST_DELAY_S = 30.0
_LONGEST_ASKED_S = 600.0
"""Longest `Retry-After` that is waited for; a longer one ends the attempts."""
_LONG_S = 5.0
"""A wait that is said: shorter ones are part of ordinary work."""
_SPREAD = 0.25
"""Each delay is stretched by up to this share, so that requests refused together do not come back together."""
_ERROR_FIELDS = ("error", "detail", "message")
"""Where servers say what is wrong."""
_MAX_ERROR_CHARS = 200
"""Kept of an error body that is not a JSON object."""


class NoAnswer(LostError):
    """The server cannot be reached, or was silent for longer than the time-out."""


class Refused(ClusterError):
    """The server refused the request, after all attempts."""

    def __init__(self, message: str, answer: "Answer") -> None:
        super().__init__(message)
        self.answer = answer


class RefusedForNow(Refused, LostError):
    """The same request may succeed later."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A server's response."""

    status: int
    body: Mapping[str, Any]
    """The response's JSON object; empty when it was something else."""
    retry_after: str | None = None
    text: str = ""
    """What an unsuccessful response without a JSON object says: where it redirects to, or its beginning."""

    @property
    def ok(self) -> bool:
        return 200 <= self.status < 300 and not self._is_late_failure

    @property
    def may_pass(self) -> bool:
        """Whether the same request may succeed later: any other refusal (4xx) is final."""
        passing = self.status in (codes.REQUEST_TIMEOUT, codes.TOO_MANY_REQUESTS)
        return passing or self.status >= codes.INTERNAL_SERVER_ERROR or self._is_late_failure

    @property
    def asks_for_too_long(self) -> bool:
        """Whether the server wants to be left alone for longer than a client waits."""
        return (_asked_s(self.retry_after) or 0) > _LONGEST_ASKED_S

    @property
    def _is_late_failure(self) -> bool:
        """A gateway that has begun to answer reports a failure of its server under the status of a success."""
        return 200 <= self.status < 300 and bool(self.body.get("error"))

    @property
    def complaint(self) -> str:
        """What the server says is wrong, in one line."""
        error = next((self.body[name] for name in _ERROR_FIELDS if self.body.get(name)), self.text)
        words = error.get("message", "") if isinstance(error, Mapping) else error
        wait = f" (Retry-After: {self.retry_after})" if self.retry_after is not None else ""
        return f"status {self.status}: {' '.join(str(words).split())}".rstrip(": ") + wait


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """How long a request may take and how often it is tried."""

    connect_timeout_s: float
    read_timeout_s: float
    """Longest silence of the server."""
    deadline_s: float | None = None
    """Time limit of a whole attempt, even while bytes arrive; None: no deadline."""
    max_retries: int = 0
    max_bytes: int | None = None
    """Longest response; None: any."""


class HTTPClient:
    """Speaks with one server; all its coroutines run in one event loop.

    The API key is in the headers of requests and nowhere else: an error that repeats it is shown without it.
    """

    def __init__(self, url: str, api_key: str | None, limits: RequestLimits) -> None:
        self.url = url
        self.has_key = api_key is not None
        self._api_key = api_key
        self._limits = limits
        self._http = httpx.AsyncClient(
            base_url=url,
            headers={} if api_key is None else {"Authorization": f"Bearer {api_key}"},
            timeout=httpx.Timeout(limits.read_timeout_s, connect=limits.connect_timeout_s),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
        )
        self._said_until = 0.0

    @classmethod
    def to_server(cls, url: str, config: ServerConfig, setting: str = "execution.server") -> "HTTPClient":
        """A client for one of the `urls` of a section, which errors call `setting`."""
        limits = RequestLimits(_CONNECT_TIMEOUT_S, config.request_timeout_s, max_retries=config.max_retries)
        return cls(url, api_key_of(config.api_key_variable, f"{setting}.api_key_variable"), limits)

    async def ask(self, path: str, body: Mapping[str, object] | None = None) -> Answer:
        """The answer to one POST of `body` (GET without one), whatever its status; NoAnswer without one."""
        limits = self._limits
        try:
            async with asyncio.timeout(limits.deadline_s):
                return await self._ask("GET" if body is None else "POST", path, body)
        except httpx.ConnectTimeout as error:
            raise NoAnswer(f"{self.url}: no answer within {limits.connect_timeout_s:g} s") from error
        except (httpx.TimeoutException, TimeoutError) as error:
            limit_s = limits.deadline_s or limits.read_timeout_s
            raise NoAnswer(f"{self.url}: no answer within {limit_s:g} s") from error
        except httpx.HTTPError as error:
            raise NoAnswer(f"{self.url}: no answer ({str(error) or type(error).__name__})") from error

    async def _ask(self, method: str, path: str, body: Mapping[str, object] | None) -> Answer:
        content = bytearray()
        async with self._http.stream(method, path, json=body) as response:
            async for piece in response.aiter_bytes():
                content += piece
                if self._limits.max_bytes is not None and len(content) > self._limits.max_bytes:
                    raise NoAnswer(f"{self.url}: the response is longer than {self._limits.max_bytes} bytes")
        text = content.decode(errors="replace")
        found = _json_object(text)
        if not response.is_success or "error" in found:  # may repeat the key
            found = _json_object(self._hidden(json.dumps(found)))
        shown = "" if response.is_success or found else self._hidden(text)[:_MAX_ERROR_CHARS]
        if response.has_redirect_location:
            shown = f"the server redirects to {self._hidden(response.headers['Location'])}"
        return Answer(response.status_code, found, response.headers.get("Retry-After"), shown)

    async def post(self, path: str, body: Mapping[str, object]) -> Mapping[str, Any]:
        """The body of a successful answer to a request that is sent once; ClusterError for any other answer."""
        return self._given(path, await self.ask(path, body))

    async def post_with_retries(self, path: str, body: Mapping[str, object]) -> Mapping[str, Any]:
        """Same as `post`, for a request that may be repeated after a broken connection, silence, 5xx, 408 or 429."""
        for attempt in range(self._limits.max_retries):
            failure: Answer | NoAnswer
            try:
                failure = await self.ask(path, body)
            except NoAnswer as error:
                failure = error
            else:
                if not failure.may_pass or failure.asks_for_too_long:
                    return self._given(path, failure)
            await self.pause(attempt, failure)
        return await self.post(path, body)

    async def pause(self, attempt: int, failure: Answer | NoAnswer | None) -> None:
        """Wait after failed attempt number `attempt` (from 0); `failure` None: its answer was of no use.

        A long wait, or one after a long silence, is logged, once for all requests that wait at the same time.
        """
        answer = failure if isinstance(failure, Answer) else None
        delay_s, now = retry_delay_s(attempt, answer), time.monotonic()
        is_late = isinstance(failure, NoAnswer) and isinstance(failure.__cause__, httpx.TimeoutException | TimeoutError)
        if failure is not None and (is_late or delay_s >= _LONG_S) and now >= self._said_until:
            self._said_until = now + delay_s
            why = str(failure) if answer is None else f"{self.url}: {answer.complaint}"
            logger.warning("%s; asking again in %.0f s", why, delay_s)
        await asyncio.sleep(delay_s)

    async def close(self) -> None:
        """Close its connections."""
        await self._http.aclose()

    def _given(self, path: str, answer: Answer) -> Mapping[str, Any]:
        if not answer.ok:
            kind = RefusedForNow if answer.may_pass else Refused
            raise kind(f"{self.url}{path}: {answer.complaint}", answer)
        return answer.body

    def _hidden(self, text: str) -> str:
        """The text without the key, also as JSON writes it."""
        key = self._api_key
        return text if key is None else text.replace(key, "***").replace(json.dumps(key)[1:-1], "***")


class LoopThread:
    """An event loop in a thread of its own, to which any other thread may hand coroutines."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        # Daemon: a process that ends does not wait for servers.
        self._thread = threading.Thread(target=self._loop.run_forever, name="http", daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, _Result]) -> _Result:
        """Wait for a coroutine and return its result; a caller that is interrupted cancels it."""
        future = self.submit(coroutine)
        try:
            while not concurrent.futures.wait([future], _LOOK_S).done:
                if not self._thread.is_alive():
                    raise ClusterError("the connection to the servers was closed")
            return future.result()
        finally:
            future.cancel()  # without effect once it is done

    def submit(self, coroutine: Coroutine[Any, Any, _Result]) -> "concurrent.futures.Future[_Result]":
        """Start a coroutine; the future is cancelled by `close`."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    @property
    def is_closed(self) -> bool:
        return self._loop.is_closed()

    def close(self) -> None:
        """Cancel what still runs, and end the loop and its thread."""
        self.run(cancel_others())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def cancel_others() -> None:
    """Cancel all other tasks of the running loop, and wait for their ends."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


def _json_object(text: str) -> Mapping[str, Any]:
    try:
        body = parse_json(text)
    except ValueError:
        return {}
    return body if isinstance(body, dict) else {}


def api_key_of(variable: str, setting: str) -> str | None:
    """The API key in an environment variable, None when it is not set; ConfigError, without it, for what is no key."""
    api_key = os.environ.get(variable) or None
    if api_key is not None and not (api_key.isascii() and api_key.isprintable() and " " not in api_key):
        raise ConfigError(
            f"the environment variable {variable} ({setting}) holds no API key: it contains a "
            "space, a line break or a character that is not allowed in a key"
        )
    return api_key


def missing_key(server: ServerConfig, setting: str) -> str | None:
    """One line about the variable that should hold the API key and is not set; None where it is, or need not be.

    The default variable may be missing: servers of one's own need no key. ConfigError for what is no key.
    """
    variable = server.api_key_variable
    is_default = variable == ServerConfig.model_fields["api_key_variable"].default
    if is_default or api_key_of(variable, f"{setting}.api_key_variable") is not None:
        return None
    return f"{setting}.api_key_variable: the environment variable {variable} is not set; export it"


def retry_delay_s(attempt: int, answer: Answer | None = None) -> float:
    """How long to wait after failed attempt number `attempt` (from 0), which got this `answer` if any.

    What the server asks for; else twice as long each time, from 0.5 s or, after a 429, from 4 s.
    """
    delay_s = None if answer is None else _asked_s(answer.retry_after)
    if delay_s is None:
        is_rate_limit = answer is not None and answer.status == codes.TOO_MANY_REQUESTS
        first_s = _FIRST_DELAY_S * (_LONGER_FOR_RATES if is_rate_limit else 1)
        delay_s = min(first_s * 2**attempt, _LONGEST_DELAY_S)
    return delay_s * random.uniform(1, 1 + _SPREAD)  # noqa: S311 - no result depends on it


def _asked_s(retry_after: str | None) -> float | None:
    """Seconds that the server asks to wait (`Retry-After`: seconds or a date); None where it does not say."""
    if retry_after is None:
        return None
    try:
        seconds = float(retry_after)
        return None if math.isnan(seconds) else max(seconds, 0.0)
    except ValueError:
        pass  # a date
    try:
        return max(email.utils.parsedate_to_datetime(retry_after).timestamp() - time.time(), 0.0)
    except ValueError:
        return None  # neither: as though it had said nothing
