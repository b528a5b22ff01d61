"""Endpoints that end with the test."""

from collections.abc import Callable, Iterator

import pytest
from synthetic.endpoint import Endpoint


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Endpoint]]:
    """Starts an endpoint; requests that fail for now are repeated at once."""
    monkeypatch.setattr("luffy.http_client._FIRST_DELAY_S", 0.01)
    running: list[Endpoint] = []

    def start(*arguments: object, **named: object) -> Endpoint:
        running.append(Endpoint(*arguments, **named))  # type: ignore[arg-type]
        return running[-1]

    yield start
    for endpoint in running:
        endpoint.close()
