"""Prompts that show more than the question: hints, a second round, and what the policy sees as its own teacher."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from pydantic import ValidationError
from synthetic.trajectories import row_of

from luffy.config.group import GroupConfig, HintConfig, RetryConfig
from luffy.config.training import SelfTeacher
from luffy.data.templates import render_prompts
from luffy.data.tokenizer import build_tokenizer
from luffy.errors import DataError
from luffy.rl.retries import RetryPrompts
from luffy.rl.rows import Demonstration, RolloutTask
from luffy.rl.teaching import ScoreRequest, ServedScorer, TeacherPrompts
from luffy.rl.trace_starts import HintedPrompts, hint_text, with_hinted_rows
from luffy.types import NO_TEACHER, FinishReason, Group, Hint, Message, Prompt, Source, Trace, Trajectory

REASONING = "<think>one\n two\n\nthree\nfour\n</think>\\boxed{7}"


def spelt(messages: Sequence[Message]) -> tuple[int, ...]:
    """The last message letter by letter, after the system's as it is."""
    assert messages[0] == Message("system", "Be brief.")
    return tuple(map(ord, messages[-1].content))


def read(ids: Sequence[int]) -> str:
    return "".join(map(chr, ids))


def hint_config(**changes: object) -> HintConfig:
    values = {"levels": (0.25, 0.5, 0.9), "keep": "first_correct", "learn": "bare", "template": "{prompt} | {hint}"}
    return HintConfig.model_validate({**values, **changes})


def hints(seed: int = 7, **changes: object) -> HintedPrompts:
    return HintedPrompts(hint_config(**changes), spelt, seed, total_steps=100)


def task_with(*replies: str, asked: str = "What is {hint}?") -> RolloutTask:
    messages = (Message("system", "Be brief."), Message("user", asked))
    return RolloutTask("p", (1,), "7", tuple(Demonstration(text, (2,), None) for text in replies), messages=messages)


@pytest.mark.parametrize(
    ("trace", "share", "shown"),
    [
        # Never the last step; words where the trace is one line.
        (REASONING, 0.01, "one"),
        (REASONING, 0.25, "one"),
        (REASONING, 0.5, "one\n two"),
        (REASONING, 0.75, "one\n two\nthree"),
        (REASONING, 0.99, "one\n two\nthree"),
        ("so it is \\boxed{7}", 0.5, "so it"),
        ("\\boxed{7}", 0.5, ""),
        ("", 0.5, ""),
        ("<think>", 0.5, ""),
    ],
)
def test_a_hint_is_the_first_steps_of_the_reasoning(trace: str, share: float, shown: str) -> None:
    assert hint_text(trace, share) == shown


def test_the_hint_stands_in_the_last_message_of_a_prompt_of_its_own() -> None:
    found = hints(rows_per_level=2).of(task_with(REASONING), step=1)
    assert [prompt.hint.level for prompt in found] == [1, 1, 2, 2, 3, 3]
    assert found[2].hint == Hint(2, "one\n two") and not found[2].is_learned_from
    assert read(found[2].prompt_ids) == "What is {hint}? | one\n two" == read(found[3].prompt_ids)


def test_tasks_without_a_trace_of_two_steps_have_no_hints_and_several_traces_take_turns() -> None:
    prompts = hints(levels=(0.5,))
    assert prompts.of(task_with(), step=1) == prompts.of(task_with("\\boxed{7}"), step=1) == []
    both = task_with("a\nb\n7", "\\boxed{7}", "c\nd\n7")
    shown = [prompts.of(both, step)[0].hint.text for step in range(1, 30)]
    assert set(shown) == {"a", "c"}
    assert shown == [hints(levels=(0.5,)).of(both, step)[0].hint.text for step in range(1, 30)]


def test_the_longest_prompt_is_that_of_the_highest_level_and_hints_begin_after_their_share_of_the_steps() -> None:
    tasks = [task_with(), task_with("a\nb"), task_with(REASONING)]
    assert hints().longest(tasks) == len("What is {hint}? | one\n two\nthree")
    assert hints().longest(tasks[:1]) == 0
    assert [hints(after=0.29).are_due(step) for step in (1, 29, 30, 100)] == [False, False, True, True]
    assert hints().are_due(1)


@pytest.mark.parametrize(
    ("keep", "rollouts", "hinted", "learned", "replaced"),
    [
        ("all", [0, 0, 0], [1, 0], (3, 11, 12), (1, 2)),
        ("first_correct", [1, 0, 0, 0], [0, 1], (1, 3, 4, 12), (2, 11)),
        ("first_correct", [0, 0, 0, 0], [0], (1, 2, 3, 4), (11,)),
        ("first_correct", [1, 0], [0, 1, 1], (1, 12), (2, 11, 13)),
        ("all_correct", [1, 0], [0, 1, 1], (1, 12), (2, 11, 13)),
        ("all_correct", [0, 0, 0], [0, 1, 1], (3, 12, 13), (1, 2, 11)),
        ("best", [1, 0], [0, 1, 1], (2, 12), (1, 11, 13)),
        ("best", [1, 0], [0, 0], (2, 11), (1, 12)),
    ],
)
def test_which_rows_of_a_second_round_stay_and_for_which_rollouts(keep, rollouts, hinted, learned, replaced):
    """Rollouts are 1, 2, ..., the others 11, 12, ...; hints change nothing of the prompt's accuracy."""
    group = Group("p", tuple(row_of(reward, (place,)) for place, reward in enumerate(rollouts, start=1)))
    helped = [row_of(reward, (place,), Source.HINTED, hint=Hint(1, "a")) for place, reward in enumerate(hinted, 11)]
    found = with_hinted_rows(group, helped, keep)
    assert tuple(row.response_ids[0] for row in found.trajectories) == learned
    assert tuple(row.response_ids[0] for row in found.replaced) == replaced
    assert (found.accuracy, len(found.rollouts), len(found.hinted)) == (group.accuracy, len(rollouts), len(hinted))


# ---- a second round that shows the first ----

EACH = {
    "about": "each", "num_rows": 3, "keep": "best", "right": "Yes: {reference}.",
    "wrong": "No: {answers} is not {reference}.", "template": "{prompt} | {response} | {feedback}",
}  # fmt: skip
ALL = {
    "about": "all", "num_rows": 2, "keep": "all_correct", "wrong": "Not {answers}.", "truncated": "Be brief.",
    "template": "{prompt} | {feedback}",
}  # fmt: skip
ASKED = "How many {answers}?"
TASK = task_with(asked=ASKED)


def row(answer: str, *, right: bool = False, cut: bool = False) -> Trajectory:
    """A response whose text is `said ANSWER`."""
    ids = tuple(map(ord, f"said {answer}"))
    end = FinishReason.LENGTH if cut else FinishReason.STOP
    return replace(row_of(float(right)), response_ids=ids, answer=answer, finish_reason=end)


SEVEN = row("7", right=True)
EIGHT_AND_NINE = ["said 8 | No: 8 is not 7.", "said 9 | No: 9 is not 7."]


def retries(config: dict[str, object], context: int | None = None) -> RetryPrompts:
    return RetryPrompts.fitting(RetryConfig.model_validate(config), spelt, read, [TASK], 40, context)


@pytest.mark.parametrize(
    ("config", "rows", "shown"),
    [
        (EACH, [row("8"), SEVEN], ["said 8 | No: 8 is not 7.", "said 7 | Yes: 7.", "said 8 | No: 8 is not 7."]),
        # Each in its turn; of three wrong ones, the first two.
        ({**EACH, "right": None, "num_rows": 2}, [row("8"), SEVEN, row("9"), row("3")], EIGHT_AND_NINE),
        ({**EACH, "right": None}, [SEVEN], []),
        ({**EACH, "num_rows": 1}, [row("{reference}")], ["said {reference} | No: {reference} is not 7."]),
        # One prompt is about all wrong responses, and names each answer once.
        (ALL, [row("8"), row("9"), row("8"), SEVEN], ["Not 8, 9."] * 2),
        (ALL, [row("8", cut=True), row("9")], ["Be brief. Not 9."] * 2),
        (ALL, [row("8", cut=True), row("", cut=True)], ["Be brief."] * 2),
        (ALL, [SEVEN], []),
        # Those that are too long are left out: by default, longer than the longest prompt and 40 tokens.
        (EACH, [row("8"), row("8" * 60), row("9")], EIGHT_AND_NINE),
        ({**EACH, "max_prompt_tokens": 46}, [row("8"), row("10"), row("9")], EIGHT_AND_NINE),
        ({**EACH, "max_prompt_tokens": 45}, [row("8"), row("10"), row("9")], []),
    ],
)
def test_prompts_of_a_second_round_show_responses_and_their_verdicts(config, rows, shown):
    found = retries(config).of(TASK, rows)
    assert all(prompt.hint.level == 1 and not prompt.is_learned_from for prompt in found)
    assert [read(prompt.prompt_ids) for prompt in found] == [f"{ASKED} | {text}" for text in shown]


@pytest.mark.parametrize(("changes", "longest"), [({}, 91), ({"max_prompt_tokens": 64}, 64)])
def test_a_model_without_room_for_the_second_round_is_refused_with_the_number(changes, longest):
    with pytest.raises(DataError, match=rf"have {longest} tokens, .* leave {longest - 1}; .* most {longest - 1}"):
        retries({**EACH, **changes}, longest + 39)
    assert retries({**EACH, **changes}, longest + 40).longest == longest


HINT = {"levels": (0.5,), "keep": "all", "learn": "hinted"}


@pytest.mark.parametrize(
    ("group", "words"),
    [
        ({"anchor": {"success_at_least": 0.8, "success_at_most": 0.2}}, "must not be above"),
        ({"anchor": {"accuracy_at_most": 0.5}}, "must be below success_at_least"),
        ({"anchor": {"success_at_least": 0.3, "success_at_most": 0.4}}, "no number of correct rows among size 4"),
        ({"anchor": {}, "off_policy": 1}, "anchor and off_policy both use traces"),
        ({"anchor": {}, "hint": HINT}, "hint and anchor both sample again where rollouts fail"),
        ({"anchor": {"pieces": 1}}, "greater than or equal to 2"),
        ({"retry": {**ALL, "template": "{prompt}"}}, r"template must have {feedback} once"),
        ({"retry": {**ALL, "template": "{prompt} {response} {feedback}"}}, r"{response} has no meaning with about"),
        ({"retry": {**ALL, "right": "Yes."}}, "right has no effect with about: all"),
        ({"retry": {**ALL, "keep": "all", "num_rows": 9}}, "9 rows are above size 4"),
        ({"retry": {**ALL, "keep": "all", "accuracy_at_most": 0.75}}, "fewer wrong rollouts than the 2 rows"),
        ({"retry": ALL, "off_policy": 1}, "set off_policy: 0"),
        ({"retry": ALL, "hint": HINT}, "hint and retry both sample again"),
    ],
)
def test_bad_settings_are_refused(group: dict[str, object], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        GroupConfig.model_validate({"size": 4, "off_policy": 0} | group)


# ---- teachers ----


class NumberScorer(ServedScorer):
    """Gives every token its own number as its score, without a server."""

    def __init__(self) -> None:
        pass

    def score(self, requests: Sequence[ScoreRequest]) -> list[tuple[float, ...]]:
        return [tuple(map(float, request.token_ids[request.first :])) for request in requests]


def test_rows_get_the_scores_of_what_is_learned_and_none_of_what_an_environment_wrote() -> None:
    sources = (Source.ON_POLICY, Source.ENVIRONMENT, Source.ON_POLICY)
    groups = [
        Group("a", (row_of(0.0, (3, 4, 5), sources), row_of(0.0, (6,)))),
        Group("b", (row_of(0.0, (8, 9)),)),
    ]
    taught = NumberScorer().taught([(groups[0], 0), (groups[0], 1), (groups[1], 0)])
    assert [row.teacher_logprobs for row in taught] == [(3.0, 5.0), (6.0,), (8.0, 9.0)]


TOKENIZER = build_tokenizer(["Add. 2+2 3+3 1 2 3 4 first second"])


def _prompt(uid: str, *traces: str) -> Prompt:
    messages = (Message("system", "Add."), Message("user", f"{uid} {{trace}}"))
    return Prompt(uid, "test", messages, "4", tuple(Trace(text, "somebody") for text in traces))


def _rendered(text: str) -> tuple[int, ...]:
    (ids,) = render_prompts(TOKENIZER, [(Message("system", "Add."), Message("user", text))])
    return tuple(ids)


def test_the_teacher_sees_the_first_trace_in_the_last_message_and_the_policy_keeps_its_prompt() -> None:
    config = SelfTeacher(kind="self", prompt="{problem} {trace}")
    prompts = TeacherPrompts(TOKENIZER, [_prompt("2+2", "first", "second")], config, str, None, "self")
    group = Group("2+2", (row_of(0.0, (2, 3)),) * 2)
    shown = prompts.taught([(group, 0), (group, 1)])
    expected = _rendered("2+2 {trace} first")
    assert [(row.teacher_prompt_ids, row.prompt_ids) for row in shown] == [(expected, (1,))] * 2
    assert prompts.longest == len(expected)
    with pytest.raises(DataError, match=r"^rl.teachers.self.kind: self .* 1 of 2 training prompts have none"):
        TeacherPrompts(TOKENIZER, [_prompt("2+2", "4"), _prompt("3+3")], config, str, None, "self")


def test_the_teacher_of_a_row_sees_the_first_other_right_one_of_its_group() -> None:
    """The first right row itself sees the second; a wrong row sees the first; without another, or too long: none."""
    config = SelfTeacher(kind="self", shows="peer", prompt="{trace} {problem}")
    rows = [row_of(reward, (number, 9)) for number, reward in ((1, 0.0), (2, 1.0), (3, 1.0), (4, 1.0))]
    rows += [row_of(0.0, (1,)), row_of(1.0, (2,) * 9)]
    rows = [replace(row, taught_by=0) for row in rows]
    groups = [Group("2+2", tuple(rows[:4])), Group("3+3", tuple(rows[4:]))]
    first, second, other = map(_rendered, ("2 2+2 {trace}", "3 2+2 {trace}", "2 3+3 {trace}"))
    for limit, of_first in ((None, [first, second, first, first]), (len(first) + 1, [()] * 4)):
        prompts = [_prompt("2+2"), _prompt("3+3")]
        places = [(group, index) for group in groups for index in range(len(group.trajectories))]
        taught = TeacherPrompts(TOKENIZER, prompts, config, lambda ids: str(ids[0]), limit, "self").taught(places)
        assert [row.teacher_prompt_ids for row in taught] == [*of_first, other, ()]
        assert [row.taught_by == NO_TEACHER for row in taught] == [not row.teacher_prompt_ids for row in taught]
