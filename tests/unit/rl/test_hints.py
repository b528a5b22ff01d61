"""Hinted prompts: what they show, which tasks have them, and from which step."""

import pytest
from synthetic.trajectories import row_of

from luffy.config.group import HintConfig
from luffy.rl.rows import Demonstration, RolloutTask
from luffy.rl.trace_starts import HintedPrompts, hint_text, with_hinted_rows
from luffy.types import Group, Hint, Message, Source, Trajectory

TRACE = "<think>one\n two\n\nthree\nfour\n</think>\\boxed{7}"


def config(**changes: object) -> HintConfig:
    values = {"levels": (0.25, 0.5, 0.9), "keep": "first_correct", "learn": "bare", "template": "{prompt} | {hint}"}
    return HintConfig.model_validate({**values, **changes})


def task(*replies: str) -> RolloutTask:
    messages = (Message("system", "Be brief."), Message("user", "What is {hint}?"))
    return RolloutTask("p", (1,), "7", tuple(Demonstration(text, (2,), None) for text in replies), messages=messages)


def hints(settings: HintConfig, seed: int = 7, total_steps: int = 100) -> HintedPrompts:
    def encode(messages: object) -> tuple[int, ...]:
        encoded.append(messages)
        return (len(encoded),)

    encoded: list[object] = []
    prompts = HintedPrompts(settings, encode, seed, total_steps)
    prompts.encoded = encoded  # type: ignore[attr-defined]
    return prompts


@pytest.mark.parametrize(
    ("share", "shown"),
    [
        (0.01, "one"),
        (0.25, "one"),
        (0.5, "one\n two"),
        (0.75, "one\n two\nthree"),
        (0.99, "one\n two\nthree"),
    ],
)
def test_a_hint_is_the_first_steps_of_the_reasoning_and_never_the_last(share: float, shown: str) -> None:
    assert hint_text(TRACE, share) == shown


def test_a_trace_of_one_line_is_cut_at_words_and_one_of_a_single_step_gives_no_hint() -> None:
    assert hint_text("so it is \\boxed{7}", 0.5) == "so it"
    assert hint_text("\\boxed{7}", 0.5) == hint_text("", 0.5) == hint_text("<think>", 0.5) == ""


def test_the_hint_stands_in_the_last_message_of_a_prompt_of_its_own() -> None:
    prompts = hints(config(rows_per_level=2))
    found = prompts.of(task(TRACE), step=1)
    assert [prompt.hint.level for prompt in found] == [1, 1, 2, 2, 3, 3]
    assert found[2].hint == Hint(2, "one\n two") and not found[2].is_learned_from
    assert found[2].prompt_ids == (2,) == found[3].prompt_ids
    system, question = prompts.encoded[1]  # type: ignore[attr-defined]
    assert (system.content, question.content) == ("Be brief.", "What is {hint}? | one\n two")


def test_tasks_without_a_trace_of_two_steps_have_no_hints_and_several_traces_take_turns() -> None:
    prompts = hints(config(levels=(0.5,)))
    assert prompts.of(task(), step=1) == prompts.of(task("\\boxed{7}"), step=1) == []
    both = task("a\nb\n7", "\\boxed{7}", "c\nd\n7")
    shown = [prompts.of(both, step)[0].hint.text for step in range(1, 30)]
    assert set(shown) == {"a", "c"}
    assert shown == [hints(config(levels=(0.5,))).of(both, step)[0].hint.text for step in range(1, 30)]


def test_the_longest_prompt_is_that_of_the_highest_level() -> None:
    prompts = HintedPrompts(config(), lambda messages: tuple(range(len(messages[-1].content))), 7, 10)
    assert prompts.longest([task(), task("a\nb"), task(TRACE)]) == len("What is {hint}? | one\n two\nthree")
    assert prompts.longest([task()]) == 0


def test_hints_begin_after_their_share_of_the_steps() -> None:
    late = hints(config(after=0.29), total_steps=100)
    assert [late.are_due(step) for step in (1, 29, 30, 100)] == [False, False, True, True]
    assert hints(config()).are_due(1)


def hinted_row(reward: float, hint: Hint) -> Trajectory:
    return row_of(reward, source=Source.HINTED, hint=hint)


def test_the_accuracy_of_a_group_is_that_of_bare_rollouts_whatever_hints_achieve() -> None:
    hinted = [hinted_row(1.0, Hint(1, "a")), hinted_row(0.0, Hint(1, "a"))]
    bare = Group("p", (row_of(0.0), row_of(0.0), row_of(0.0)))
    found = with_hinted_rows(bare, hinted, config(keep="all"))
    assert [each.hint is not None for each in found.trajectories] == [False, True, True]
    assert found.accuracy == 0.0 and len(found.rollouts) == 3 and list(found.hinted) == hinted


def test_right_rollouts_stay_and_hinted_rows_that_are_all_wrong_change_nothing() -> None:
    right, wrong = row_of(1.0), [row_of(0.0) for _ in range(3)]
    first = config(keep="first_correct", accuracy_at_most=0.5)
    helped = with_hinted_rows(
        Group("p", (right, *wrong)), [hinted_row(0.0, Hint(1, "a")), hinted_row(1.0, Hint(2, "ab"))], first
    )
    assert [each.reward for each in helped.trajectories] == [1.0, 0.0, 0.0, 1.0]
    assert len(helped.replaced) == 2 and helped.accuracy == 0.25
    unhelped = with_hinted_rows(Group("p", tuple(wrong)), [hinted_row(0.0, Hint(1, "a"))], first)
    assert unhelped.trajectories == tuple(wrong) and len(unhelped.replaced) == 1
