"""What the rows of a step get from a teacher on servers, and what a policy is shown as its own teacher."""

from collections.abc import Sequence

import pytest
from synthetic.trajectories import row_of

from luffy.config.training import SelfTeacher
from luffy.data.templates import render_prompts
from luffy.data.tokenizer import build_tokenizer
from luffy.errors import DataError
from luffy.rl.teaching import ScoreRequest, ServedScorer, TeacherPrompts
from luffy.types import Group, Message, Prompt, Source, Trace

OWN, TOOL = Source.ON_POLICY, Source.ENVIRONMENT


class NumberScorer(ServedScorer):
    """Gives every token its own number as its score, without a server."""

    def __init__(self) -> None:
        pass

    def score(self, requests: Sequence[ScoreRequest]) -> list[tuple[float, ...]]:
        return [tuple(map(float, request.token_ids[request.first :])) for request in requests]


def test_rows_get_the_scores_of_what_is_learned_and_none_of_what_an_environment_wrote() -> None:
    groups = [
        Group("a", (row_of(0.0, (3, 4, 5), (OWN, TOOL, OWN)), row_of(0.0, (6,)))),
        Group("b", (row_of(0.0, (8, 9)),)),
    ]
    taught = NumberScorer().taught(groups)
    found = [[each.teacher_logprobs for each in group.trajectories] for group in taught]
    assert found == [[(3.0, 5.0), (6.0,)], [(8.0, 9.0)]]
    assert [group.uid for group in taught] == ["a", "b"]


CONFIG = SelfTeacher(kind="self", prompt="{problem} {trace}")


def _prompt(uid: str, *traces: str) -> Prompt:
    messages = (Message("system", "Add."), Message("user", f"{uid} {{trace}}"))
    return Prompt(uid, "test", messages, "4", tuple(Trace(text, "somebody") for text in traces))


def _group(uid: str) -> Group:
    return Group(uid, (row_of(0.0, (2, 3)),) * 2)


def test_the_teacher_sees_the_first_trace_in_the_last_message_and_the_policy_keeps_its_prompt() -> None:
    tokenizer = build_tokenizer(["Add. 2+2 first second"])
    prompts = TeacherPrompts(tokenizer, [_prompt("2+2", "first", "second")], CONFIG, str, None)
    shown = prompts.taught([_group("2+2")])[0].trajectories
    (expected,) = render_prompts(tokenizer, [(Message("system", "Add."), Message("user", "2+2 {trace} first"))])
    assert [row.teacher_prompt_ids for row in shown] == [tuple(expected)] * 2
    assert [row.prompt_ids for row in shown] == [(1,)] * 2
    assert prompts.longest == len(expected)


def test_the_teacher_of_a_row_sees_the_first_other_right_one_of_its_group() -> None:
    """The first right row itself sees the second; a wrong row sees the first; without another, or too long: none."""
    tokenizer = build_tokenizer(["Add. 2+2 3+3 1 2 3 4"])
    config = SelfTeacher(kind="self", shows="peer", prompt="{trace} {problem}")
    prompts = [_prompt("2+2"), _prompt("3+3")]

    def taught(limit: int | None) -> list[list[tuple[int, ...]]]:
        teacher = TeacherPrompts(tokenizer, prompts, config, lambda ids: str(ids[0]), limit)
        rows = [row_of(reward, (number, 9)) for number, reward in ((1, 0.0), (2, 1.0), (3, 1.0), (4, 1.0))]
        groups = teacher.taught([Group("2+2", tuple(rows)), Group("3+3", (row_of(0.0, (1,)), row_of(1.0, (2,) * 9)))])
        return [[row.teacher_prompt_ids for row in group.trajectories] for group in groups]

    def shown(peer: str, uid: str) -> tuple[int, ...]:
        (ids,) = render_prompts(tokenizer, [(Message("system", "Add."), Message("user", f"{peer} {uid} {{trace}}"))])
        return tuple(ids)

    first, second = shown("2", "2+2"), shown("3", "2+2")
    assert taught(None) == [[first, second, first, first], [shown("2", "3+3"), ()]]
    assert taught(len(first) + 1) == [[(), (), (), ()], [shown("2", "3+3"), ()]]


def test_a_prompt_without_a_trace_is_refused_in_one_line() -> None:
    with pytest.raises(DataError, match=r"^rl.teacher.kind: self .* 1 of 2 training prompts have none"):
        TeacherPrompts(build_tokenizer(["2+2"]), [_prompt("2+2", "4"), _prompt("3+3")], CONFIG, str, None)
