"""JSON over HTTP to one server: an API key, bounded time-outs, retries of what may pass."""

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

from luffy.config.execution import ServerConfig
from luffy.errors import ClusterError, ConfigError, LostError

# It reports every request.
logging.getLogger("httpx").setLevel(logging.WARNING)
_Result = TypeVar("_Result")
_LOOK_S = 1.0
"""How long a wait goes on before it looks whether the loop is still there."""
_FIRST_DELAY_S = 0.5
_LONGEST_DELAY_S = 30.0
_LONGEST_ASKED_S = 600.0
"""A server that asks to be left alone for longer is not waited for."""
_SPREAD = 0.25
"""Requests that were refused together do not come back together: each waits up to so much longer."""
_COMPLAINTS = ("error", "detail", "message")
"""Where servers say what is wrong."""
_REQUEST_TIMEOUT = 408
_TOO_MANY_REQUESTS = 429
_SERVER_ERROR = 500


class NoAnswer(LostError):
    """The server cannot be reached, or was silent for longer than the time-out."""


class Refused(ClusterError):
    """The server's answer, after all attempts, is no success."""

    def __init__(self, message: str, answer: "Answer") -> None:
        super().__init__(message)
        self.answer = answer


class RefusedForNow(Refused, LostError):
    """It may be one later."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a server said."""

    status: int
    body: Mapping[str, Any]
    """Empty when it was no JSON object."""
    retry_after: str | None = None

    @property
    def ok(self) -> bool:
        return 200 <= self.status < 300 and not self._is_late_failure

    @property
    def may_pass(self) -> bool:
        """Whether the same request may succeed later: any other refusal (4xx) is final."""
        passing = self.status in (_REQUEST_TIMEOUT, _TOO_MANY_REQUESTS) or self.status >= _SERVER_ERROR
        return passing or self._is_late_failure

    @property
    def _is_late_failure(self) -> bool:
        """A gateway that has begun to answer tells of what failed behind it under the status of a success."""
        return 200 <= self.status < 300 and bool(self.body.get("error"))

    @property
    def complaint(self) -> str:
        """The server's own words, in one line."""
        error = next((self.body[name] for name in _COMPLAINTS if self.body.get(name)), "")
        words = error.get("message", "") if isinstance(error, Mapping) else error
        wait = f" (asks to be left alone: {self.retry_after})" if self.retry_after is not None else ""
        return f"status {self.status}: {' '.join(str(words).split())}".rstrip(": ") + wait


class HTTPClient:
    """Speaks with one server; all its coroutines run in one event loop.

    The API key is in the headers of requests and nowhere else: what a server says of it is shown without it.
    """

    def __init__(self, url: str, config: ServerConfig) -> None:
        api_key = _api_key(config.api_key_variable)
        self.url = url
        self.has_key = api_key is not None
        self._api_key = api_key
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
        return Answer(response.status_code, self._said(response), response.headers.get("Retry-After"))

    async def must(self, path: str, body: Mapping[str, object]) -> Mapping[str, Any]:
        """What a request gives that is sent once; ClusterError for anything but success."""
        return self._given(path, await self.ask(path, body))

    async def must_in_the_end(
        self, path: str, body: Mapping[str, object], *, even_if_silent: bool = False
    ) -> Mapping[str, Any]:
        """As `must`, for a request that may be repeated: broken connections, 5xx, 408 and 429 are tried again.

        A request that timed out is tried again with `even_if_silent`; else it is not, the server had its time.
        """
        for attempt in range(self._config.max_retries):
            try:
                answer = await self.ask(path, body)
            except NoAnswer as error:
                if isinstance(error.__cause__, httpx.ReadTimeout) and not even_if_silent:
                    raise
                delay_s = _delay_s(attempt)
            else:
                asked_s = _asked_s(answer.retry_after)
                if not answer.may_pass or (asked_s or 0) > _LONGEST_ASKED_S:
                    return self._given(path, answer)
                delay_s = _delay_s(attempt) if asked_s is None else asked_s
            await asyncio.sleep(delay_s * random.uniform(1, 1 + _SPREAD))  # noqa: S311 - nothing is drawn by it
        return await self.must(path, body)

    async def close(self) -> None:
        """Close its connections."""
        await self._http.aclose()

    def _given(self, path: str, answer: Answer) -> Mapping[str, Any]:
        if not answer.ok:
            kind = RefusedForNow if answer.may_pass else Refused
            raise kind(f"{self.url}{path}: {answer.complaint}", answer)
        return answer.body

    def _said(self, response: httpx.Response) -> Mapping[str, Any]:
        """The JSON object in an answer; a complaint without the key that it may repeat."""
        body = _json_object(response.text)
        is_complaint = not response.is_success or "error" in body
        if self._api_key is None or not is_complaint:
            return body
        return _json_object(response.text.replace(self._api_key, "***"))


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


def _json_object(text: str) -> Mapping[str, Any]:
    try:
        body = json.loads(text)
    except ValueError:
        return {}
    return body if isinstance(body, dict) else {}


def _api_key(variable: str) -> str | None:
    """What the environment variable holds; ConfigError where that can be no key, without saying it."""
    api_key = os.environ.get(variable) or None
    if api_key is not None and not (api_key.isascii() and api_key.isprintable() and " " not in api_key):
        raise ConfigError(
            f"the environment variable {variable} (execution.server.api_key_variable) holds no API key: it has a "
            "blank, a line break or a letter that no key has"
        )
    return api_key


def _delay_s(attempt: int) -> float:
    """How long to wait before the next attempt: longer each time."""
    return min(_FIRST_DELAY_S * 2**attempt, _LONGEST_DELAY_S)


def _asked_s(retry_after: str | None) -> float | None:
    """How long the server asks to be left alone, in seconds or until a date; None where it does not say."""
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
        return None  # neither: as if it had said nothing
