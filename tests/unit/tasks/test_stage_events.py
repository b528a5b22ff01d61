"""Events of a running stage: how often, in which order, and without a server."""

import subprocess
import sys

import pytest
from prefect.events import Event

from luffy.cli.progress import StageLine
from luffy.flows.prefect_session import free_port
from luffy.tasks import stage_events
from luffy.tasks.stage_events import StageEvents

KEY = "0123456789abcdef"
ALONE = """
from luffy.cli.progress import StageLine
from luffy.tasks.stage_events import StageEvents

events, line = StageEvents("run"), StageLine("rl", step=1, total=2)
events.progressed("key", line)
events.ended("key", line, "finished")
print("went on", flush=True)
"""


@pytest.fixture
def emitted(monkeypatch):
    """The events that are emitted: name, resource, payload, and the event that each one follows."""
    events = []

    def emit(event, resource, payload, follows):
        events.append((event, resource["prefect.resource.id"], payload, follows))
        return Event(event=event, resource=resource, payload=payload)

    monkeypatch.setattr(stage_events, "emit_event", emit)
    return events


def test_progress_is_emitted_at_once_and_then_every_half_minute(emitted):
    times = iter([0.0, 1.0, 29.0, 30.0, 31.0, 60.0])
    events = StageEvents("run", clock=lambda: next(times))
    for step in range(6):
        events.progressed(KEY, StageLine("rl", step=step, total=8))
    assert [payload["step"] for _, _, payload, _ in emitted] == [0, 3, 5]


def test_the_end_is_always_emitted_and_follows_the_last_progress(emitted):
    events, line = StageEvents("run"), StageLine("rl", step=3, total=8)
    events.progressed(KEY, line)
    events.ended(KEY, line, "failed")
    (first, resource, progress, before), (second, same, end, follows) = emitted
    assert (first, second) == ("luffy.stage.progress", "luffy.stage.ended")
    assert resource == same == f"luffy.stage.{KEY}"
    assert progress == {"stage": "rl", "run": "run", "step": 3, "total": 8}
    assert end == {**progress, "outcome": "failed"}
    assert (before, follows.event) == (None, "luffy.stage.progress")


@pytest.mark.slow
def test_a_stage_goes_on_and_ends_without_a_server(tmp_path):
    environment = {"PREFECT_API_URL": f"http://127.0.0.1:{free_port()}/api", "PREFECT_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", ALONE], env=environment, capture_output=True, text=True, check=False, timeout=600
    )
    assert (done.returncode, done.stdout) == (0, "went on\n"), done.stderr
