"""The way of artifacts to Prefect: created once, updated after, never in the way of those who offer them."""

import threading
import time
import uuid

import pytest
from support.patience import wait_until

from luffy.tasks import artifacts as module
from luffy.tasks.artifacts import Artifact, Publisher, Slot

SLOT = Slot(uuid.uuid4(), "smoke-rl-progress")


class Records:
    """A writer that remembers, and does as it is told first."""

    def __init__(self, before=lambda: None):
        self.created, self.updated, self.written_at, self.asked = [], [], [], 0
        self.before = before

    def __call__(self, slot, artifact, identifier):
        self.asked += 1
        self.before()
        self.written_at.append(time.monotonic())
        if identifier is None:
            self.created.append((slot.key, artifact.data))
            return uuid.uuid4()
        self.updated.append(artifact.data)
        return identifier


def percent(value):
    return lambda: Artifact("progress", value, "")


def test_a_slot_is_created_once_and_updated_from_then_on():
    records = Records()
    with Publisher(records) as publisher:
        publisher.offer(SLOT, percent(1.0))
        wait_until(lambda: records.created)
        publisher.offer(SLOT, percent(2.0))
        publisher.offer(Slot(SLOT.task_run, "other"), percent(3.0))
    assert records.created == [("smoke-rl-progress", 1.0), ("other", 3.0)]
    assert records.updated == [2.0]


def test_between_two_writes_only_the_newest_offer_counts_and_the_last_one_is_written_at_the_end(monkeypatch):
    monkeypatch.setattr(module, "_REST_S", 60.0)
    records = Records()
    with Publisher(records) as publisher:
        publisher.offer(SLOT, percent(0.0))
        wait_until(lambda: records.created)
        for value in range(1, 500):
            publisher.offer(SLOT, percent(float(value)))
        publisher.offer(SLOT, percent(500.0))
    assert records.updated == [500.0]


def test_nothing_is_written_as_long_as_there_is_nothing_to_show():
    records = Records()
    with Publisher(records) as publisher:
        publisher.offer(SLOT, lambda: None)
    assert records.created == [] and not records.asked


def test_a_view_or_an_api_that_raises_costs_artifacts_and_nothing_else():
    def fail():
        raise RuntimeError("no such file, or no such server")

    records = Records(before=fail)
    with Publisher(records) as publisher:
        publisher.offer(SLOT, percent(1.0))
        publisher.offer(Slot(SLOT.task_run, "other"), fail)
    assert records.asked and not records.created


@pytest.mark.parametrize("newer", [None, 100.0])
def test_the_last_artifact_survives_a_hiccup_of_the_api(monkeypatch, newer):
    monkeypatch.setattr(module, "_PAUSE_AFTER_FAILURE_S", 0.1)
    hiccups = [True]

    def fail_once():
        if hiccups:
            hiccups.pop()
            raise ConnectionError("the server is starting again")

    records = Records(before=fail_once)
    with Publisher(records) as publisher:
        publisher.offer(SLOT, percent(99.0))
        wait_until(lambda: not hiccups)
        if newer:
            publisher.offer(SLOT, percent(newer))
        wait_until(lambda: records.created)
    assert records.created == [("smoke-rl-progress", newer or 99.0)]
    assert records.updated == []


def test_an_api_that_hangs_holds_up_neither_the_offers_nor_the_end(monkeypatch):
    monkeypatch.setattr(module, "_CLOSE_S", 0.2)
    answer = threading.Event()
    with Publisher(Records(before=answer.wait)) as publisher:
        for value in range(1000):
            publisher.offer(SLOT, percent(float(value)))
    answer.set()  # not before: whoever waited for it would wait for ever


def test_dear_views_are_made_less_often(monkeypatch):
    """A view of 20 ms rests for a second: under 2 % of a core."""
    monkeypatch.setattr(module, "_REST_S", 0.0)

    def dear():
        until = time.thread_time() + 0.02
        while time.thread_time() < until:
            pass
        return Artifact("progress", 1.0, "")

    records = Records()
    with Publisher(records) as publisher:
        publisher.offer(SLOT, dear)
        wait_until(lambda: records.created)
        publisher.offer(SLOT, dear)
        wait_until(lambda: records.updated)
    first, second = records.written_at
    assert second - first > 0.9


@pytest.mark.parametrize("slots", [1, 5])
def test_the_end_waits_for_what_is_on_its_way(slots):
    records = Records(before=lambda: time.sleep(0.05))
    with Publisher(records) as publisher:
        for index in range(slots):
            publisher.offer(Slot(SLOT.task_run, f"view-{index}"), percent(1.0))
    assert len(records.created) == slots
