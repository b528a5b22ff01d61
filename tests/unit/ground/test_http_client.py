"""How long a client waits before it repeats a request, and what it says of that."""

import asyncio
import logging
import re

import httpx
import pytest

from luffy.http_client import Answer, HTTPClient, NoAnswer, RequestLimits, retry_delay_s


def test_a_server_decides_how_long_to_wait_and_more_than_ten_minutes_are_too_long():
    for asks, least in ((None, 2.0), ("7", 7.0), ("soon", 2.0), ("600", 600.0), ("100000", 100_000.0)):
        answer = Answer(503, {}, asks)
        assert least <= retry_delay_s(2, answer) <= 1.25 * least, asks
        assert answer.asks_for_too_long is (least > 600), asks


def test_without_an_answer_the_delays_double_and_the_five_after_a_rate_limit_take_more_than_its_minute():
    assert all(0.5 * 2**attempt <= retry_delay_s(attempt) <= 0.625 * 2**attempt for attempt in range(6))
    assert sum(retry_delay_s(attempt, Answer(429, {})) for attempt in range(5)) > 60
    assert retry_delay_s(0, Answer(429, {}, "0.1")) < 0.2


def silence() -> NoAnswer:
    error = NoAnswer("http://host: no answer within 1800 s")
    error.__cause__ = TimeoutError()
    return error


WAITS = [
    (Answer(429, {"error": "slow"}, "300"), r"http://host: status 429: slow \(Retry-After: 300\); asking"),
    (silence(), "http://host: no answer within 1800 s; asking again in 1 s"),
    (Answer(503, {}, "0.1"), None),
    (NoAnswer("http://host: no answer (broken pipe)"), None),
    (None, None),
]


@pytest.mark.parametrize(("failure", "said"), WAITS)
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
    assert len(messages) == (said is not None) and all(re.match(said, message) for message in messages), messages


KEY = "sk-a/b0123456789"


@pytest.mark.parametrize("body", ["x" * 190 + KEY, '{"error": "no such key sk-a\\/b0123456789"}'])
def test_a_key_is_hidden_where_an_answer_is_cut_within_it_and_where_json_writes_it_otherwise(body):
    async def ask() -> Answer:
        client = HTTPClient("http://host", KEY, RequestLimits(1.0, 1.0))
        transport = httpx.MockTransport(lambda request: httpx.Response(401, text=body))
        client._http = httpx.AsyncClient(base_url="http://host", transport=transport)
        return await client.ask("/v1")

    complaint = asyncio.run(ask()).complaint
    assert "***" in complaint and "sk-a" not in complaint
