"""What is remembered of earlier groups: the policy's own successes, and prompts that wait for a supervised step.

That both are the same after a kill stands in `test_prompt_sampling.py`.
"""

import math
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from synthetic.trajectories import row_of

from luffy.config.group import ReplayConfig
from luffy.errors import CheckpointError
from luffy.rl.replay import MAX_SUCCESSES, FailedPrompts, ReplayBuffer
from luffy.types import Group, Source

TRACE, REPLAYED = (row_of(1.0, (token,), source) for token, source in ((90, Source.OFF_POLICY), (91, Source.REPLAY)))


def _group(uid: str, correct: int, size: int = 8, token: int = 10) -> Group:
    """So many right rollouts, then wrong ones, each of one token of its own."""
    return Group(uid, tuple(row_of(i < correct, (token + i,)) for i in range(size)))


class Journalled(ReplayBuffer):
    """A buffer that finds what it has observed."""

    def __init__(self, start_accuracy: float = 0.0) -> None:
        self.steps: dict[int, Sequence[Group]] = {}
        settings = ReplayConfig(start_accuracy=start_accuracy)
        super().__init__(settings, 5, lambda step, index: self.steps[step][index])

    def observe(self, step: int, groups: Sequence[Group]) -> None:
        self.steps[step] = groups
        super().observe(step, groups)

    def stored(self, step: int) -> dict[str, list[int]]:
        """The first token of each success of each prompt that can be replayed."""
        return {uid: [row.response_ids[0] for row in rows] for uid, rows in self.sample(step, 99).items()}


def _buffer(*steps: Sequence[Group]) -> Journalled:
    """A buffer that has seen these steps, after one that was good enough."""
    buffer = Journalled()
    for step, groups in enumerate([[_group("not recorded", 7)], *steps]):
        buffer.observe(step, groups)
    return buffer


FAILED, SOLVED = [_group("a", 0)], [_group("a", 8)]


@pytest.mark.parametrize(
    ("steps", "stored"),
    [
        # Only right rollouts are kept; neither traces nor replayed rows count.
        ([[Group("a", (row_of(1.0, (20,)), row_of(0.0), TRACE, REPLAYED)), Group("b", (TRACE, REPLAYED))]],
         {"a": [20]}),
        # The newest are kept, and equal ones once, as they were sampled last.
        ([[_group("a", 6, token=10), _group("a", 4, token=20)], [_group("a", 1, 2, token=12)]],
         {"a": [13, 14, 15, 20, 21, 22, 23, 12]}),
        # A prompt that fails waits with its successes until it is solved again.
        ([[_group("a", 2)], FAILED], {}),
        ([[_group("a", 2)], FAILED, [_group("a", 1, token=30)]], {"a": [10, 11, 30]}),
        # A solved one leaves for good, also before replay begins.
        ([SOLVED, [_group("a", 1)]], {}),
    ],
)  # fmt: skip
def test_the_successes_that_can_be_replayed(steps, stored):
    assert _buffer(*steps).stored(9) == stored
    assert all(len(tokens) <= MAX_SUCCESSES for tokens in stored.values())


def test_an_equal_response_has_the_log_probabilities_of_the_last() -> None:
    rows = [row_of(1.0, (12,), logp_behavior=(logp,)) for logp in (-0.5, -0.125)]
    buffer = _buffer(*([Group("a", (row, row_of(0.0)))] for row in rows))
    assert buffer.sample(3, 1) == {"a": rows[1:]}


def test_recording_begins_with_the_step_after_the_first_that_is_good_enough() -> None:
    buffer, others = Journalled(start_accuracy=0.5), [_group(f"p{number}", 0) for number in range(9)]
    for step, groups in enumerate([[_group("early", 4)], [_group("solved", 8), *others], [_group("trigger", 5)]]):
        buffer.observe(step, groups)
        assert buffer.sample(step + 1, 1) == {}
    buffer.observe(3, [_group("a", 1), _group("solved", 4)])
    buffer.observe(4, [_group("b", 2)])
    assert sorted(buffer.sample(6, 9)) == ["a", "b"], "what was solved before has left for good"


def _shares(buffer: ReplayBuffer, draws: int) -> dict[str, float]:
    drawn = Counter(uid for step in range(draws) for uid in buffer.sample(step, 1))
    return {uid: count / draws for uid, count in drawn.items()}


@pytest.mark.parametrize(("failed", "like"), [(0, 4), (1, 5)])
def test_a_replayed_group_is_counted_like_a_fresh_one(failed: int, like: int) -> None:
    """Else the one prompt that was replayed would have a bucket of its own, and half of the draws."""
    fresh = [_group(f"p{number}", like) for number in range(9)]
    rows = (*(row_of(place < 3, (30 + place,)) for place in range(7 - failed)), REPLAYED)
    buffer = _buffer([*fresh, Group("replayed", rows, failed=(row_of(0.0),) * failed)])
    assert _shares(buffer, 2000)["replayed"] == pytest.approx(0.1, abs=4 * (0.09 / 2000) ** 0.5)


def test_buckets_are_drawn_by_the_normal_density_and_prompts_evenly_inside() -> None:
    """The half-solved bucket holds two prompts, that of 6 of 8 one: exp(0) against exp(-2), whatever their sizes."""
    found = _shares(_buffer([_group("a", 4), _group("b", 4), _group("c", 6)]), 4000)
    of_c = math.exp(-2) / (1 + math.exp(-2))
    for uid, probability in {"a": (1 - of_c) / 2, "b": (1 - of_c) / 2, "c": of_c}.items():
        error = (probability * (1 - probability) / 4000) ** 0.5
        assert found[uid] == pytest.approx(probability, abs=4 * error)


_corrects = st.lists(st.tuples(st.integers(0, 20), st.integers(0, 8)), max_size=30)


@given(_corrects, st.integers(1, 500), st.integers(0, 25))
def test_draws_are_different_replayable_prompts_and_the_same_again(corrects, step, count):
    groups = [_group(f"p{prompt}", correct) for prompt, correct in corrects]
    buffer = _buffer(groups)
    drawn = buffer.sample(step, count)
    assert all(drawn.values())
    last = {group.uid: group.accuracy for group in groups}
    solved = {group.uid for group in groups if group.accuracy == 1.0}
    replayable = [uid for uid, accuracy in last.items() if accuracy > 0 and uid not in solved]
    assert len(drawn) == min(count, len(replayable))
    again = [each.sample(step, count) for each in (_buffer(groups), buffer)]
    assert [list(each.items()) for each in again] == [list(drawn.items())] * 2


def test_an_episode_is_replayed_although_its_environment_has_no_log_probabilities() -> None:
    sources = (Source.ON_POLICY, Source.ENVIRONMENT, Source.ON_POLICY)
    episode = row_of(1.0, (2, 3, 4), sources, logp_behavior=(-0.5, math.nan, -0.25), weight_version=(3, -1, 3))
    assert _buffer([Group("a", (episode, row_of(0.0)))]).sample(2, 1) == {"a": [episode]}
    mistaken = row_of(1.0, logp_behavior=(math.nan,))
    with pytest.raises(AssertionError, match="without its log-probabilities"):
        _buffer([Group("a", (mistaken, row_of(0.0)))]).sample(2, 1)


def test_a_step_that_the_journal_has_lost_is_said_in_one_line() -> None:
    buffer = ReplayBuffer(ReplayConfig(start_accuracy=0.0), 5, lambda step, index: None)
    for step in (0, 1):
        buffer.observe(step, [_group("a", 2)])
    with pytest.raises(CheckpointError, match="lost step 1"):
        buffer.sample(2, 1)


# ---- prompts that wait for a supervised step ----

GUIDED = Group("guided", (row_of(0.0, source=Source.OFF_POLICY),))


@pytest.mark.parametrize(
    ("steps", "taken"),
    [
        # Those that every rollout failed and that have a trace; `bare` has none. None while there are fewer.
        ([[_group("some", 1, 2), _group("none", 0), _group("bare", 0), GUIDED]], [["none"], None]),
        # The newest step is taken first, in its own order.
        (["ab", "cd", "ae"], [["a", "e", "c"], ["d", "b"]]),
    ],
)
def test_prompts_without_a_success_wait_to_be_taken(steps, taken):
    queue = FailedPrompts()
    for step in steps:
        queue.observe([_group(uid, 0) for uid in step] if isinstance(step, str) else step, lambda uid: uid != "bare")
    total = sum(len(uids) for uids in taken if uids)
    assert len(queue) == total
    for uids in taken:
        assert queue.take(total + 1 if uids is None else len(uids)) == uids
    queue.observe([_group("a", 0)], lambda uid: True)
    assert queue.take(1) == ["a"], "one that was taken may come back"
