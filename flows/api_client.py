"""Requests to the REST interface of the Prefect server that `luffy serve` starts."""

from typing import Any

import httpx

from luffy.flows.basic_auth import authorization

_TIMEOUT_S = 300.0
"""Long, since the server is on this machine: it does not disappear, but on a machine that trains it may wait minutes
for a core."""


class ApiClient:
    """Asks the API at `url` as this process; every method raises httpx.HTTPError."""

    def __init__(self, url: str) -> None:
        self._url = url

    def rows(self, table: str, filters: dict[str, Any] | None = None) -> list[dict[str, Any]]:
        """All rows of `table` (such as "flow_runs") that pass `filters`, read in as many pages as the server makes."""
        found: list[dict[str, Any]] = []
        while page := self._page(table, {**(filters or {}), "offset": len(found)}):
            found += page
        return found

    def ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> httpx.Response:
        """Send one request; the response may be an error of the server."""
        return httpx.request(method, f"{self._url}/{path}", json=body, headers=authorization(), timeout=_TIMEOUT_S)

    def _page(self, table: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        return self.ask("POST", f"{table}/filter", body).raise_for_status().json()
