"""A language model as judge, at an OpenAI-compatible endpoint: bounded in time and attempts, cached on disk.

The judge sees only the final reply of a response. A verdict is remembered by the hash of the endpoint and everything
that the judge was shown, so that a restarted stage repeats no request and gets the same verdicts; failures are not
remembered.
"""

import asyncio
import concurrent.futures
import hashlib
import http
import json
import re
import threading
import time
from collections.abc import Mapping
from pathlib import Path

import httpx

from luffy.config.grading import JudgeGrader
from luffy.errors import ConfigError, LuffyError
from luffy.files import write_atomic
from luffy.grading.extract import final_reply
from luffy.grading.request import Grade, JudgeRequest
from luffy.http_client import Answer, HTTPClient, LoopThread, NoAnswer, RequestLimits, api_key_of, cancel_others
from luffy.json_text import parse_json
from luffy.types import Outcome

MAX_REPLY_BYTES = 1 << 20
_MAX_ANSWER_CHARS = 8000
"""A longer answer is truncated to its end."""
_VERDICT = re.compile(r"VERDICT\s*:\s*\W{0,3}?((?:-(?=[\d.]))?(?:\.\d+|\w+(?:\.\d+)?))", re.IGNORECASE)
_FIELD = re.compile(r"\{(question|reference|answer)\}")
_REFUSED_FOR_GOOD = (400, 401, 403, 404, 405, 422)


class _Failed(Exception):
    """An attempt without a verdict, with the outcome and the reason."""

    def __init__(self, outcome: Outcome, reason: str, cause: Answer | NoAnswer | None = None) -> None:
        super().__init__(reason)
        self.outcome = outcome
        self.cause = cause
        """The refusal, or why there is no answer; None for an answer that holds no verdict."""


class Judges:
    """Calls the judges of a pool: one connection to each, `parallel` requests in flight. May be shared by threads."""

    def __init__(self, cache: Path | None) -> None:
        self._cache = cache
        self._lock = threading.Lock()
        self._loop: LoopThread | None = None
        self._judges: dict[JudgeGrader, _Judge] = {}
        self._closed = False

    def submit(self, request: JudgeRequest) -> "concurrent.futures.Future[Grade]":
        """Request a verdict in the background; `close` cancels the future.

        It holds a ConfigError where the endpoint refuses the request for good. An endpoint that cannot be reached or
        gives no verdict in `1 + retries` attempts is `timed_out`, `crashed` or `unparsable`, with the last reason.
        """
        with self._lock:
            if self._closed:
                raise LuffyError("the grader pool is closed")
            if request.judge not in self._judges:
                self._judges[request.judge] = _Judge(request.judge, self._cache)
            if self._loop is None:
                self._loop = LoopThread()
            return self._loop.submit(self._judges[request.judge].grade(request))

    def close(self) -> None:
        with self._lock:
            already, self._closed = self._closed, True
        if self._loop is not None and not already:

            async def disconnect() -> None:
                # First the requests, or one that waits for its turn would begin on a closed connection.
                await cancel_others()
                await asyncio.gather(*(judge.client.close() for judge in self._judges.values()))

            self._loop.run(disconnect())
            self._loop.close()


class _Judge:
    """One judge; all its coroutines run in one event loop."""

    def __init__(self, kind: JudgeGrader, cache: Path | None) -> None:
        variable = kind.api_key_variable
        key = None if variable is None else api_key_of(variable, "the judge's api_key_variable")
        if variable is not None and key is None:
            raise ConfigError(f"the judge's api_key_variable {variable} is not set; export it")
        limits = RequestLimits(kind.timeout_s, kind.timeout_s, deadline_s=kind.timeout_s, max_bytes=MAX_REPLY_BYTES)
        self._kind = kind
        self._cache = cache
        self.client = HTTPClient(kind.url.rstrip("/"), key, limits)
        self._slots = asyncio.Semaphore(kind.parallel)

    async def grade(self, request: JudgeRequest) -> Grade:
        kind = self._kind
        answer = request.answer[-_MAX_ANSWER_CHARS:]
        shown = {"question": request.question, "reference": request.gold, "answer": answer}
        # In one pass: what the answer says in braces stays text.
        prompt = _FIELD.sub(lambda match: shown[match[1]], kind.prompt)
        body = {
            "model": kind.model,
            "messages": [{"role": "user", "content": prompt.encode(errors="replace").decode()}],
            "temperature": kind.temperature,
            "max_tokens": kind.max_tokens,
        }
        key = hashlib.sha256(f"{kind.url}\n{json.dumps(body)}".encode()).hexdigest()
        file = None if self._cache is None else self._cache / f"{key}.json"
        try:
            known = None if file is None else parse_json(file.read_text(encoding="utf-8"))["verdict"]
        except (OSError, ValueError, LookupError, TypeError):
            known = None  # not asked yet; a file that is no verdict is written again
        if isinstance(known, str) and (kind.correct_from is None or _score(known) is not None):
            return _grade(known, request)
        async with self._slots:
            started = time.monotonic()
            for attempt in range(kind.retries + 1):
                try:
                    word = await self._ask(body)
                    break
                except _Failed as error:
                    waits_too_long = isinstance(error.cause, Answer) and error.cause.asks_for_too_long
                    if waits_too_long or attempt == kind.retries:
                        # A reply without a verdict is final: the same request would get the same reply.
                        is_unjudged, seconds = error.outcome is not Outcome.UNPARSABLE, time.monotonic() - started
                        return Grade(error.outcome, request.answer, f"judge: {error}", seconds, is_unjudged=is_unjudged)
                    await self.client.pause(attempt, error.cause)
            if file is not None:
                file.parent.mkdir(parents=True, exist_ok=True)
                write_atomic(file, json.dumps({"verdict": word}))
            return _grade(word, request, time.monotonic() - started)

    async def _ask(self, body: Mapping[str, object]) -> str:
        try:
            answer = await self.client.ask("/chat/completions", body)
        except NoAnswer as error:
            is_late = isinstance(error.__cause__, httpx.TimeoutException | TimeoutError)
            raise _Failed(Outcome.TIMED_OUT if is_late else Outcome.CRASHED, str(error), error) from None
        if answer.status in _REFUSED_FOR_GOOD:
            raise ConfigError(
                f"the judge refuses the request: {_status(answer)}; check url, model and api_key_variable of the judge"
            )
        if not answer.ok:
            raise _Failed(Outcome.CRASHED, f"the endpoint answers {_status(answer)}", answer)
        try:
            choice = answer.body["choices"][0]
            text, finish = choice["message"]["content"], choice.get("finish_reason")
        except (LookupError, TypeError, AttributeError):
            raise _Failed(Outcome.CRASHED, "the reply is no chat completion") from None
        if finish == "length":
            raise _Failed(Outcome.UNPARSABLE, "the reply is cut at max_tokens")
        words = _VERDICT.findall(final_reply(text) or "") if isinstance(text, str) else []
        if not words or (self._kind.correct_from is not None and _score(words[-1]) is None):
            raise _Failed(Outcome.UNPARSABLE, "the reply holds no verdict")
        return words[-1].upper()


def _status(answer: Answer) -> str:
    """The status with its name, and what the server says is wrong."""
    try:
        name = f" {http.HTTPStatus(answer.status).phrase}"
    except ValueError:
        name = ""
    return f"{answer.status}{name}{answer.complaint.removeprefix(f'status {answer.status}')}"


def _score(word: str) -> float | None:
    """The number of a graded verdict; None where it is none from 0 to 1."""
    return float(word) if re.fullmatch(r"[01]|0?\.\d+|[01]\.0+", word) else None


def _grade(word: str, request: JudgeRequest, seconds: float = 0.0) -> Grade:
    # The reason does not mention the cache: after a kill, samples have to be the same bytes as in an undisturbed stage.
    bound = request.judge.correct_from
    score = None if bound is None else _score(word)
    is_right = word == request.judge.correct.upper() if bound is None or score is None else score >= bound
    outcome = Outcome.CORRECT if is_right else Outcome.WRONG
    return Grade(outcome, request.answer, f"the judge says {word}", seconds, score)
