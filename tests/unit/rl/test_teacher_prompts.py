"""What a policy is shown as its own teacher."""

import pytest

from luffy.config.training import SelfTeacher
from luffy.data.templates import render_prompts
from luffy.data.tokenizer import build_tokenizer
from luffy.errors import DataError
from luffy.rl.teaching import TeacherPrompts
from luffy.types import FinishReason, Group, Message, Outcome, Prompt, Source, Trace, Trajectory

CONFIG = SelfTeacher(kind="self", prompt="{problem} {trace}")


def _prompt(uid: str, *traces: str) -> Prompt:
    messages = (Message("system", "Add."), Message("user", f"{uid} {{trace}}"))
    return Prompt(uid, "test", messages, "4", tuple(Trace(text, "somebody") for text in traces))


def _group(uid: str) -> Group:
    row = Trajectory(
        (1,), (2, 3), (Source.ON_POLICY,) * 2, (-1.0, -1.0), (0, 0), 0.0, Outcome.WRONG, FinishReason.STOP
    )  # fmt: skip
    return Group(uid, (row, row))


def test_the_teacher_sees_the_first_trace_in_the_last_message_and_the_policy_keeps_its_prompt() -> None:
    tokenizer = build_tokenizer(["Add. 2+2 first second"])
    prompts = TeacherPrompts(tokenizer, [_prompt("2+2", "first", "second")], CONFIG)
    shown = prompts.taught([_group("2+2")])[0].trajectories
    (expected,) = render_prompts(tokenizer, [(Message("system", "Add."), Message("user", "2+2 {trace} first"))])
    assert [row.teacher_prompt_ids for row in shown] == [tuple(expected)] * 2
    assert [row.prompt_ids for row in shown] == [(1,)] * 2
    assert prompts.longest == len(expected)


def test_a_prompt_without_a_trace_is_refused_in_one_line() -> None:
    with pytest.raises(DataError, match=r"^rl.teacher.kind: self .* 1 of 2 training prompts have none"):
        TeacherPrompts(build_tokenizer(["2+2"]), [_prompt("2+2", "4"), _prompt("3+3")], CONFIG)
