"""When groups are generated, in turn with training or ahead of it; which of them are kept, and which rows are shown to
people; a gap between engine and trainer."""

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, closing

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.patience import PATIENCE_S, wait_until
from synthetic.trajectories import row_of

from luffy.config.group import DropZeroVariance, DynamicSampling, GlobalBatchAdvantage, GroupMeanAdvantage
from luffy.errors import NumericalError
from luffy.rl.groups import kept_groups, needs_more, sample_rollouts
from luffy.rl.loop import Generation, LogpGapCheck, StepPlan, suspicious_gap
from luffy.rl.rows import BusyTime
from luffy.training.batching import row_advantages
from luffy.types import FinishReason, Group, Source, Start

LAST = 6


class Recorder:
    """An experience and a cluster at once that write down what is asked of them, in order."""

    def __init__(self, journalled: int = 0, fails_at: int | None = None) -> None:
        self.journalled, self.fails_at = journalled, fails_at
        self.trace: list[tuple[str, int]] = []
        self.version, self.engine, self.hold = 0, None, threading.Event()
        self.hold.set()

    def plan(self, step: int) -> StepPlan:
        self.trace.append(("plan", step))
        return StepPlan(step, (), [_group(version=step - 1)] if step <= self.journalled else None)

    def generate(self, plan: StepPlan, engine: object) -> list[Group]:
        began = self.version
        self.trace.append(("generate", plan.step))
        assert self.hold.wait(PATIENCE_S)
        if plan.step == self.fails_at:
            raise ValueError("no such rollout")
        return [_group(version=began)]

    def commit(self, plan: StepPlan, groups: list[Group]) -> None:
        self.trace.append(("commit", plan.step))

    def grading_s(self) -> float:
        return 0.0

    def publish(self, version: int) -> None:
        self.trace.append(("publish", version))
        self.version = version

    def metrics(self) -> dict[str, float]:
        return {}


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
    with _opened(Recorder(fails_at=2), max_staleness) as generation:
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


# ---- which groups are kept ----

DROP = DropZeroVariance(kind="drop_zero_variance")
REFILL = DynamicSampling(kind="dynamic_sampling", max_rounds=3)


def _rewarded(uid: str, *rewards: float, trace: float | None = None) -> Group:
    traces = () if trace is None else (row_of(trace, source=Source.OFF_POLICY),)
    return Group(uid, (*map(row_of, rewards), *traces))


SILENT, SPEAKING, SOLVED = (_rewarded("s", *rewards) for rewards in ((0.0, 0.0), (0.0, 1.0), (1.0, 1.0)))
GUIDED, USELESS = _rewarded("guided", 0.0, 0.0, trace=1.0), _rewarded("no use", 1.0, trace=1.0)


@pytest.mark.parametrize(
    ("groups", "kind", "wanted", "kept"),
    [
        ([SILENT, SPEAKING, SOLVED], None, 1, [SILENT, SPEAKING, SOLVED]),
        ([SILENT, SPEAKING, SOLVED], DROP, 1, [SPEAKING]),
        ([SILENT], DROP, 1, []),
        # A right trace beside wrong rollouts is a signal.
        ([GUIDED, USELESS], DROP, 2, [GUIDED]),
        ([SPEAKING, SILENT, GUIDED, SPEAKING], REFILL, 2, [SPEAKING, GUIDED]),
    ],
)
def test_silent_groups_leave_where_that_is_asked_for(groups, kind, wanted, kept):
    assert kept_groups(groups, kind, wanted) == kept
    assert kind is REFILL or not needs_more([SILENT], kind, wanted, rounds_done=1)


@given(st.lists(st.sampled_from([SILENT, SPEAKING, GUIDED]), max_size=8), st.integers(1, 4))
def test_refill_stops_exactly_when_it_has_what_it_wanted(groups: list[Group], wanted: int) -> None:
    complete = len(kept_groups(groups, REFILL, wanted)) == wanted
    assert needs_more(groups, REFILL, wanted, rounds_done=1) is not complete
    assert not needs_more(groups, REFILL, wanted, rounds_done=3), "its rounds are over"


# ---- rows that are shown to people ----

REFERENCES = {"a": "5", "b": "6", "c": "7", "secret": None}


MEAN = GroupMeanAdvantage(kind="group_mean", population="joint", scale_by_std=False)


def _shown(groups: Sequence[Group], count: int, advantage=MEAN, references: Mapping[str, str | None] = REFERENCES):
    def spelled(ids: Sequence[int]) -> str:
        return " ".join(map(str, ids))

    return sample_rollouts(groups, advantage, count, spelled, spelled, references)


def test_a_row_of_each_group_is_shown_and_none_of_a_confidential_prompt() -> None:
    found = _shown([_rewarded(uid, 1.0, 1.0) for uid in ("a", "secret", "b", "c")], 2)
    assert [(each.uid, each.prompt, each.response, each.reference) for each in found] == [
        ("a", "1", "2", "5"), ("b", "1", "2", "6"),
    ]  # fmt: skip
    groups = [_rewarded("a", 1.0, 1.0), _rewarded("secret", 0.0, 0.0)]
    whole_batch = GlobalBatchAdvantage(kind="global_batch", population="joint", group_baseline=False)
    (one,) = _shown(groups, 2, whole_batch)
    assert one.advantage == row_advantages(groups, whole_batch)[0] > 0, "over the confidential prompt, too"


def test_a_sample_of_a_failed_group_has_no_advantage_and_one_under_a_hint_says_which() -> None:
    failed = row_of(finish_reason=FinishReason.ENVIRONMENT_ERROR)
    hinted = row_of(1.0, source=Source.HINTED, start=Start("scaffold", 0.5, "first step"))
    (lost,) = _shown([Group("a", (), failed=(failed,))], 1, references={})
    (sample,) = _shown([Group("a", (row_of(1.0), hinted))], 1, references={})
    assert (lost.uid, lost.advantage) == ("a", None)
    assert (sample.start, sample.dose, sample.hint) == ("scaffold", 0.5, "first step")
    assert sample.source == "off_policy"
