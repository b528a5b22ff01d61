"""Hinted prompts: the question with the first steps of a trace, for prompts whose bare rollouts fail."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from luffy.config.objective import HintConfig
from luffy.config.prompt_slots import fill_slots
from luffy.rl.rows import HintedPrompt, RolloutTask
from luffy.seeds import derive_seed
from luffy.types import Group, Hint, Message, Trajectory

EncodePrompt = Callable[[Sequence[Message]], tuple[int, ...]]
"""Token ids of a prompt, up to where the policy begins to write."""
_THINK_OPEN, _THINK_CLOSE = "<think>", "</think>"


class HintedPrompts:
    """Writes the hinted prompts of a task. A pure function of the task, the step and the seed.

    A task needs a trace of at least two steps; of several, each step chooses one at random.
    """

    def __init__(self, config: HintConfig, encode: EncodePrompt, seed: int, total_steps: int) -> None:
        self.config = config
        self._encode = encode
        self._seed = seed
        self._first_step = int(round(config.after * total_steps, 6)) + 1

    def are_due(self, step: int) -> bool:
        """Whether `step` (from 1) may use hints."""
        return step >= self._first_step

    def of(self, task: RolloutTask, step: int) -> list[HintedPrompt]:
        """One hinted prompt per row to sample, ordered by level; empty without a usable trace."""
        traces = [trace.reply for trace in task.demonstrations if hint_text(trace.reply, self.config.levels[0])]
        if not traces:
            return []
        trace = traces[derive_seed(self._seed, "hinting trace", step, task.uid) % len(traces)]
        levels = [self._written(task, trace, level) for level in range(1, len(self.config.levels) + 1)]
        return [prompt for prompt in levels for _ in range(self.config.rows_per_level)]

    def longest(self, tasks: Sequence[RolloutTask]) -> int:
        """Number of tokens in the longest hinted prompt of `tasks`; 0 without any."""
        level = len(self.config.levels)
        prompts = (self._written(task, trace.reply, level) for task in tasks for trace in task.demonstrations)
        return max((len(prompt.prompt_ids) for prompt in prompts), default=0)

    def _written(self, task: RolloutTask, trace: str, level: int) -> HintedPrompt:
        hint = Hint(level, hint_text(trace, self.config.levels[level - 1]))
        *before, question = task.messages
        text = fill_slots(self.config.template, {"prompt": question.content, "hint": hint.text})
        return HintedPrompt(
            self._encode([*before, replace(question, content=text)]), hint, self.config.learn == "hinted"
        )


def hint_text(trace: str, share: float) -> str:
    """The first steps of a trace: `share` of them, rounded down, at least one and never the last; empty where the trace
    has a single step.

    Steps are the lines of the reasoning between the thinking tags, or of the whole text without tags; where that is a
    single line, its words.
    """
    reasoning = trace.partition(_THINK_CLOSE)[0].replace(_THINK_OPEN, "", 1)
    lines = [line for line in reasoning.splitlines() if line.strip()]
    steps, joint = (lines, "\n") if len(lines) > 1 else (reasoning.split(), " ")
    count = min(max(int(round(share * len(steps), 6)), 1), len(steps) - 1)
    return joint.join(steps[:count]) if count > 0 else ""


def with_hinted_rows(group: Group, hinted: Sequence[Trajectory], config: HintConfig) -> Group:
    """The group with its first wrong rollouts replaced by hinted rows (`HintConfig.keep`); the replaced rollouts and
    the unused hinted rows go to `Group.replaced`."""
    staying = [row for row in hinted if row.is_correct][:1] if config.keep == "first_correct" else list(hinted)
    wrong = [row for row in group.trajectories if not row.is_correct]
    assert len(staying) <= len(wrong), "checked by the configuration"
    leaving = wrong[: len(staying)]
    rollouts = [row for row in group.trajectories if not any(row is other for other in leaving)]
    unused = [row for row in hinted if not any(row is other for other in staying)]
    return Group(group.uid, (*rollouts, *staying), replaced=(*group.replaced, *leaving, *unused))
