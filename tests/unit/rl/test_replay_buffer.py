"""What is remembered of earlier groups: the policy's own successes, and prompts that wait for a supervised step; which
traces the trainer takes for a failed group.

That memories are the same after a kill stands in `test_prompt_sampling.py`.
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
from luffy.rl.rows import RolloutTask
from luffy.rl.trace_choice import TraceChoice
from luffy.types import ANSWER_PROBABILITY, Group, Source, Trajectory

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


# ---- traces after whose reasoning the policy likely gives the answer ----

PIECES = ("", "so ", "{5", "5", "6", "}", "\n", "56", "x")
"""The text of each token; `encode` takes the longest that fits."""
CHOICE = TraceChoice(lambda ids: "".join(PIECES[token] for token in ids), lambda text: _encoded(text), longest=20)
SO = 1


def _encoded(text: str) -> tuple[int, ...]:
    if not text:
        return ()
    best = max((piece for piece in PIECES if piece and text.startswith(piece)), key=len)
    return (PIECES.index(best), *_encoded(text[len(best) :]))


def _trace(*ids: int, answer: str = "56") -> Trajectory:
    unknown = {"logp_behavior": (float("nan"),) * len(ids), "weight_version": (-1,) * len(ids)}
    return row_of(1.0, ids, Source.OFF_POLICY, prompt_ids=(1, 2), answer=answer, **unknown)


@pytest.mark.parametrize(
    ("ids", "answer", "reference", "given", "scored"),
    [
        ((SO, 7, 6, SO, 7, 5, 0), "56", "65", (SO, 7, 6, SO), (4, 3)),  # the last place of the answer
        ((SO, 3, 4, 5), "56", "56", (SO,), (7,)),  # encoded as the reference would be
        ((SO, 2, 4, 5), "56", "56", (SO,), (2, 4)),  # the answer begins within a token
        ((7,), "56", "56", (), (7,)),
        ((*[SO] * 17, 7), "56", "56", (SO,) * 17, (7,)),
        ((*[SO] * 18, 7), "56", "56", None, None),  # 2 + 18 + 1 tokens are more than 20
        ((SO, 8), "56", "56", None, None),  # the answer is not in the text
        ((SO, 7), "", "56", None, None),
        ((SO, 7), "56", "", None, None),
    ],
)
def test_the_reference_answer_is_scored_in_the_place_of_the_traces_own(ids, answer, reference, given, scored):
    probe = CHOICE.probe(_trace(*ids, answer=answer), reference)
    if given is None:
        assert probe is None
        return
    assert probe.prompt_ids == (1, 2) and probe.response_ids == given + scored
    assert probe.source == (Source.ENVIRONMENT,) * len(given) + (Source.OFF_POLICY,) * len(scored)
    assert probe.num_learnable == len(scored) == sum(source is Source.OFF_POLICY for source in probe.source)


@pytest.mark.parametrize(
    ("traces", "scores", "chosen"),
    [
        # The highest scores stay, and ties go to those whose turn it is; a trace that cannot be scored comes last.
        ([(7,), (SO, 7), (SO, SO, 7), (SO, SO, SO, 7)], [0.1, 0.4, 0.2, 0.3], (1, 3)),
        ([(7,), (SO, 7), (SO, SO, 7), (SO, SO, SO, 7)], [0.5] * 4, (0, 1)),
        ([(7,), (SO, 7), (SO, SO, 7), (SO, SO, SO, 7)], [0.1, 0.2, 0.2, 0.1], (1, 2)),
        ([(8,), (SO, 7), (7,)], [0.0, 0.1, 0.2], (2, 1)),
    ],
)
def test_a_failed_group_learns_from_the_traces_of_the_highest_scores(traces, scores, chosen):
    """Of a group of four with two of these traces; groups without a choice are untouched, and not scored."""
    rows, wrong, scorable = [_trace(*ids) for ids in traces], row_of(0.0), [score for score in scores if score]
    others = [Group("p", (row_of(1.0), *[wrong] * 3)), Group("p", (wrong, *rows[:2]), (wrong, wrong))]
    group = Group("p", (wrong, wrong, *rows[:2]), (wrong, wrong, *rows[2:]))

    def score(asked: Sequence[Trajectory]) -> list[float]:
        assert len(asked) == len(scorable)
        return scorable

    *untouched, found = CHOICE.made([*others, group], {"p": RolloutTask("p", (1, 2), "56", ())}, score)
    assert untouched == others
    assert found.rollouts == [wrong] * 4 and len(found.trajectories) == 4
    measured = [(row.response_ids, row.measures[ANSWER_PROBABILITY]) for row in found.trajectories[2:]]
    assert measured == [(traces[place], scores[place]) for place in chosen]
    left = [place for place in range(len(traces)) if place not in chosen]
    assert sorted(row.measures[ANSWER_PROBABILITY] for row in found.replaced[2:]) == sorted(scores[i] for i in left)


def test_a_checkpoint_of_a_development_version_is_read() -> None:
    buffer = Journalled()
    buffer.steps = {step: [_group("a", 2), _group("b", 8), _group("c", 3)] for step in (1, 2, 3)}
    old = {
        "started": True,
        "retired": ["b"],
        "prompts": {"a": [0.25, [[1, 0, 0, "x"], [1, 0, 1, "y"]]]},
        "recent": {"2": [0.5, [["b", [0.5, [[2, 1, 0, "z"]]]], ["c", [0.375, [[2, 2, 1, "w"]]]]]]},
    }
    buffer.restore(old)
    assert buffer.stored(3) == {"a": [10, 11], "c": [11]}
