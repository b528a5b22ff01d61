"""Which traces the trainer takes for a failed group: those after whose reasoning the policy likely gives the answer."""

from collections.abc import Sequence

import pytest
from synthetic.trajectories import row_of

from luffy.rl.rows import RolloutTask
from luffy.rl.trace_choice import TraceChoice
from luffy.types import ANSWER_PROBABILITY, Group, Source, Trajectory

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
