import json
import os

from hypothesis import given
from hypothesis import strategies as st

from luffy.pipeline.events import Event, EventReader, EventWriter, seconds_of_attempts


def test_events_are_read_as_written(tmp_path):
    writer = EventWriter(tmp_path / "events.jsonl")
    writer.started("from step 3")
    writer.progress(4, 10, loss=0.5, reward=1.0)
    writer.tell("failed", "no space")
    started, progress, failed = EventReader(tmp_path / "events.jsonl").read()
    assert (started.kind, started.text, failed.kind, failed.text) == ("started", "from step 3", "failed", "no space")
    assert (progress.kind, progress.step, progress.total) == ("progress", 4, 10)
    assert progress.metrics == {"loss": 0.5, "reward": 1.0}


def test_progress_is_written_four_times_a_second_and_always_first_and_last(tmp_path):
    now = [0.0]
    writer = EventWriter(tmp_path / "e", clock=lambda: now[0])
    for step in range(1, 101):
        writer.progress(step, 100)
        now[0] += 0.01
    steps = [event.step for event in EventReader(tmp_path / "e").read()]
    assert steps == [1, 26, 51, 76, 100]


def test_reader_returns_only_new_and_complete_events(tmp_path):
    path = tmp_path / "events.jsonl"
    reader = EventReader(path)
    assert reader.read() == []
    EventWriter(path).message("one")
    assert [event.text for event in reader.read()] == ["one"]
    with path.open("a") as file:
        file.write('{"kind": "message", "time": 1, "pid": 1')
    assert reader.read() == []
    with path.open("a") as file:
        file.write(', "text": "two"}\n{"kind": "progress", "ti')
    assert [event.text for event in reader.read()] == ["two"]
    later = EventReader(path, from_end=True)
    EventWriter(path).message("after a kill")  # which has torn the line before
    assert [event.text for event in reader.read()] == [event.text for event in later.read()] == ["after a kill"]


def test_an_attempt_lasts_until_its_own_last_event_and_goes_on_with_earlier_ones(tmp_path):
    now = [100.0]
    writer = EventWriter(tmp_path / "e", clock=lambda: now[0])
    assert seconds_of_attempts([]) == 0.0
    writer.started(earlier_s=7.0)
    now[0] += 20.0
    writer.progress(4, 10)
    events = EventReader(tmp_path / "e").read()
    others = [Event("waiting", now[0] + 500.0, pid) for pid in (os.getpid(), os.getpid() + 1)]
    assert seconds_of_attempts([*events, *others]) == 27.0
    failed, reused = (Event(kind, now[0] + later, os.getpid()) for kind, later in (("failed", 1.0), ("finished", 9.0)))
    assert seconds_of_attempts([*events, failed, reused]) == 28.0  # in containers every process may have this pid
    assert seconds_of_attempts([*events, Event("started", 900.0, 1)]) == 0.0  # has cleared what was there


@given(st.text())
def test_any_text_stays_on_one_line(tmp_path_factory, text):
    path = tmp_path_factory.mktemp("events") / "e"
    EventWriter(path).message(text)
    lines = path.read_bytes().split(b"\n")
    assert len(lines) == 2
    assert json.loads(lines[0])["text"] == text
