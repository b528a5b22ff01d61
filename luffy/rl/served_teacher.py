"""The teacher of on-policy distillation on vLLM servers (`rl.teacher.kind: served`): scores for the rows of a step.

The stage's process queries the servers right before the trainer learns from the rows, so API keys stay in that process
and the ranks find the scores in the rows. Scores are not journalled: a step repeated after a kill is scored again.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from transformers import PreTrainedTokenizerBase

from luffy.config.execution import ServerConfig
from luffy.config.rl_teacher import ServedTeacher
from luffy.data.templates import decode
from luffy.rl.rows import RolloutTask
from luffy.rollout.served_scores import ScoreRequest, ServedScorer
from luffy.types import Group, Source, Trajectory

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
        known = _texts(tasks, tokenizer)
        return cls(
            ServedScorer.connect(config, teacher.name, longest=longest, known=known, setting="execution.rl_teacher")
        )

    def taught(self, groups: Sequence[Group]) -> list[Group]:
        """The groups, each row with its scores from the teacher."""
        rows = [row for group in groups for row in group.trajectories]
        found = iter(self._scorer.score([_request(row) for row in rows]))
        return [
            replace(group, trajectories=tuple(_scored(row, next(found)) for row in group.trajectories))
            for group in groups
        ]

    def close(self) -> None:
        """Close the connections."""
        self._scorer.close()


def _request(row: Trajectory) -> ScoreRequest:
    return ScoreRequest(row.prompt_ids + row.response_ids, first=len(row.prompt_ids))


def _scored(row: Trajectory, logprobs: Sequence[float]) -> Trajectory:
    pairs = zip(logprobs, row.source, strict=True)
    return replace(row, teacher_logprobs=tuple(logp for logp, source in pairs if source is not Source.ENVIRONMENT))


def _texts(tasks: Sequence[RolloutTask], tokenizer: PreTrainedTokenizerBase) -> Mapping[str, list[int]]:
    texts = [decode(tokenizer, task.prompt_ids) for task in tasks[:_NUM_TEXTS]]
    return {text: tokenizer.encode(text, add_special_tokens=False) for text in texts}
