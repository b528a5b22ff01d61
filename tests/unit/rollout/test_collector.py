"""Groups: rollouts first, demonstrations last, everything graded."""

from collections.abc import Sequence

from luffy.config.objective import GroupConfig
from luffy.grading.pool import GraderPool
from luffy.rollout.collector import Demonstration, GroupCollector, RolloutTask
from luffy.rollout.engine import Completion, RolloutRequest, SamplingParams
from luffy.types import FinishReason, Outcome, Source


class Parrot:
    """An engine that says `\\boxed{7}` and remembers what it was asked."""

    def __init__(self) -> None:
        self.requests: list[RolloutRequest] = []

    def generate(self, requests: Sequence[RolloutRequest], params: SamplingParams) -> list[Completion]:
        self.requests += requests
        return [Completion((1, 2), (-0.5, -0.25), FinishReason.STOP, weight_version=6) for _ in requests]

    def close(self) -> None: ...


def _collect(tasks: list[RolloutTask], step: int = 1, size: int = 4, off_policy: int = 1):
    engine = Parrot()
    params = SamplingParams(1.0, 8, ())
    with GraderPool(1, 5.0) as grader:
        collector = GroupCollector(
            grader, lambda ids: r"\boxed{7}", params, GroupConfig(size=size, off_policy=off_policy), 0
        )
        return engine, collector.collect(engine, tasks, step)


def _task(uid: str, answer: str, *traces: str) -> RolloutTask:
    return RolloutTask(uid, (5, 6), answer, tuple(Demonstration(text, (8, 9), None) for text in traces))


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
