"""How long a client waits before it repeats a request, and what it says of that."""

import asyncio
import logging
import re

import pytest

from luffy.http_client import Answer, HTTPClient, NoAnswer, RequestLimits, retry_delay_s


@pytest.mark.parametrize(
    ("asks", "least", "too_long"),
    [(None, 2.0, False), ("7", 7.0, False), ("soon", 2.0, False), ("600", 600.0, False), ("100000", 100_000.0, True)],
)
def test_a_server_decides_how_long_to_wait_and_more_than_ten_minutes_are_too_long(asks, least, too_long):
    answer = Answer(503, {}, asks)
    assert least <= retry_delay_s(2, answer) <= 1.25 * least
    assert answer.asks_for_too_long is too_long


def test_without_an_answer_the_delays_double():
    assert all(0.5 * 2**attempt <= retry_delay_s(attempt) <= 0.625 * 2**attempt for attempt in range(6))


def test_the_five_attempts_after_a_rate_limit_take_more_than_its_minute():
    assert sum(retry_delay_s(attempt, Answer(429, {})) for attempt in range(5)) > 60
    assert retry_delay_s(0, Answer(429, {}, "0.1")) < 0.2


def silence() -> NoAnswer:
    error = NoAnswer("http://host: no answer within 1800 s")
    error.__cause__ = TimeoutError()
    return error


@pytest.mark.parametrize(
    ("failure", "said"),
    [
        (Answer(429, {"error": "slow"}, "300"), r"http://host: status 429: slow \(Retry-After: 300\); asking"),
        (silence(), "http://host: no answer within 1800 s; asking again in 1 s"),
        (Answer(503, {}, "0.1"), None),
        (NoAnswer("http://host: no answer (broken pipe)"), None),
        (None, None),
    ],
)
def test_long_waits_are_said_once_for_all_requests_that_wait(failure, said, caplog, monkeypatch):
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    async def wait() -> None:
        client = HTTPClient("http://host", None, RequestLimits(1.0, 1.0))
        await asyncio.gather(client.pause(0, failure), client.pause(0, failure))
        await client.close()

    monkeypatch.setattr("luffy.http_client.asyncio.sleep", sleep)
    with caplog.at_level(logging.WARNING, logger="luffy.http_client"):
        asyncio.run(wait())
    assert len(slept) == 2
    messages = [record.getMessage() for record in caplog.records]
    if said is None:
        assert messages == []
    else:
        (message,) = messages
        assert re.match(said, message)
