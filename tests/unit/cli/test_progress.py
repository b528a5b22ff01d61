import pytest

from luffy.cli.progress import StageLine
from luffy.pipeline.events import Event


def progress(step, time, **metrics):
    return Event("progress", time, 1, step=step, total=100, metrics=metrics)


def test_time_left_follows_the_pace_of_this_attempt():
    line = StageLine("rl")
    line.take(progress(41, 10.0))
    assert line.seconds_left is None
    line.take(progress(51, 30.0))
    assert line.seconds_left == pytest.approx(2.0 * 49)


def test_metrics_that_are_shown_are_kept_from_event_to_event():
    line = StageLine("rl")
    line.take(progress(1, 0.0, loss=2.0, reward=0.5, entropy=9.0))
    line.take(progress(2, 1.0, loss=1.0))
    assert line.metrics == {"loss": 1.0, "reward": 0.5}


def test_a_message_is_news_until_the_next_progress():
    line = StageLine("rl")
    line.take(Event("started", 0.0, 1))
    line.take(Event("message", 1.0, 1, text="http://host: slow down; asking again in 300 s"))
    assert line.news == line.note != ""
    line.take(progress(1, 2.0))
    assert line.news == ""


def test_a_waiting_stage_says_for_whom_until_it_starts():
    line = StageLine("rl")
    line.take(Event("waiting", 0.0, 1, text="pid 17 on host"))
    assert (line.state, line.note) == ("waiting", "waiting for pid 17 on host")
    line.take(Event("started", 1.0, 1))
    assert (line.state, line.note) == ("running", "")
