"""A language model as judge, behind an OpenAI-compatible endpoint: bounded in time and attempts, cached on disk.

What the judge reads of the response is its final reply alone. A verdict is remembered by the hash of the endpoint and
everything that the judge was shown, so that a restarted stage asks nothing twice and gets the same verdicts; failures
are not.
"""

import hashlib
import http.client
import json
import os
import re
import time
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

from luffy.config.grading import JudgeGrader
from luffy.errors import ConfigError
from luffy.files import write_atomic
from luffy.grading.extract import final_reply
from luffy.grading.request import Grade, Question
from luffy.types import Outcome

MAX_REPLY_BYTES = 1 << 20
_VERDICT = re.compile(r"VERDICT\s*:\s*\W{0,3}(\w+)", re.IGNORECASE)
_UNREACHED = "judge: "
"""Opens the reason of a grade that no verdict of the judge stands behind."""
_SAYS = "the judge says "
# A combined grade names its parts' kinds in front of their reasons, which is how the prefix comes to stand twice.
_FAILURE = re.compile(rf"^{_UNREACHED}(?!(?:remembered; )?{_SAYS})|(?:^|[ ;]){_UNREACHED}{_UNREACHED}")
_FIELD = re.compile(r"\{(question|reference|answer)\}")
_REFUSED_FOR_GOOD = (400, 401, 403, 404, 405, 422)
_PAUSE_S = 0.5
"""Before the second attempt; doubled before each further one."""


class _Failed(Exception):
    """An attempt without a verdict; what became of it, and why."""

    def __init__(self, outcome: Outcome, reason: str) -> None:
        super().__init__(reason)
        self.outcome = outcome


def ask_judge(kind: JudgeGrader, question: Question, cache: Path | None) -> Grade:
    """Return the judge's verdict; ConfigError where the endpoint refuses the request for good.

    An endpoint that cannot be reached or gives no verdict in `1 + retries` attempts is `timed_out`, `crashed` or
    `unparsable`, with the last attempt's reason.
    """
    body = json.dumps(_request(kind, question))
    file = None if cache is None else cache / f"{_key(kind, body)}.json"
    known = _remembered(file)
    if known is not None:
        return _grade(kind, known, question, "remembered")
    started = time.monotonic()
    for attempt in range(kind.retries + 1):
        try:
            word = _verdict(_ask(kind, body))
        except _Failed as error:
            failure = error
        else:
            _remember(file, word)
            return _grade(kind, word, question, "", time.monotonic() - started)
        if attempt < kind.retries:
            time.sleep(_PAUSE_S * 2**attempt)
    return Grade(failure.outcome, question.answer, f"{_UNREACHED}{failure}", time.monotonic() - started)


def is_unjudged(grade: Grade) -> bool:
    """Whether a judge was asked and could not be reached: the grade says nothing of the answer."""
    return grade.outcome in (Outcome.CRASHED, Outcome.TIMED_OUT) and _FAILURE.search(grade.reason) is not None


def _request(kind: JudgeGrader, question: Question) -> Mapping[str, object]:
    shown = {
        "question": question.question,
        "reference": question.gold,
        "answer": question.answer[-kind.max_answer_chars :],
    }
    # In one pass: what the answer says in braces stays text.
    prompt = _FIELD.sub(lambda match: shown[match[1]], kind.prompt)
    return {
        "model": kind.model,
        "messages": [{"role": "user", "content": prompt.encode(errors="replace").decode()}],
        "temperature": kind.temperature,
        "max_tokens": kind.max_tokens,
    }


def _key(kind: JudgeGrader, body: str) -> str:
    return hashlib.sha256(f"{kind.url}\n{body}".encode()).hexdigest()


def _grade(kind: JudgeGrader, word: str, question: Question, note: str, seconds: float = 0.0) -> Grade:
    outcome = Outcome.CORRECT if word == kind.correct.upper() else Outcome.WRONG
    return Grade(outcome, question.answer, f"{_SAYS}{word}", seconds).saying(note)


def _verdict(reply: bytes) -> str:
    try:
        choice = json.loads(reply)["choices"][0]
        text, finish = choice["message"]["content"], choice.get("finish_reason")
    except (ValueError, LookupError, TypeError, AttributeError):
        raise _Failed(Outcome.CRASHED, "the reply is no chat completion") from None
    if finish == "length":
        raise _Failed(Outcome.UNPARSABLE, "the reply is cut at max_tokens")
    words = _VERDICT.findall(final_reply(text) or "") if isinstance(text, str) else []
    if not words:
        raise _Failed(Outcome.UNPARSABLE, "the reply holds no verdict")
    return words[-1].upper()


def _ask(kind: JudgeGrader, body: str) -> bytes:
    """One attempt; its time limit holds from the connection to the last byte, however slowly bytes come."""
    deadline = time.monotonic() + kind.timeout_s
    parts = urlsplit(kind.url)
    connect = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = connect(parts.hostname or "", parts.port, timeout=kind.timeout_s)
    try:
        connection.request("POST", f"{parts.path.rstrip('/')}/chat/completions", body, _headers(kind))
        reply = _read(connection, connection.getresponse(), deadline)
    except TimeoutError:
        raise _Failed(Outcome.TIMED_OUT, f"no reply in {kind.timeout_s:g} s") from None
    except (OSError, http.client.HTTPException) as error:
        raise _Failed(Outcome.CRASHED, f"{kind.url} fails: {error or type(error).__name__}") from None
    finally:
        connection.close()
    return reply


def _read(connection: http.client.HTTPConnection, response: http.client.HTTPResponse, deadline: float) -> bytes:
    content = bytearray()
    while True:
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            raise TimeoutError
        if connection.sock is not None:
            connection.sock.settimeout(remaining)
        piece = response.read1(1 << 16)
        if not piece:
            break
        content += piece
        if len(content) > MAX_REPLY_BYTES:
            raise _Failed(Outcome.CRASHED, "the reply is endless")
    if response.status in _REFUSED_FOR_GOOD:
        raise ConfigError(
            f"the judge refuses the request: {response.status} {response.reason}: "
            f"{content[:200].decode(errors='replace')}; check url, model and api_key_variable of the judge"
        )
    if response.status != http.client.OK:
        raise _Failed(Outcome.CRASHED, f"the endpoint answers {response.status} {response.reason}")
    return bytes(content)


def _headers(kind: JudgeGrader) -> dict[str, str]:
    headers = {"Content-Type": "application/json"}
    if kind.api_key_variable is not None:
        key = os.environ.get(kind.api_key_variable)
        if not key:
            raise ConfigError(f"the judge's api_key_variable {kind.api_key_variable} is not set; export it")
        headers["Authorization"] = f"Bearer {key}"
    return headers


def _remembered(file: Path | None) -> str | None:
    if file is None:
        return None
    try:
        word = json.loads(file.read_text(encoding="utf-8"))["verdict"]
    except (OSError, ValueError, LookupError, TypeError):
        return None  # not asked yet; a file that is no verdict is written again
    return word if isinstance(word, str) else None


def _remember(file: Path | None, word: str) -> None:
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(file, json.dumps({"verdict": word}))
