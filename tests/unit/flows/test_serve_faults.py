"""`luffy serve` on a server that does not answer as it should."""

from types import SimpleNamespace
from uuid import UUID

import httpx
import pytest
from prefect.exceptions import ObjectNotFound

from luffy.flows import serve

ODD, KNOWN, CANCELLED = (UUID(int=number) for number in range(3))


class Client:
    """Answers with `error` when it is asked for the run ODD."""

    def __init__(self, status):
        request = httpx.Request("GET", "http://localhost")
        answer = httpx.HTTPStatusError("no", request=request, response=httpx.Response(status, request=request))
        self.error = ObjectNotFound(answer) if status == httpx.codes.NOT_FOUND else answer
        self.closed = {}

    def read_flow_run(self, run):
        if run == ODD:
            raise self.error
        return SimpleNamespace(state=SimpleNamespace(is_cancelling=lambda: run == CANCELLED))

    def set_flow_run_state(self, run, state, *, force):
        self.closed[run] = state.type.value


@pytest.mark.parametrize("status", [404, 503])
def test_a_run_that_cannot_be_closed_keeps_no_other_from_it(status):
    client = Client(status)
    serve._close(client, {ODD, KNOWN, CANCELLED})
    assert client.closed == {KNOWN: "CRASHED", CANCELLED: "CANCELLED"}
