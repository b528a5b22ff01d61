"""The parts of a step's time add up to it, and each is counted once."""

import pytest

from luffy.report.cells import step_times_table
from luffy.tracking.metrics import MetricRow
from luffy.tracking.step_times import step_times

SFT = {"step": 1, "perf/step_s": 2.0, "perf/update_s": 1.5, "perf/tokens_per_s": 10.0}
RL = {
    **SFT, "perf/step_s": 10.0, "perf/trainer_idle_s": 6.0, "perf/weights_s": 0.5, "perf/generation_s": 5.0,
    "perf/grading_s": 2.0, "perf/batch_s": 0.25, "perf/reference_s": 0.75,
}  # fmt: skip
NOTHING = dict.fromkeys(("generation", "grading", "weights", "scoring", "update", "waiting", "other"), 0.0)


@pytest.mark.parametrize(
    ("row", "parts"),
    {
        "supervised": (SFT, {"update": 1.5, "other": 0.5}),
        "in turn": (
            RL,
            {"generation": 3.0, "grading": 2.0, "weights": 0.5, "scoring": 1.0, "update": 1.5, "waiting": 0.5,
             "other": 1.5},
        ),
        "ahead": (
            RL | {"perf/queue_depth": 1.0, "perf/generation_s": 9.0},
            {"weights": 0.5, "scoring": 1.0, "update": 1.5, "waiting": 5.5, "other": 1.5},
        ),
        "from the journal": (RL | {"perf/trainer_idle_s": 0.5}, {"weights": 0.5, "scoring": 1.0, "update": 1.5,
                                                                 "other": 7.0}),
    }.values(),
    ids=["supervised", "in turn", "ahead", "from the journal"],
)  # fmt: skip
def test_the_parts_add_up_to_the_step(row: MetricRow, parts: dict[str, float]) -> None:
    times = step_times([row])
    assert times is not None
    assert times.parts == pytest.approx(NOTHING | parts) and times.step_s == pytest.approx(row["perf/step_s"])


def test_rates_are_those_of_all_steps_together_and_the_start_is_that_of_all_attempts() -> None:
    slow = SFT | {"perf/step_s": 6.0, "perf/update_s": 4.5, "perf/tokens_per_s": 2.0, "perf/mfu": 0.1}
    fast = SFT | {"perf/mfu": 0.5}
    starts = [{"step": 0, "perf/start_s": 3.0}, {"step": 4, "perf/start_s": 4.0}]
    times = step_times([slow, fast], [*starts, slow, fast])
    assert times is not None
    assert (times.tokens_per_s, times.start_s) == (4.0, 7.0) and times.mfu == pytest.approx(0.2)
    assert ("MFU % of scoring and update", "20.0") in [
        (row[0], row[1]) for row in step_times_table({"rl": times}).texts
    ]
    assert step_times([{"step": 0, "val/accuracy": 0.5}]) is None
