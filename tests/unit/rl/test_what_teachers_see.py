"""What teachers of rollouts see and score: a served model's tokens, and the policy as its own teacher."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from synthetic.trajectories import row_of

from luffy.config.group import GroupConfig
from luffy.config.training import SelfTeacher
from luffy.data.templates import render_prompts
from luffy.data.tokenizer import build_tokenizer
from luffy.errors import DataError
from luffy.rl.group_starts import Texts, open_starts
from luffy.rl.teaching import ScoreRequest, ServedScorer, TeacherPrompts
from luffy.types import NO_TEACHER, Group, Message, Prompt, Source, Start, Trace


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


def test_the_teacher_of_a_row_with_a_start_sees_what_the_row_was_sampled_with() -> None:
    """Rows that are learned under the prompt that they were sampled with have no teacher."""
    ask = {"kind": "critique", "about": "all", "wrong": "{reference}", "template": "{feedback} {prompt}"}
    failed = {"accuracy_at_most": 0.0}
    starts = {
        "answer": {"show": ask, "when": failed, "keep": "beside"},
        "hint": {"show": {"kind": "hint", "template": "{prompt} {hint}"}, "dose": 0.5, "learn": "shown"},
    }
    group = GroupConfig.model_validate({"size": 4, "starts": starts})
    texts = Texts(lambda messages: tuple(render_prompts(TOKENIZER, [messages])[0]), str, str)
    opened = open_starts(group.starts, texts, 0, 1, group.size)
    prompts = TeacherPrompts(
        TOKENIZER, [_prompt("2+2")], SelfTeacher(kind="self", shows="start"), str, None, "self", opened
    )
    hinted = row_of(1.0, start=Start("hint", 0.5, "first"), prompt_ids=_rendered("2+2 {trace} first"), taught_by=0)
    told = row_of(1.0, (2,), Source.HINTED, start=Start("answer", shown="4"), taught_by=0)
    found = prompts.taught([(Group("2+2", (row_of(0.0, taught_by=0), hinted), beside=(told,)), i) for i in range(3)])
    assert [row.teacher_prompt_ids for row in found] == [(), (), _rendered("4 2+2 {trace}")]
    assert [row.taught_by for row in found] == [NO_TEACHER, NO_TEACHER, 0]
    assert prompts.longest == 0
