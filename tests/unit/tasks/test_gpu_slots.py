"""Slots of Prefect's GPU limit: waited for while taken, and given up when Prefect is at fault."""

from contextlib import contextmanager, nullcontext

import httpx
import pytest
from prefect.concurrency.asyncio import ConcurrencySlotAcquisitionError

from luffy.errors import ConfigError
from luffy.tasks import stages as slots


class Limit:
    """A Prefect server with one limit of two slots; `refusals` are raised, one for each attempt to take slots."""

    def __init__(self, *refusals, lost=False):
        self.refusals = list(refusals)
        self.lost = lost
        self.held = 0
        self.limit, self.active_slots, self.active = 2, 0, True

    def read_global_concurrency_limit_by_name(self, name):
        return self

    @contextmanager
    def concurrency(self, name, *, occupy, **options):
        if self.refusals:
            raise ConcurrencySlotAcquisitionError("Unable to acquire") from self.refusals.pop(0)
        self.held += occupy
        yield
        self.held -= occupy
        if self.lost:
            raise ConnectionError("the server is gone")


def locked():
    answer = httpx.Response(httpx.codes.LOCKED, request=httpx.Request("POST", "http://prefect"))
    return httpx.HTTPStatusError("locked", request=answer.request, response=answer)


def hold(monkeypatch, limit, wanted=1):
    """What the stage is told while it waits, and the slots that it holds when it runs."""
    monkeypatch.setattr(slots, "get_client", lambda **options: nullcontext(limit))
    monkeypatch.setattr(slots, "concurrency", limit.concurrency)
    monkeypatch.setattr(slots, "pause", lambda stopped: None)
    told: list[str] = []
    with slots.gpu_slots(wanted, told.append, lambda: False):
        return told, limit.held


def test_slots_are_held_while_the_stage_runs(monkeypatch):
    limit = Limit()
    assert hold(monkeypatch, limit, wanted=2) == ([], 2)
    assert limit.held == 0


def test_slots_taken_by_others_are_waited_for(monkeypatch):
    told, held = hold(monkeypatch, Limit(locked(), locked()))
    assert held == 1
    assert told == ["a slot of Prefect's limit 'gpu'"]


def test_a_stage_runs_without_slots_when_prefect_is_at_fault(monkeypatch, caplog):
    assert hold(monkeypatch, Limit(ConnectionError("refused"))) == ([], 0)
    assert "the stage goes on without a slot" in caplog.text


def test_a_server_that_is_gone_at_the_end_costs_no_finished_stage(monkeypatch):
    assert hold(monkeypatch, Limit(lost=True)) == ([], 1)


def test_more_slots_than_the_limit_has_are_refused(monkeypatch):
    with pytest.raises(ConfigError, match="takes 3 GPUs, and Prefect's limit 'gpu' has 2 slots"):
        hold(monkeypatch, Limit(), wanted=3)


def test_an_unreadable_limit_is_no_limit(monkeypatch, caplog):
    def unreachable(name):
        raise httpx.ConnectError("refused")

    limit = Limit()
    limit.read_global_concurrency_limit_by_name = unreachable
    assert hold(monkeypatch, limit) == ([], 0)
    assert "could not be read" in caplog.text
