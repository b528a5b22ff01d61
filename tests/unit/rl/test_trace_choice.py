"""The trainer's choice among traces: which text it scores, which traces stay, and a kill before it is written down."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from support.patience import PATIENCE_S
from synthetic.trajectories import row_of
from test_composition import RIGHT, STEPS, STOP, WRONG, RecordedRanks, runner_of, settings_of

from luffy.grading.pool import GraderPool
from luffy.rl.rows import Demonstration, RolloutTask
from luffy.rl.trace_choice import TraceChoice
from luffy.tracking.journal import RolloutJournal
from luffy.training.learner import Trainer
from luffy.types import ANSWER_PROBABILITY, Group, Message, Outcome, Source, Trajectory

PIECES = ("", "so ", "{5", "5", "6", "}", "\n", "56", "x")
"""The text of each token; `encode` takes the longest that fits."""
CHOICE = TraceChoice(lambda ids: "".join(PIECES[token] for token in ids), lambda text: _encoded(text), longest=20)


def _encoded(text: str) -> tuple[int, ...]:
    if not text:
        return ()
    best = max((piece for piece in PIECES if piece and text.startswith(piece)), key=len)
    return (PIECES.index(best), *_encoded(text[len(best) :]))


def _trace(*ids: int, answer: str = "56", reward: float = 1.0) -> Trajectory:
    count = len(ids)
    return replace(
        row_of(reward, source=Source.OFF_POLICY),
        prompt_ids=(1, 2), response_ids=ids, source=(Source.OFF_POLICY,) * count, logp_behavior=(float("nan"),) * count,
        weight_version=(-1,) * count, answer=answer,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("ids", "reference", "given", "scored"),
    [
        ((1, 7, 6, 1, 7, 5, 0), "65", (1, 7, 6, 1), (4, 3)),  # the last place of the answer, the reference in it
        ((1, 3, 4, 5), "56", (1,), (7,)),  # encoded as the reference would be
        ((1, 2, 4, 5), "56", (1,), (2, 4)),  # the answer begins within a token
        ((7,), "56", (), (7,)),
    ],
)
def test_the_reference_answer_is_scored_in_the_place_of_the_traces_own(ids, reference, given, scored):
    probe = CHOICE.probe(_trace(*ids), reference)
    assert probe is not None and probe.prompt_ids == (1, 2)
    assert probe.response_ids == given + scored
    assert probe.source == (Source.ENVIRONMENT,) * len(given) + (Source.OFF_POLICY,) * len(scored)
    assert probe.num_learnable == len(scored) == sum(source is Source.OFF_POLICY for source in probe.source)


def test_a_trace_without_its_answer_or_without_room_is_not_scored() -> None:
    assert CHOICE.probe(_trace(1, 8), "56") is None, "the answer is not in the text"
    assert CHOICE.probe(_trace(1, 7, answer=""), "56") is None and CHOICE.probe(_trace(1, 7), "") is None
    assert CHOICE.probe(_trace(*[1] * 17, 7), "56") is not None
    assert CHOICE.probe(_trace(*[1] * 18, 7), "56") is None, "2 + 18 + 1 tokens are more than 20"


TASK = RolloutTask("p", (1, 2), "56", ())
WRONG_ROLLOUT = row_of(0.0)


def _made(traces: Sequence[Trajectory], scores: Sequence[float], *others: Group) -> Group:
    """A failed group of four with two of these traces, after the choice."""
    group = Group("p", (WRONG_ROLLOUT, WRONG_ROLLOUT, *traces[:2]), (WRONG_ROLLOUT, WRONG_ROLLOUT, *traces[2:]))

    def score(rows: Sequence[Trajectory]) -> list[float]:
        assert len(rows) == len(scores)
        return list(scores)

    *found, last = CHOICE.made([*others, group], {"p": TASK}, score)
    assert found == list(others), "groups without a choice are untouched, and not scored"
    assert last.rollouts == [WRONG_ROLLOUT] * 4 and len(last.trajectories) == 4
    return last


def test_the_traces_of_the_highest_scores_stay_and_ties_go_to_those_whose_turn_it_is() -> None:
    traces = [_trace(*[1] * count, 7) for count in range(4)]
    solved = Group("p", (row_of(1.0), *[WRONG_ROLLOUT] * 3))
    only = Group("p", (WRONG_ROLLOUT, *traces[:2]), (WRONG_ROLLOUT, WRONG_ROLLOUT))
    for scores, chosen in (((0.1, 0.4, 0.2, 0.3), (1, 3)), ((0.5,) * 4, (0, 1)), ((0.1, 0.2, 0.2, 0.1), (1, 2))):
        group = _made(traces, scores, solved, only)
        assert [len(row.response_ids) - 1 for row in group.trajectories[2:]] == list(chosen)
        assert [row.measures[ANSWER_PROBABILITY] for row in group.trajectories[2:]] == [scores[i] for i in chosen]
        assert len(group.replaced) == 4 and all(ANSWER_PROBABILITY in row.measures for row in group.replaced[2:])


def test_a_trace_that_cannot_be_scored_comes_last() -> None:
    group = _made([_trace(8), _trace(1, 7), _trace(7)], (0.1, 0.2))
    assert [row.response_ids for row in group.trajectories[2:]] == [(7,), (1, 7)]
    assert group.replaced[2].measures[ANSWER_PROBABILITY] == 0.0


def _task(number: int) -> RolloutTask:
    """A prompt with four traces, of which one is wrong; every fourth prompt is never solved (`Script`)."""
    traces = [(*[20] * count, WRONG if count == 2 else RIGHT, STOP) for count in range(4)]
    texts = [r"\boxed{8}" if WRONG in ids else r"\boxed{7}" for ids in traces]
    demonstrations = tuple(Demonstration(text, ids, None) for text, ids in zip(texts, traces, strict=True))
    return RolloutTask(f"p{number}", (10 + number,), "7", demonstrations, messages=(Message("user", str(number)),))


def test_the_trainer_chooses_before_the_step_is_journalled_and_a_kill_there_changes_nothing(tmp_path, monkeypatch):
    """The record of the ranks scores a text of n tokens as n, so the longest right trace is chosen."""
    settings = settings_of("ampo", "objective.group.off_policy=1")
    choose, asked = Trainer.mean_probabilities, list[int]()

    def run(folder: Path, first: int, ranks: RecordedRanks, choices: int = STEPS) -> RolloutJournal:
        """The steps from `first` on, up to a kill right after one more choice."""
        journal, left = RolloutJournal(folder), iter(range(choices))

        def choose_or_die(trainer: Trainer, rows: Sequence[Trajectory]) -> list[float]:
            scores = choose(trainer, rows)
            asked.append(len(rows))
            if next(left, None) is None:
                raise KeyboardInterrupt
            return scores

        monkeypatch.setattr(Trainer, "mean_probabilities", choose_or_die)
        with GraderPool(1, PATIENCE_S) as grader:
            runner, _ = runner_of(settings, grader, journal, ranks, tasks=[_task(number) for number in range(48)])
            with runner:
                if first > 1:
                    runner.restore(first - 1)
                for step in range(first, STEPS + 1):
                    metrics = runner.run(step).metrics
                    assert metrics["batch/guided_share"] == metrics["batch/choice_share"] > 0
                    assert metrics["batch/chosen_answer_probability"] == 4 > metrics["batch/other_answer_probability"]
                    runner.save(step)
        return journal

    undisturbed = run(tmp_path / "undisturbed", 1, RecordedRanks([], 2))
    kinds = set[bool]()
    for group in (group for step in range(1, STEPS + 1) for group in undisturbed.read(step) or ()):
        traces = [row for row in (*group.trajectories, *group.replaced) if row.is_off_policy]
        assert len(group.trajectories) == len(group.rollouts) == 8
        kinds.add(fails := not any(row.is_correct for row in group.rollouts))
        if not fails:
            assert not traces and not group.replaced, "one success is enough: the group is as it was sampled"
            continue
        assert group.trajectories[-1].response_ids == (20, 20, 20, RIGHT, STOP)
        assert sorted(len(row.response_ids) for row in traces) == [2, 3, 5], "the wrong trace is no candidate"
        assert {row.outcome for row in traces} == {Outcome.CORRECT}
        assert [row.measures[ANSWER_PROBABILITY] for row in traces] == [len(row.response_ids) - 1 for row in traces]
    assert kinds == {True, False} and sum(asked) % 3 == 0
    ranks = RecordedRanks([], 2)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "killed", 1, ranks, choices=2)
    assert len(ranks.saved) == 2 and RolloutJournal(tmp_path / "killed").read(3) is None
    run(tmp_path / "killed", 3, ranks)
    for file in sorted((tmp_path / "undisturbed").iterdir()):
        assert (tmp_path / "killed" / file.name).read_bytes() == file.read_bytes()
    asked.clear()
    run(tmp_path / "killed", 3, ranks)
    assert not asked, "a journalled step is not chosen again"
