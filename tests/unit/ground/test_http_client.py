"""How long a client waits before it repeats a request."""

import pytest

from luffy.http_client import Answer, retry_delay_s


@pytest.mark.parametrize(
    ("asks", "least", "most"), [(None, 2.0, 2.5), ("7", 7.0, 8.75), ("soon", 2.0, 2.5), ("86400", 600.0, 750.0)]
)
def test_a_server_decides_how_long_to_wait_up_to_ten_minutes(asks: str | None, least: float, most: float) -> None:
    assert least <= retry_delay_s(2, Answer(503, {}, asks)) <= most


def test_without_an_answer_the_delays_double() -> None:
    assert all(0.5 * 2**attempt <= retry_delay_s(attempt) <= 0.625 * 2**attempt for attempt in range(6))


def test_the_five_attempts_after_a_rate_limit_take_more_than_its_minute() -> None:
    assert sum(retry_delay_s(attempt, Answer(429, {})) for attempt in range(5)) > 60
    assert retry_delay_s(0, Answer(429, {}, "0.1")) < 0.2
