"""The second round of rollouts: what its prompts hold, which of its rows stay, and a kill right before it."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from pydantic import ValidationError
from support.patience import PATIENCE_S
from synthetic.trajectories import row_of
from test_composition import STEPS, RecordedRanks, runner_of, settings_of

from luffy.config.group import GroupConfig, RetryConfig
from luffy.errors import DataError
from luffy.grading.pool import GraderPool
from luffy.rl.retries import RetryPrompts
from luffy.rl.rows import RolloutTask
from luffy.rl.trace_starts import with_hinted_rows
from luffy.rollout.engine import Completion, RolloutRequest, SamplingParams
from luffy.tracking.journal import RolloutJournal
from luffy.types import FinishReason, Group, Message, Source, Trajectory

EACH = {
    "about": "each", "num_rows": 3, "keep": "best", "right": "Yes: {reference}.",
    "wrong": "No: {answers} is not {reference}.", "template": "{prompt} | {response} | {feedback}",
}  # fmt: skip
ALL = {
    "about": "all", "num_rows": 2, "keep": "all_correct", "wrong": "Not {answers}.", "truncated": "Be brief.",
    "template": "{prompt} | {feedback}",
}  # fmt: skip
TASK = RolloutTask("p", (1,), "7", (), messages=(Message("system", "Be kind."), Message("user", "How many {answers}?")))
ASKED = "How many {answers}?"


def row(answer: str, *, right: bool = False, cut: bool = False) -> Trajectory:
    """A response whose text is `said ANSWER`."""
    ids = tuple(map(ord, f"said {answer}"))
    end = FinishReason.LENGTH if cut else FinishReason.STOP
    return replace(row_of(float(right)), response_ids=ids, answer=answer, finish_reason=end)


def prompts(config: dict[str, object], *rows: Trajectory, **changes: object) -> list[str]:
    """The last messages of the second round's prompts."""

    def encode(messages: Sequence[Message]) -> tuple[int, ...]:
        assert messages[0] == TASK.messages[0]
        return tuple(map(ord, messages[-1].content))

    made = RetryPrompts.fitting(
        RetryConfig.model_validate({**config, **changes}), encode, lambda ids: "".join(map(chr, ids)), [TASK], 40, None
    )
    found = made.of(TASK, rows)
    assert all(prompt.hint.level == 1 and not prompt.is_learned_from for prompt in found)
    return ["".join(map(chr, prompt.prompt_ids)) for prompt in found]


def test_each_prompt_shows_one_response_in_turn_and_its_verdict_with_the_reference() -> None:
    wrong, right = f"{ASKED} | said 8 | No: 8 is not 7.", f"{ASKED} | said 7 | Yes: 7."
    assert prompts(EACH, row("8"), row("7", right=True)) == [wrong, right, wrong]
    assert prompts(EACH, row("8"), row("7", right=True), right=None, num_rows=2) == [wrong, wrong]
    assert prompts(EACH, row("7", right=True), right=None) == []
    quoting = row("{reference}")
    assert prompts(EACH, quoting, num_rows=1) == [f"{ASKED} | said {{reference}} | No: {{reference}} is not 7."]


@pytest.mark.parametrize(
    ("rows", "feedback"),
    [
        ([row("8"), row("9"), row("8"), row("7", right=True)], "Not 8, 9."),
        ([row("8", cut=True), row("9")], "Be brief. Not 9."),
        ([row("8", cut=True), row("", cut=True)], "Be brief."),
    ],
)
def test_one_prompt_is_about_all_wrong_responses_and_names_each_answer_once(rows, feedback):
    assert prompts(ALL, *rows) == [f"{ASKED} | {feedback}"] * 2
    assert prompts(ALL, row("7", right=True)) == []


def test_a_prompt_that_is_too_long_is_left_out() -> None:
    short, long = row("8"), row("8" * 60)
    assert len(prompts(EACH, short, long)) == 2, "its bound is the longest prompt and 40 tokens of a response"
    assert prompts(EACH, short, max_prompt_tokens=30) == []


@pytest.mark.parametrize(("changes", "longest"), [({}, 91), ({"max_prompt_tokens": 64}, 64)])
def test_a_model_without_room_for_the_second_round_is_refused_with_the_number(changes, longest):
    config = RetryConfig.model_validate({**EACH, **changes})

    def fitting(context: int) -> RetryPrompts:
        return RetryPrompts.fitting(config, lambda m: tuple(map(ord, m[-1].content)), str, [TASK], 40, context)

    with pytest.raises(
        DataError, match=rf"may have {longest} tokens, .* leave {longest - 1}; set .* at most {longest - 1}"
    ):
        fitting(longest + 39)
    assert fitting(longest + 40).longest == longest


def test_the_rows_that_stay() -> None:
    hinted = [row_of(reward, (token,), Source.HINTED) for token, reward in ((5, 0.0), (6, 1.0), (7, 1.0))]
    group = Group("p", tuple(row_of(reward) for reward in (1.0, 0.0)))
    for keep, staying, leaving in (
        ("first_correct", [1], [1]),
        ("all_correct", [1], [1]),
        ("best", [1], [0]),
    ):
        found = with_hinted_rows(group, hinted, keep)
        assert [row for row in found.trajectories if row.is_off_policy] == [hinted[place] for place in staying]
        assert found.replaced[: len(leaving)] == tuple(group.trajectories[place] for place in leaving)
        assert len(found.trajectories) == 2 and len(found.replaced) == 3
    wrong = [row_of(0.0, (token,), Source.HINTED) for token in (5, 6)]
    worse = with_hinted_rows(group, wrong, "best")
    assert worse.trajectories == (group.trajectories[1], wrong[0]), "of wrong rows the first one"


@pytest.mark.parametrize("method", ["critique_grpo", "lte"])
def test_a_kill_between_the_two_rounds_resumes_to_the_same_groups(method, tmp_path, monkeypatch):
    settings = settings_of(method)

    def run(folder: Path, first: int, ranks: RecordedRanks, second_rounds: int = STEPS) -> RolloutJournal:
        """The steps from `first` on, up to a kill where one more second round is asked for."""
        journal, left = RolloutJournal(folder), iter(range(second_rounds))
        with GraderPool(1, PATIENCE_S) as grader:
            runner, engine = runner_of(settings, grader, journal, ranks)
            generate = engine.generate

            def generate_or_die(requests: Sequence[RolloutRequest], params: SamplingParams) -> list[Completion]:
                if requests[0].prompt_ids[1:] and next(left, None) is None:
                    raise KeyboardInterrupt
                return generate(requests, params)

            monkeypatch.setattr(engine, "generate", generate_or_die)
            with runner:
                if first > 1:
                    runner.restore(first - 1)
                for step in range(first, STEPS + 1):
                    runner.run(step)
                    runner.save(step)
        return journal

    undisturbed = run(tmp_path / "undisturbed", 1, RecordedRanks([], 2))
    ranks = RecordedRanks([], 2)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "killed", 1, ranks, second_rounds=2)
    assert len(ranks.saved) == 2 and RolloutJournal(tmp_path / "killed").read(3) is None
    resumed = run(tmp_path / "killed", 3, ranks)
    assert all(resumed.read(step) == undisturbed.read(step) for step in range(1, STEPS + 1))


@pytest.mark.parametrize(
    ("retry", "words"),
    [
        ({**ALL, "template": "{prompt}"}, r"template must have {feedback} once"),
        ({**ALL, "template": "{prompt} {response} {feedback}"}, r"{response} has no meaning with about: all"),
        ({**ALL, "right": "Yes."}, "right has no effect with about: all"),
        ({**ALL, "keep": "all", "num_rows": 9}, "9 rows are above size 4"),
        ({**ALL, "keep": "all", "accuracy_at_most": 0.75}, "may have fewer wrong rollouts than the 2 rows"),
    ],
)
def test_bad_settings_are_refused(retry: dict[str, object], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        GroupConfig.model_validate({"size": 4, "off_policy": 0, "retry": retry})


def test_a_second_round_is_the_only_fallback_of_a_group() -> None:
    hint = {"levels": (0.5,), "keep": "all", "learn": "hinted"}
    for more, words in (({"off_policy": 1}, "set off_policy: 0"), ({"hint": hint}, "hint and retry both sample again")):
        with pytest.raises(ValidationError, match=words):
            GroupConfig.model_validate({"size": 4, "off_policy": 0, "retry": ALL} | more)
