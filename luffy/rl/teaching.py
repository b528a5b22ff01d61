"""What rows need of the teacher of on-policy distillation (`rl.teacher`) before the ranks learn from them.

`kind: served`: scores from vLLM servers. The stage's process queries the servers right before the trainer learns from
the rows, so API keys stay in that process and the ranks find the scores in the rows. Scores are not journalled: a step
repeated after a kill is scored again.

`kind: self`: the prompts that a policy is shown as its own teacher, the problem with its trace.
"""

from array import array
from collections.abc import Sequence
from dataclasses import replace

from transformers import PreTrainedTokenizerBase

from luffy.config.execution import ServerConfig
from luffy.config.group import fill_slots
from luffy.config.training import SelfTeacher, ServedTeacher
from luffy.data.templates import decode, render_prompts
from luffy.errors import DataError
from luffy.rl.rows import RolloutTask
from luffy.rollout.served_scores import ScoreRequest, ServedScorer
from luffy.types import Group, Message, Prompt, Source

_NUM_TEXTS = 16
"""Number of prompts on which the two tokenizers are compared."""


class ServedTeaching:
    """Gives rows the teacher's log-probabilities of their learnable tokens."""

    def __init__(self, scorer: ServedScorer) -> None:
        self._scorer = scorer

    @classmethod
    def connect(
        cls,
        teacher: ServedTeacher,
        config: ServerConfig,
        tasks: Sequence[RolloutTask],
        tokenizer: PreTrainedTokenizerBase,
        longest: int,
    ) -> "ServedTeaching":
        """Connect to the servers, which have to take rows of `longest` tokens; raises ConfigError for unusable ones."""
        texts = [decode(tokenizer, task.prompt_ids) for task in tasks[:_NUM_TEXTS]]
        known = {text: tokenizer.encode(text, add_special_tokens=False) for text in texts}
        return cls(
            ServedScorer.connect(config, teacher.name, longest=longest, known=known, setting="execution.rl_teacher")
        )

    def taught(self, groups: Sequence[Group]) -> list[Group]:
        """The groups, each row with its scores from the teacher."""
        rows = [row for group in groups for row in group.trajectories]
        requests = [ScoreRequest(row.prompt_ids + row.response_ids, first=len(row.prompt_ids)) for row in rows]
        scored = []
        for row, logprobs in zip(rows, self._scorer.score(requests), strict=True):
            pairs = zip(logprobs, row.source, strict=True)
            learnable = tuple(logp for logp, source in pairs if source is not Source.ENVIRONMENT)
            scored.append(replace(row, teacher_logprobs=learnable))
        each = iter(scored)
        return [replace(group, trajectories=tuple(next(each) for _ in group.trajectories)) for group in groups]

    def close(self) -> None:
        """Close the connections."""
        self._scorer.close()


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
        conversations = []
        for prompt in prompts:
            *before, last = prompt.messages
            text = fill_slots(config.prompt, {"problem": last.content, "trace": prompt.traces[0].text})
            conversations.append((*before, Message(last.role, text)))
        rendered = render_prompts(tokenizer, conversations)
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
