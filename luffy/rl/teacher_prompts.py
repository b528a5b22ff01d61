"""The prompts that a policy is shown as its own teacher: the problem with its trace (`rl.teacher.kind: self`)."""

from array import array
from collections.abc import Sequence
from dataclasses import replace

from transformers import PreTrainedTokenizerBase

from luffy.config.prompt_slots import fill_slots
from luffy.config.rl_teacher import SelfTeacher
from luffy.data.templates import render_prompts
from luffy.errors import DataError
from luffy.types import Group, Message, Prompt


class TeacherPrompts:
    """The teacher's prompt for each training prompt, tokenized, by uid.

    Raises DataError where a prompt has no trace.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Prompt], config: SelfTeacher) -> None:
        bare = sum(not prompt.traces for prompt in prompts)
        if bare:
            raise DataError(
                f"rl.teacher.kind: self shows the teacher a trace, but {bare} of {len(prompts)} training prompts have "
                "none; take data with a trace for each, add the section synthesize, or use kind: model"
            )
        rendered = render_prompts(tokenizer, [_with_trace(prompt, config.prompt) for prompt in prompts])
        # Four bytes a token: there may be tens of thousands of long traces.
        self._ids = {prompt.uid: array("i", ids) for prompt, ids in zip(prompts, rendered, strict=True)}

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt."""
        return max(map(len, self._ids.values()))

    def taught(self, groups: Sequence[Group]) -> list[Group]:
        """The groups, each row with the prompt that its teacher sees."""
        return [
            replace(
                group,
                trajectories=tuple(
                    replace(row, teacher_prompt_ids=tuple(self._ids[group.uid])) for row in group.trajectories
                ),
            )
            for group in groups
        ]


def _with_trace(prompt: Prompt, template: str) -> tuple[Message, ...]:
    *before, last = prompt.messages
    text = fill_slots(template, {"problem": last.content, "trace": prompt.traces[0].text})
    return (*before, Message(last.role, text))
