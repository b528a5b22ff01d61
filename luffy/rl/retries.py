"""The prompts of a second round of rollouts (`group.retry`), which show the first one and what the grader found."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from luffy.config.group import RetryConfig, fill_slots
from luffy.errors import DataError
from luffy.rl.rows import HintedPrompt, RolloutTask
from luffy.rl.trace_starts import EncodePrompt
from luffy.types import TOKEN_LIMITS, Hint, Trajectory


@dataclass(frozen=True, slots=True)
class RetryPrompts:
    """Writes the prompts of a task's second round: a pure function of the task and of its first round.

    `reply` is the text of a response. A prompt of more than `longest` tokens is left out.
    """

    config: RetryConfig
    encode: EncodePrompt
    reply: Callable[[Sequence[int]], str]
    longest: int

    @classmethod
    def fitting(
        cls,
        config: RetryConfig,
        encode: EncodePrompt,
        reply: Callable[[Sequence[int]], str],
        tasks: Sequence[RolloutTask],
        max_response_tokens: int,
        context: int | None,
    ) -> "RetryPrompts":
        """Prompts for these tasks. Raises DataError where the longest may have, with its response, more tokens than
        `context` (None: no limit)."""
        longest = config.max_prompt_tokens
        if longest is None:
            empty = cls(config, encode, reply, 0)
            prompts = (empty._written(task, empty._feedback(task, ())).prompt_ids for task in tasks)
            longest = max(map(len, prompts)) + max_response_tokens
        if context is not None and longest + max_response_tokens > context:
            room = context - max_response_tokens
            raise DataError(
                f"objective.group.retry: a prompt of the second round may have {longest} tokens, and {context} "
                f"positions of the model less {max_response_tokens} of rl.max_response_tokens leave {room}; set "
                f"objective.group.retry.max_prompt_tokens to at most {room}, so that longer ones are left out, or take "
                "a model with a longer context"
            )
        return cls(config, encode, reply, longest)

    def of(self, task: RolloutTask, rollouts: Sequence[Trajectory]) -> list[HintedPrompt]:
        """One prompt per row to sample; empty where the first round has nothing to show."""
        shown = [row for row in rollouts if not row.is_correct or self.config.right is not None]
        if self.config.about == "all":
            prompts = [self._written(task, self._feedback(task, shown))] if shown else []
        else:
            prompts = [self._written(task, self._feedback(task, [row]), self.reply(row.response_ids)) for row in shown]
        in_turn = [prompts[place % len(prompts)] for place in range(self.config.num_rows)] if prompts else []
        return [prompt for prompt in in_turn if len(prompt.prompt_ids) <= self.longest]

    def _feedback(self, task: RolloutTask, rows: Sequence[Trajectory]) -> str:
        """What is said of these rows; empty `rows`: everything that may be said, without answers."""
        config, wrong = self.config, [row for row in rows if not row.is_correct]
        is_cut = [config.truncated is not None and row.finish_reason in TOKEN_LIMITS for row in wrong]
        answers = [row.answer for row, cut in zip(wrong, is_cut, strict=True) if row.answer and not cut]
        texts = (
            config.right if not wrong else None,
            config.truncated if any(is_cut) or not rows else None,
            config.wrong if not all(is_cut) or not rows else None,
        )
        said = " ".join(text for text in texts if text is not None)
        named = ", ".join(dict.fromkeys(answers)) or "none"
        return fill_slots(said, {"answers": named, "reference": task.ground_truth})

    def _written(self, task: RolloutTask, feedback: str, response: str = "") -> HintedPrompt:
        *before, question = task.messages
        slots = {"prompt": question.content, "response": response, "feedback": feedback}
        prompt = self.encode([*before, replace(question, content=fill_slots(self.config.template, slots))])
        return HintedPrompt(prompt, Hint(1, feedback), self.config.learn == "hinted")
