"""When groups are generated, in turn with training or ahead of it; and a gap between engine and trainer."""

import logging
import threading
import time
from contextlib import AbstractContextManager, closing

import pytest
from support.patience import PATIENCE_S, wait_until
from synthetic.trajectories import row_of

from luffy.errors import NumericalError
from luffy.rl.loop import Generation, LogpGapCheck, StepPlan, suspicious_gap
from luffy.rl.rows import BusyTime
from luffy.types import Group

LAST = 6


class Recorder:
    """An experience and a cluster at once that write down what is asked of them, in order."""

    def __init__(self, journalled: int = 0) -> None:
        self.trace: list[tuple[str, int]] = []
        self.version = 0
        self.hold = threading.Event()
        self.hold.set()
        self.fails_at: int | None = None
        self._journalled = journalled
        self.engine = None

    def plan(self, step: int) -> StepPlan:
        self._note("plan", step)
        kept = [_group(version=step - 1)] if step <= self._journalled else None
        return StepPlan(step, (), kept)

    def generate(self, plan: StepPlan, engine: object) -> list[Group]:
        if plan.journalled is not None:
            return list(plan.journalled)
        began = self.version
        self._note("generate", plan.step)
        assert self.hold.wait(PATIENCE_S)
        if plan.step == self.fails_at:
            raise ValueError("no such rollout")
        return [_group(version=began)]

    def commit(self, plan: StepPlan, groups: list[Group]) -> None:
        self._note("commit", plan.step)

    def grading_s(self) -> float:
        return 0.0

    def publish(self, version: int) -> None:
        self._note("publish", version)
        self.version = version

    def metrics(self) -> dict[str, float]:
        return {}

    def _note(self, what: str, step: int) -> None:
        self.trace.append((what, step))


def _group(version: int) -> Group:
    return Group("a", (row_of(weight_version=(version,)),))


def _opened(recorder: Recorder, max_staleness: int) -> AbstractContextManager[Generation]:
    return closing(Generation(recorder, recorder, max_staleness, LAST))  # type: ignore[arg-type]


def _versions(recorder: Recorder, max_staleness: int) -> list[int]:
    """The version behind the groups of each step of a whole run."""
    found = []
    with _opened(recorder, max_staleness) as generation:
        for step in range(1, LAST + 1):
            groups, _ = generation.take(step)
            found.append(groups[0].trajectories[0].weight_version[0])
    return found


def test_without_staleness_each_step_is_rolled_out_with_the_weights_before_it() -> None:
    recorder = Recorder()
    assert _versions(recorder, 0) == [0, 1, 2, 3, 4, 5]
    assert recorder.trace[:8] == [
        ("plan", 1), ("publish", 0), ("generate", 1), ("commit", 1),
        ("plan", 2), ("publish", 1), ("generate", 2), ("commit", 2),
    ]  # fmt: skip


@pytest.mark.parametrize("max_staleness", [1, 2, 4, 9])
def test_rollouts_lag_by_the_bound_and_no_more(max_staleness: int) -> None:
    recorder = Recorder()
    lags = [step - 1 - version for step, version in enumerate(_versions(recorder, max_staleness), start=1)]
    assert max(lags) <= max_staleness
    for what in ("plan", "commit"):
        assert [step for name, step in recorder.trace if name == what] == list(range(1, LAST + 1))


def test_the_next_step_is_generated_while_the_trainer_has_the_last() -> None:
    recorder = Recorder()
    with _opened(recorder, 1) as generation:
        generation.take(1)
        wait_until(lambda: ("generate", 2) in recorder.trace)  # nobody has asked for step 2 yet
        assert ("plan", 3) not in recorder.trace  # it might come back two steps too old


def test_journalled_steps_are_given_back_and_nothing_is_published_for_them() -> None:
    recorder = Recorder(journalled=3)
    with _opened(recorder, 0) as generation:
        for step in range(1, 4):
            generation.take(step)
        assert not {"publish", "generate"} & {what for what, _ in recorder.trace}
        generation.take(4)
    assert ("publish", 3) in recorder.trace and ("generate", 4) in recorder.trace


@pytest.mark.parametrize("max_staleness", [0, 2])
def test_a_failure_of_generation_reaches_the_step_that_needs_it(max_staleness: int) -> None:
    recorder = Recorder()
    recorder.fails_at = 2
    with _opened(recorder, max_staleness) as generation:
        generation.take(1)
        with pytest.raises(ValueError, match="no such rollout"):
            generation.take(2)


def test_steps_that_wait_for_the_trainer_are_counted() -> None:
    recorder = Recorder()
    with _opened(recorder, 2) as generation:
        generation.take(1)
        wait_until(lambda: all(future.done() for _, future in generation._running.values()))
        recorder.hold.clear()  # step 4, which may begin now, is not ready
        _, metrics = generation.take(2)
        recorder.hold.set()
    assert metrics["perf/queue_depth"] == 2.0


def test_busy_time_counts_what_overlaps_once() -> None:
    busy = BusyTime()
    with busy.measured(), busy.measured():
        time.sleep(0.05)
    time.sleep(0.05)
    elapsed, worked = busy.since_last()
    assert 0.05 <= worked < elapsed
    assert busy.since_last()[1] == 0.0


def _checked(check: LogpGapCheck, *gaps: float | None) -> None:
    for gap in gaps:
        check.check({} if gap is None else {"rollout/logp_gap_mean": gap})


def test_a_gap_above_its_bound_ends_the_stage() -> None:
    check = LogpGapCheck(0.2, None)
    _checked(check, 0.2)
    with pytest.raises(NumericalError, match=r"is 0\.2100, above execution\.max_logp_gap 0\.2"):
        _checked(check, 0.21)


@pytest.mark.parametrize(
    ("dtype", "max_staleness", "gaps", "warned"),
    [
        ("float32", 0, [0.02], [0.02]),
        ("float32", 0, [0.002, None], []),
        ("bfloat16", 0, [0.05], []),
        ("bfloat16", 0, [0.2], [0.2]),
        ("float32", 1, [0.2], []),
        # The same gap is told of once, and again when it has doubled.
        ("float32", 0, [0.02, 0.03, 0.039, 0.041, 0.08, 0.005], [0.02, 0.041]),
    ],
)
def test_a_gap_that_no_kernel_explains_is_told_of(dtype, max_staleness, gaps, warned, caplog):
    with caplog.at_level(logging.WARNING):
        _checked(LogpGapCheck(None, suspicious_gap(dtype, max_staleness)), *gaps)
    assert [record.args for record in caplog.records] == [(gap,) for gap in warned]
