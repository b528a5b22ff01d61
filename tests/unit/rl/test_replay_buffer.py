"""What is remembered of earlier groups: the policy's own successes, and prompts that wait for a supervised step."""

import json
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from synthetic.trajectories import row_of

from luffy.config.group import ReplayConfig
from luffy.errors import CheckpointError
from luffy.rl.replay import MAX_SUCCESSES, FailedPrompts, ReplayBuffer
from luffy.types import FinishReason, Group, Source, Trajectory

ANY_STEP = ReplayConfig(start_accuracy=0.0)


def _row(correct: bool, token: int = 2, logp: float = -0.5, source: Source = Source.ON_POLICY) -> Trajectory:
    return row_of(correct, (token,), source, logp_behavior=(logp,), weight_version=(3,))


def _group(uid: str, correct: int, size: int = 8, token: int = 10) -> Group:
    return Group(uid, tuple(_row(i < correct, token + i) for i in range(size)))


class Journalled(ReplayBuffer):
    """A buffer that finds what it has observed."""

    def __init__(self, config: ReplayConfig = ANY_STEP, ahead: int = 0) -> None:
        self.steps: dict[int, Sequence[Group]] = {}
        super().__init__(config, 5, lambda step, index: self.steps[step][index], ahead)

    def observe(self, step: int, groups: Sequence[Group]) -> None:
        self.steps[step] = groups
        super().observe(step, groups)


def _started(config: ReplayConfig = ANY_STEP) -> Journalled:
    """A buffer that has seen a step which was good enough."""
    buffer = Journalled(config)
    buffer.observe(0, [_group("not recorded", 7)])
    return buffer


def _buffer(*groups: Group, config: ReplayConfig = ANY_STEP) -> Journalled:
    buffer = _started(config)
    buffer.observe(1, groups)
    return buffer


def test_recording_begins_with_the_step_after_the_first_that_is_good_enough() -> None:
    buffer = Journalled(ReplayConfig(start_accuracy=0.5))
    buffer.observe(2, [_group("early", 4)])
    buffer.observe(3, [_group("trigger", 5)])
    assert buffer.sample(4, 1) == {}
    buffer.observe(4, [_group("a", 1)])
    buffer.observe(5, [_group("b", 2)])
    assert sorted(buffer.sample(6, 9)) == ["a", "b"]


def test_only_right_rollouts_are_kept_and_neither_traces_nor_replayed_rows_count() -> None:
    trace, replayed = _row(True, 90, source=Source.OFF_POLICY), _row(True, 91, source=Source.REPLAY)
    buffer = _buffer(Group("a", (_row(True, 20), _row(False, 21), trace, replayed)), Group("b", (trace, replayed)))
    assert {uid: [row.response_ids for row in rows] for uid, rows in buffer.sample(2, 9).items()} == {"a": [(20,)]}


def test_the_newest_successes_are_kept_and_equal_ones_once_as_last_drawn() -> None:
    buffer = _buffer(_group("a", 6, token=10), _group("a", 4, token=20))
    buffer.observe(5, [Group("a", (_row(True, 12, logp=-0.125), _row(False, 99)))])
    kept = buffer.sample(6, 1)["a"]
    assert len(kept) == MAX_SUCCESSES
    assert [row.response_ids[0] for row in kept] == [13, 14, 15, 20, 21, 22, 23, 12]
    assert kept[-1].logp_behavior == (-0.125,)


def test_a_prompt_that_fails_waits_with_its_successes_until_it_is_solved_again() -> None:
    buffer = _buffer(_group("a", 2))
    buffer.observe(6, [_group("a", 0)])
    assert buffer.sample(7, 1) == {}
    buffer.observe(7, [_group("a", 1, token=30)])
    assert [row.response_ids[0] for row in buffer.sample(8, 1)["a"]] == [10, 11, 30]


@pytest.mark.parametrize(("retire", "drawn"), [(True, []), (False, ["a"])])
def test_a_solved_prompt_leaves_for_good_where_that_is_asked_for(retire: bool, drawn: list[str]) -> None:
    buffer = _buffer(_group("a", 8), config=ReplayConfig(start_accuracy=0.0, retire_solved=retire))
    buffer.observe(8, [_group("a", 4)])
    assert list(buffer.sample(9, 1)) == drawn


@pytest.mark.parametrize(("failed", "like"), [(0, 4), (1, 5)])
def test_a_replayed_group_is_counted_like_a_fresh_one(failed: int, like: int) -> None:
    """Else the one prompt that was replayed would have a bucket of its own, and half of the draws."""
    fresh = [_group(f"p{number}", like) for number in range(9)]
    rows = (*(_row(place < 3, 30 + place) for place in range(7 - failed)), _row(True, 99, source=Source.REPLAY))
    buffer = _buffer(*fresh, Group("replayed", rows, failed=(_row(False),) * failed))
    drawn = sum("replayed" in buffer.sample(step, 1) for step in range(2000))
    assert drawn / 2000 == pytest.approx(0.1, abs=4 * (0.09 / 2000) ** 0.5)


def test_a_prompt_solved_before_replay_begins_has_left_for_good() -> None:
    buffer = Journalled(ReplayConfig(start_accuracy=0.5))
    buffer.observe(1, [_group("a", 8), *(_group(f"p{number}", 0) for number in range(9))])
    buffer.observe(2, [_group("trigger", 7)])
    buffer.observe(3, [_group("a", 4), _group("b", 4)])
    assert list(buffer.sample(4, 9)) == ["b"]


def test_buckets_are_drawn_by_the_normal_density_and_prompts_evenly_inside() -> None:
    """The half-solved bucket holds two prompts, that of 6 of 8 one: exp(0) against exp(-2), whatever their sizes."""
    buffer = _buffer(_group("a", 4), _group("b", 4), _group("c", 6))
    drawn = Counter(uid for step in range(4000) for uid in buffer.sample(step, 1))
    of_c = math.exp(-2) / (1 + math.exp(-2))
    for uid, probability in {"a": (1 - of_c) / 2, "b": (1 - of_c) / 2, "c": of_c}.items():
        error = (probability * (1 - probability) / 4000) ** 0.5
        assert drawn[uid] / 4000 == pytest.approx(probability, abs=4 * error)


def test_a_lone_bucket_far_from_the_mean_is_still_drawn() -> None:
    config = ReplayConfig(start_accuracy=0.0, bucket_mean=0.99, bucket_std=1e-4)
    assert list(_buffer(_group("a", 1), config=config).sample(2, 2)) == ["a"]


_corrects = st.lists(st.tuples(st.integers(0, 20), st.integers(0, 8)), max_size=30)


@given(_corrects, st.integers(1, 500), st.integers(0, 25))
def test_draws_are_different_replayable_prompts_and_the_same_again(corrects, step, count):
    groups = [_group(f"p{prompt}", correct) for prompt, correct in corrects]
    buffer = _buffer(*groups)
    drawn = buffer.sample(step, count)
    assert all(drawn.values())
    last = {group.uid: group.accuracy for group in groups}
    solved = {group.uid for group in groups if group.accuracy == 1.0}
    replayable = [uid for uid, accuracy in last.items() if accuracy > 0 and uid not in solved]
    assert len(drawn) == min(count, len(replayable))
    again = [each.sample(step, count) for each in (_buffer(*groups), buffer)]
    assert [list(each.items()) for each in again] == [list(drawn.items())] * 2


_logps = st.floats(max_value=0.0, allow_nan=False, allow_infinity=False)


@given(_corrects, st.lists(_logps, min_size=1, max_size=5))
def test_the_state_comes_back_exactly_from_json(corrects: list[tuple[int, int]], logps: list[float]) -> None:
    own = row_of(1.0, tuple(range(len(logps))), logp_behavior=tuple(logps), finish_reason=FinishReason.LENGTH)
    groups = [*[_group(f"p{prompt}", correct) for prompt, correct in corrects], Group("q", (own, _row(False)))]
    buffer = _buffer(*groups)
    again = Journalled()
    again.steps[1] = groups
    again.restore(json.loads(_saved(buffer)))
    assert again.state() == buffer.state()
    assert again.sample(7, 99)["q"] == [own]
    assert again.sample(7, 5) == buffer.sample(7, 5)
    for each in (buffer, again):
        each.observe(2, [_group("p0", 3, token=50)])
    assert again.state() == buffer.state()


@given(st.lists(_corrects, min_size=2, max_size=8), st.integers(0, 3), st.data())
def test_a_resumed_run_ahead_of_its_trainer_replays_the_same(corrects, ahead, data):
    steps = [
        [_group(f"p{prompt}", correct, token=10 * step) for prompt, correct in groups]
        for step, groups in enumerate(corrects, start=1)
    ]
    undisturbed, resumed, lagging = Journalled(ahead=ahead), Journalled(ahead=ahead), Journalled()
    states: list[str] = []
    drawn = _drawn(undisturbed, 1, ahead, steps, lambda: states.append(_saved(undisturbed)))
    killed_after = data.draw(st.integers(1, len(steps) - 1))
    resumed.steps = undisturbed.steps
    resumed.restore(json.loads(states[killed_after - 1]))
    again = _drawn(resumed, killed_after + 1, ahead, steps)
    assert again == {step: drawn[step] for step in again}
    for step, groups in enumerate(steps[: max(killed_after - ahead, 0)], start=1):
        lagging.observe(step, groups)
    next_step = killed_after + 1
    assert drawn[next_step] == list(lagging.sample(next_step, 3).items()), "it sees the steps trained on when planned"


def _saved(buffer: ReplayBuffer) -> str:
    """The state as a checkpoint holds it, which takes nothing that JSON would change."""
    written = json.dumps(buffer.state())
    assert json.loads(written) == buffer.state()
    return written


def _drawn(
    buffer: Journalled, first: int, ahead: int, steps: Sequence[Sequence[Group]], then: Callable[[], object] = bool
) -> dict[int, list[tuple[str, list[Trajectory]]]]:
    """What each step draws; all steps up to `ahead` further ones are planned before a step is trained on."""
    drawn: dict[int, list[tuple[str, list[Trajectory]]]] = {}
    for step in range(first, len(steps) + 1):
        for planned in range(step, step + ahead + 1):
            if planned not in drawn:
                drawn[planned] = list(buffer.sample(planned, 3).items())
        buffer.observe(step, steps[step - 1])
        then()
    return drawn


def test_an_episode_is_replayed_although_its_environment_has_no_log_probabilities() -> None:
    sources = (Source.ON_POLICY, Source.ENVIRONMENT, Source.ON_POLICY)
    episode = replace(
        _row(True), response_ids=(2, 3, 4), source=sources, logp_behavior=(-0.5, math.nan, -0.25),
        weight_version=(3, -1, 3),
    )  # fmt: skip
    assert _buffer(Group("a", (episode, _row(False)))).sample(2, 1) == {"a": [episode]}


def test_a_step_that_the_journal_has_lost_is_said_in_one_line() -> None:
    buffer = ReplayBuffer(ANY_STEP, 5, lambda step, index: None)
    for step in (0, 1):
        buffer.observe(step, [_group("a", 2)])
    with pytest.raises(CheckpointError, match="lost step 1"):
        buffer.sample(2, 1)


def test_an_own_rollout_without_log_probabilities_is_a_programmer_s_mistake() -> None:
    with pytest.raises(AssertionError, match="without its log-probabilities"):
        _buffer(Group("a", (_row(True, logp=float("nan")), _row(False)))).sample(2, 1)


def _tried(uid: str, *corrects: bool, source: Source = Source.ON_POLICY) -> Group:
    return Group(uid, tuple(row_of(correct, source=source) for correct in corrects))


def _waiting(*uids: str) -> FailedPrompts:
    failed = FailedPrompts("oldest")
    failed.observe([_tried(uid, False, False) for uid in uids], lambda uid: True)
    return failed


def test_only_prompts_that_every_rollout_failed_and_that_have_a_trace_are_queued() -> None:
    failed = FailedPrompts("newest")
    groups = [_tried("some", True, False), _tried("none", False, False), _tried("bare", False, False)]
    failed.observe([*groups, _tried("guided", False, source=Source.OFF_POLICY)], lambda uid: uid != "bare")
    assert failed.take(1) == ["none"]
    assert len(failed) == 0


def test_a_full_queue_gives_the_longest_waiting_keeps_the_rest_and_survives_a_checkpoint() -> None:
    failed, again = _waiting("a", "b", "c"), _waiting("gone")
    again.restore(json.loads(json.dumps(failed.state())))
    for each in (failed, again):
        assert each.take(4) is None
        assert each.take(2) == ["a", "b"]
        assert each.take(1) == ["c"]


def test_the_newest_step_is_taken_first_in_its_own_order() -> None:
    failed = FailedPrompts("newest")
    for uids in ("ab", "cd", "ae"):
        failed.observe([_tried(uid, False) for uid in uids], lambda uid: True)
    assert failed.take(3) == ["a", "e", "c"]  # a failed again, and waits once
    assert failed.take(2) == ["d", "b"]


def test_a_prompt_waits_once_in_its_old_place_and_may_come_back() -> None:
    failed = _waiting("a", "b", "a")
    assert len(failed) == 2
    assert failed.take(1) == ["a"]
    failed.observe([_tried("a", False)], lambda uid: True)
    assert failed.take(2) == ["b", "a"]
