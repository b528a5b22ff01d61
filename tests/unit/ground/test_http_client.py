"""How long a client waits before it repeats a request."""

import pytest

from luffy.http_client import retry_delay_s


@pytest.mark.parametrize(
    ("asks", "least", "most"), [(None, 2.0, 2.5), ("7", 7.0, 8.75), ("soon", 2.0, 2.5), ("86400", 600.0, 750.0)]
)
def test_a_server_decides_how_long_to_wait_up_to_ten_minutes(asks: str | None, least: float, most: float) -> None:
    assert least <= retry_delay_s(2, asks) <= most
