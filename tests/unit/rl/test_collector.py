"""Groups: rollouts first, then guided rows, then a replayed row; everything but the last is graded."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from patience import PATIENCE_S

from luffy.config.objective import GroupConfig
from luffy.grading.pool import GraderPool
from luffy.rl.collector import GroupCollector
from luffy.rl.tasks import Demonstration, RolloutTask
from luffy.rollout.engine import Completion, RolloutRequest, SamplingParams
from luffy.types import FinishReason, Group, Outcome, Source, Trajectory

RIGHT, WRONG = 1, 2
"""Tokens that the decoder below reads as the answer 7 and as another."""


class Parrot:
    """An engine that says `script[i]` to its i-th request (in a circle) and remembers what it was asked."""

    def __init__(self, script: Sequence[int] = (RIGHT,)) -> None:
        self.requests: list[RolloutRequest] = []
        self._script = script

    def generate(self, requests: Sequence[RolloutRequest], params: SamplingParams) -> list[Completion]:
        self.requests += requests
        return [
            Completion(
                (self._script[i % len(self._script)], 3), (-0.5, -0.25), FinishReason.STOP, weight_versions=(6, 6)
            )
            for i in range(len(requests))
        ]

    def close(self) -> None: ...


def _decode(ids: Sequence[int]) -> str:
    return r"\boxed{7}" if RIGHT in ids else r"\boxed{8}"


def _collect(
    tasks: list[RolloutTask], step: int = 1, script: Sequence[int] = (RIGHT,), earlier: Sequence[str] = (), **group
) -> tuple[Parrot, list[Group]]:
    engine = Parrot(script)
    config = GroupConfig.model_validate({"size": 4, "off_policy": 1} | group)
    with GraderPool(1, PATIENCE_S) as grader:
        collector = GroupCollector(grader, _decode, SamplingParams(1.0, 8, ()), config, seed=0, total_steps=10)
        return engine, collector.collect(engine, tasks, step, earlier)


def _task(uid: str, answer: str, *traces: str, replayed: Trajectory | None = None) -> RolloutTask:
    return RolloutTask(uid, (5, 6), answer, tuple(Demonstration(text, (8, 9), None) for text in traces), replayed)


def _outcomes(group: Group) -> list[Outcome]:
    return [row.outcome for row in group.trajectories]


def test_a_demonstration_takes_a_row_of_the_group_and_is_graded_not_assumed() -> None:
    engine, groups = _collect([_task("right", "7", r"\boxed{7}"), _task("wrong", "7", r"\boxed{8}")])
    assert len(engine.requests) == 6
    for group, outcome in zip(groups, (Outcome.CORRECT, Outcome.WRONG), strict=True):
        assert [row.is_off_policy for row in group.trajectories] == [False, False, False, True]
        assert group.trajectories[-1].outcome is outcome
        assert group.trajectories[-1].source == (Source.OFF_POLICY,) * 2
        assert [row.reward for row in group.trajectories[:3]] == [1.0] * 3
        assert group.trajectories[0].weight_version == (6, 6)


def test_a_prompt_without_a_trace_is_topped_up_with_a_rollout() -> None:
    engine, (with_trace, without) = _collect([_task("a", "7", r"\boxed{7}"), _task("b", "7")])
    assert len(engine.requests) == 7
    assert len(with_trace.trajectories) == len(without.trajectories) == 4
    assert not any(row.is_off_policy for row in without.trajectories)


def test_seeds_differ_between_samples_and_steps_and_repeat_for_the_same_step() -> None:
    first, _ = _collect([_task("a", "7"), _task("b", "7")], step=1)
    again, _ = _collect([_task("a", "7"), _task("b", "7")], step=1)
    later, _ = _collect([_task("a", "7"), _task("b", "7")], step=2)
    seeds = [request.seed for request in first.requests]
    assert len(set(seeds)) == 8
    assert seeds == [request.seed for request in again.requests]
    assert not set(seeds) & {request.seed for request in later.requests}


def test_a_prompt_that_comes_twice_in_a_step_is_sampled_anew() -> None:
    engine, _ = _collect([_task("a", "7"), _task("a", "7")])
    assert len({request.seed for request in engine.requests}) == 8


def test_a_prompt_of_an_earlier_round_of_the_step_is_sampled_anew() -> None:
    one_round, _ = _collect([_task("a", "7"), _task("b", "7"), _task("a", "7")])
    second, _ = _collect([_task("a", "7")], earlier=["a", "b"])
    assert [request.seed for request in second.requests] == [request.seed for request in one_round.requests[8:]]


FALLING = {"kind": "linear", "start": 1.0, "end": 0.0}
WHOLE_THEN_NOTHING = {"length": {"kind": "uniform", "low": FALLING, "high": FALLING}}
HALF = {"length": {"kind": "uniform", "low": 0.5, "high": 0.5}}
ANY = {"length": {"kind": "uniform", "low": 0.0, "high": 1.0}}


def _known(uid: str, *token_ids: int) -> RolloutTask:
    guide = Demonstration(r"\boxed{7}", token_ids, tuple(-0.1 * (1 + i) for i in range(len(token_ids))))
    return RolloutTask(uid, (5, 6), "7", (guide,))


def test_a_hybrid_row_is_the_start_of_a_trace_and_what_the_policy_says_behind_it() -> None:
    engine, (group,) = _collect([_known("a", 20, 21, 22, 23)], script=(WRONG, WRONG, WRONG, RIGHT), prefix=HALF)
    row = group.trajectories[-1]
    assert engine.requests[-1].prefix_ids == (20, 21)
    assert row.response_ids == (20, 21, RIGHT, 3)
    assert row.source == (Source.OFF_POLICY,) * 2 + (Source.ON_POLICY,) * 2
    assert row.logp_behavior == (-0.1, -0.2, -0.5, -0.25)
    assert row.weight_version == (-1, -1, 6, 6)
    assert _outcomes(group) == [Outcome.WRONG] * 3 + [Outcome.CORRECT]
    assert len(group.rollouts) == 3


def test_a_hybrid_row_is_graded_as_one_text() -> None:
    """The answer that counts is said in the prefix, which the policy's own words alone would not show."""
    _, (group,) = _collect([_known("a", RIGHT, 21, 22, 23)], script=(WRONG,), prefix=HALF)
    assert group.trajectories[-1].is_correct


def test_a_prefix_never_holds_the_stop_token_and_an_empty_one_makes_a_rollout() -> None:
    engine, (whole,) = _collect([_known("a", 20, 21)], prefix=WHOLE_THEN_NOTHING)
    assert len(engine.requests) == 4
    assert engine.requests[-1].prefix_ids == (20,)
    assert whole.trajectories[-1].response_ids == (20, RIGHT, 3)
    _, (nothing_given,) = _collect([_known("a", 21)], prefix=WHOLE_THEN_NOTHING)
    assert len(nothing_given.rollouts) == 4
    engine, (empty,) = _collect([_known("a", 20, 21)], step=10, prefix=WHOLE_THEN_NOTHING)
    assert len(engine.requests) == 4
    assert len(empty.rollouts) == 4


def test_one_trace_may_guide_every_row_and_shared_rows_are_given_the_same() -> None:
    traces = tuple(Demonstration("", tuple(range(start, start + 50)), None) for start in (100, 200))
    task = RolloutTask("a", (5, 6), "7", traces)
    engine, (group,) = _collect([task], off_policy=4, prefix=ANY | {"shared": True})
    assert len(group.trajectories) == 4
    assert len({request.prefix_ids for request in engine.requests}) == 1
    assert len({request.seed for request in engine.requests}) == 4
    engine, _ = _collect([task], off_policy=4, prefix=ANY)
    assert len({request.prefix_ids for request in engine.requests}) == 4
    assert {request.prefix_ids[0] // 100 for request in engine.requests} == {1, 2}


def test_a_prompt_without_a_trace_has_rollouts_in_place_of_hybrid_rows() -> None:
    _, (group,) = _collect([_task("a", "7")], off_policy=4, prefix=HALF)
    assert len(group.rollouts) == 4


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ((WRONG,) * 4, [Outcome.WRONG] * 3 + ["trace"]),
        ((WRONG, RIGHT, WRONG, RIGHT), [Outcome.WRONG, Outcome.CORRECT, Outcome.CORRECT, "trace"]),
        ((RIGHT, RIGHT, WRONG, RIGHT), [Outcome.CORRECT, Outcome.CORRECT, Outcome.WRONG, Outcome.CORRECT]),
    ],
)
def test_traces_take_the_place_of_the_last_wrong_rollouts_where_the_policy_fails(
    script: Sequence[int], expected: list
) -> None:
    engine, (group,) = _collect([_task("a", "7", r"\boxed{7}")], script=script, off_policy_when_accuracy_at_most=0.5)
    assert len(engine.requests) == 4
    found = ["trace" if row.is_off_policy else row.outcome for row in group.trajectories]
    assert found == expected


def test_traces_never_take_the_place_of_right_rollouts() -> None:
    traces = [r"\boxed{7}", r"\boxed{8}", r"\boxed{7}"]
    _, (group,) = _collect(
        [_task("a", "7", *traces)],
        script=(WRONG, RIGHT, RIGHT, WRONG),
        off_policy=3,
        off_policy_when_accuracy_at_most=0.5,
    )
    assert [row.is_off_policy for row in group.trajectories] == [False, False, True, True]
    assert [row.is_correct for row in group.trajectories[:2]] == [True, True]
    # What made room still says how the policy does.
    assert [row.is_correct for row in group.replaced] == [False, False]
    assert group.accuracy == 0.5


def test_only_failing_groups_of_a_batch_get_traces() -> None:
    tasks = [_task(uid, "7", r"\boxed{7}") for uid in "ab"]
    script = (WRONG,) * 4 + (RIGHT,) * 4
    _, (failing, solved) = _collect(tasks, script=script, off_policy_when_accuracy_at_most=0.0)
    assert [row.is_off_policy for row in failing.trajectories] == [False, False, False, True]
    assert len(solved.rollouts) == 4


def test_a_replayed_row_takes_the_place_of_one_rollout_and_keeps_what_was_recorded() -> None:
    _, (earlier,) = _collect([_task("a", "7")], off_policy=0)
    # A reward that grading would not give shows that it is not graded again.
    stored = replace(earlier.trajectories[0], reward=0.75, weight_version=(2, 2))
    engine, (group,) = _collect([_task("a", "7", r"\boxed{7}", replayed=stored)], step=9)
    assert len(engine.requests) == 2
    assert [row.source[0] for row in group.trajectories] == [0, 0, Source.OFF_POLICY, Source.REPLAY]
    assert group.trajectories[-1] == replace(stored, source=(Source.REPLAY,) * 2)
    assert len(group.rollouts) == 2
