"""Times of the parts of training, and how well they use the device."""

import pytest

from luffy.training import update_metrics
from luffy.training.ranks import init_process_group
from luffy.training.update_metrics import PartTimes


@pytest.fixture(autouse=True)
def a_group_of_one() -> None:
    init_process_group()


def times_of(flops: float, **seconds: float) -> PartTimes:
    times = PartTimes()
    times.count(flops)
    times.seconds = dict(seconds)
    return times


def test_a_part_that_comes_twice_is_added_up() -> None:
    times = PartTimes()
    with times.part("update"):
        pass
    first = times.seconds["update"]
    with times.part("update"):
        pass
    assert times.seconds["update"] > first > 0


def test_without_a_known_peak_the_speed_is_told_and_no_share() -> None:
    metrics = times_of(6e12, logp_old=1.0, update=2.0).metrics()
    assert metrics == {
        "perf/logp_old_s": 1.0,
        "perf/update_s": 2.0,
        "perf/model_tflops": pytest.approx(2.0),
    }


def test_mfu_is_the_share_of_the_peak_over_all_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(update_metrics, "device_peak", lambda: 8e12)
    assert times_of(6e12, logp_old=1.0, update=2.0).metrics()["perf/mfu"] == pytest.approx(0.25)


def test_a_model_that_is_not_counted_has_times_alone() -> None:
    assert times_of(0.0, update=2.0).metrics() == {"perf/update_s": 2.0}
