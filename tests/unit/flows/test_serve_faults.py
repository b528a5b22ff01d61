"""`luffy serve` on a server that does not answer as it should."""

import httpx
import pytest

from luffy.flows import serve


class Api:
    """Does not know the run `deleted`, and answers with an error page when it is asked for `broken`."""

    def __init__(self):
        self.closed = {}

    def ask(self, method, path, body=None):
        _, run, *_ = path.split("/")
        request = httpx.Request(method, f"http://localhost/{path}")
        if run == "deleted":
            return httpx.Response(404, json={"detail": "not found"}, request=request)
        if run == "broken":
            return httpx.Response(503, text="overloaded", request=request)
        if body is not None:
            self.closed[run] = body["state"]["type"]
        return httpx.Response(200, json={"state_type": "RUNNING"}, request=request)


@pytest.mark.parametrize("unanswered", ["deleted", "broken"])
def test_a_run_that_cannot_be_closed_keeps_no_other_from_it(unanswered):
    api = Api()
    serve._close(api, {unanswered, "known"})
    assert api.closed == {"known": "CRASHED"}
