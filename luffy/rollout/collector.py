"""From prompts to graded groups: rollouts from the engine, complete demonstrations beside them."""

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from luffy.config.objective import GroupConfig
from luffy.grading.pool import Grade, GradeRequest, GraderPool
from luffy.rollout.engine import Completion, RolloutEngine, RolloutRequest, SamplingParams
from luffy.seeds import derive_seed
from luffy.types import FinishReason, Group, Source, Trajectory

DEMONSTRATION_VERSION = -1
"""Weight version of tokens that no weights of this run have drawn."""


@dataclass(frozen=True, slots=True)
class Demonstration:
    """A trace in tokens, the stop token at its end."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...] | None
    """The author's, where known."""


@dataclass(frozen=True, slots=True)
class RolloutTask:
    """A prompt in tokens, with what it takes to grade and to guide."""

    uid: str
    prompt_ids: tuple[int, ...]
    ground_truth: str
    demonstrations: tuple[Demonstration, ...]


class GroupCollector:
    """Rolls out and grades; a demonstration enters as a whole row, after the rollouts, and is graded like them."""

    def __init__(
        self,
        grader: GraderPool,
        decode: Callable[[Sequence[int]], str],
        params: SamplingParams,
        group: GroupConfig,
        seed: int,
    ) -> None:
        self._grader = grader
        self._decode = decode
        self._params = params
        self._group = group
        self._seed = seed

    def collect(self, engine: RolloutEngine, tasks: Sequence[RolloutTask], step: int) -> list[Group]:
        """One group a task, in the order of the tasks: rollouts first, demonstrations last."""
        guides = [self._demonstrations(task, step) for task in tasks]
        requests = [
            RolloutRequest(task.prompt_ids, derive_seed(self._seed, "rollout", step, task.uid, first + sample))
            for task, demonstrations, first in zip(tasks, guides, self._first_samples(tasks), strict=True)
            for sample in range(self._group.size - len(demonstrations))
        ]
        completions = iter(engine.generate(requests, self._params))
        replies = [
            _Replies(task, tuple(itertools.islice(completions, self._group.size - len(demonstrations))), demonstrations)
            for task, demonstrations in zip(tasks, guides, strict=True)
        ]
        return self._graded(replies)

    def _first_samples(self, tasks: Sequence[RolloutTask]) -> list[int]:
        """Where each task's samples start to count: a prompt that comes twice in a step is sampled anew."""
        seen: Counter[str] = Counter()
        firsts = []
        for task in tasks:
            firsts.append(seen[task.uid] * self._group.size)
            seen[task.uid] += 1
        return firsts

    def _demonstrations(self, task: RolloutTask, step: int) -> tuple[Demonstration, ...]:
        """As many as the group wants and the task has; a task with more of them takes turns over the steps."""
        available = task.demonstrations
        count = min(self._group.off_policy, len(available))
        start = derive_seed(self._seed, "demonstration", step, task.uid) % max(len(available), 1)
        return tuple(available[(start + i) % len(available)] for i in range(count))

    def _graded(self, replies: Sequence["_Replies"]) -> list[Group]:
        wanted = [
            GradeRequest(text, reply.task.ground_truth) for reply in replies for text in reply.texts(self._decode)
        ]
        grades = iter(self._grader.grade(wanted))
        return [
            Group(
                reply.task.uid,
                tuple(_rollout_row(reply.task, completion, next(grades)) for completion in reply.completions)
                + tuple(_demonstration_row(reply.task, guide, next(grades)) for guide in reply.demonstrations),
            )
            for reply in replies
        ]


@dataclass(frozen=True, slots=True)
class _Replies:
    """Everything that was said to one prompt, not graded yet."""

    task: RolloutTask
    completions: tuple[Completion, ...]
    demonstrations: tuple[Demonstration, ...]

    def texts(self, decode: Callable[[Sequence[int]], str]) -> list[str]:
        return [decode(completion.token_ids) for completion in self.completions] + [
            demonstration.text for demonstration in self.demonstrations
        ]


def _rollout_row(task: RolloutTask, completion: Completion, grade: Grade) -> Trajectory:
    length = len(completion.token_ids)
    return Trajectory(
        prompt_ids=task.prompt_ids,
        response_ids=completion.token_ids,
        source=(Source.ON_POLICY,) * length,
        logp_behavior=completion.logprobs,
        weight_version=(completion.weight_version,) * length,
        reward=grade.reward,
        outcome=grade.outcome,
        finish_reason=completion.finish_reason,
    )


def _demonstration_row(task: RolloutTask, demonstration: Demonstration, grade: Grade) -> Trajectory:
    length = len(demonstration.token_ids)
    return Trajectory(
        prompt_ids=task.prompt_ids,
        response_ids=demonstration.token_ids,
        source=(Source.OFF_POLICY,) * length,
        logp_behavior=demonstration.logprobs or (float("nan"),) * length,
        weight_version=(DEMONSTRATION_VERSION,) * length,
        reward=grade.reward,
        outcome=grade.outcome,
        finish_reason=FinishReason.STOP,
    )
