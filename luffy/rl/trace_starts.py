"""How much of a trace a row sees: prefixes of a length that the settings give, anchors, hints.

Anchor search finds how much of a trace the policy has to be given before it sometimes succeeds. The method is the
episode anchor search of "BREAD: Branched Rollouts from Expert Anchors" (arXiv 2506.17211). A hinted prompt is the
question with the first steps of a trace.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from luffy.config.group import (
    AnchorConfig,
    BinomialLength,
    EvenlySpacedLength,
    HintConfig,
    Keep,
    PrefixConfig,
    SuccessLadder,
    UniformLength,
    fill_slots,
)
from luffy.config.terms import LevelByHistory
from luffy.objectives.schedules import value_at
from luffy.rl.rows import Demonstration, HintedPrompt, RolloutTask, Visit
from luffy.seeds import derive_seed, uniform
from luffy.types import Group, Hint, Message, Trajectory


def prefix_length(
    config: PrefixConfig, trace_tokens: int, visit: Visit, index: int, count: int, total_steps: int, seed: int
) -> int:
    """Prefix length in tokens of the row `index` (from 0) of `count` prefix-conditioned rows in a group.

    At most all but one of `trace_tokens`, the length of the trace with its stop token.

    The policy always samples at least the last token: a length of the whole trace is reduced by the stop token, and a
    trace that consists of its stop token alone gives an empty prefix.

    A pure function: the random number depends on (seed, step, prompt, visit, row), but not on the row when
    `config.shared`. A share of the trace is rounded down to whole tokens. Schedules are evaluated at the visit's step
    of `total_steps`.
    """
    row = 0 if config.shared else index
    sample = partial(uniform, seed, "prefix", visit.step, visit.task.uid, visit.repeat, row)
    at = partial(value_at, step=visit.step, total_steps=total_steps)
    match config.length:
        case BinomialLength(chunks=most, probability=probability):
            # A trace with fewer tokens than chunks is split into single tokens.
            chunks, wanted = min(most, trace_tokens), at(probability)
            length = sum(sample(chunk) < wanted for chunk in range(chunks)) * trace_tokens // chunks
        case UniformLength(low=low, high=high):
            length = _whole_tokens(at(low) + (at(high) - at(low)) * sample(0), trace_tokens)
        case EvenlySpacedLength(low=least, high=largest):
            # A single row takes the middle of the range; LUFFY's code divides by zero here.
            place = index / (count - 1) if count > 1 else 0.5
            length = _whole_tokens(least + (largest - least) * place, trace_tokens)
        case SuccessLadder(shares=shares):
            length = _whole_tokens(shares[index], trace_tokens)
    return min(length, trace_tokens - 1)


def _whole_tokens(share: float, trace_tokens: int) -> int:
    return math.floor(round(share * trace_tokens, 6))  # 0.29 x 100 is 29, not 28.999999999999996


_FEWEST_LEFT = 2
"""Minimum number of tokens after the last cut: one of the trace's text, and the stop token."""
Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True, slots=True)
class _Try:
    """A group whose rows were sampled after the first pieces of the trace."""

    num_pieces: int
    rows: tuple[Trajectory, ...]

    @property
    def success(self) -> float:
        return sum(row.is_correct for row in self.rows) / len(self.rows)


class AnchorSearch:
    """A binary search for the number of pieces of a trace after which the policy's success rate is within bounds.

    Below the bounds it tries more pieces, above them fewer. It ends with the first try within the bounds, or when no
    number is left.
    """

    def __init__(self, config: AnchorConfig, trace: Demonstration, ends: Sequence[int]) -> None:
        """`ends`: number of tokens in the first 1, 2, ... pieces of the trace, up to the last piece but one."""
        self.trace = trace
        self._config = config
        self._ends = ends
        self._too_few, self._too_many = 0, len(ends) + 1
        self._tries: list[_Try] = []

    @property
    def num_pieces(self) -> int | None:
        """The number of pieces to try next; None: the search has ended."""
        within = self._tries and not self._distance(self._tries[-1])
        if within or self._too_many - self._too_few < 2:
            return None
        return (self._too_few + self._too_many) // 2

    @property
    def num_given(self) -> int:
        """Tokens of the trace that the rows of the next try begin with."""
        assert self.num_pieces is not None, "the search has ended"
        return self._ends[self.num_pieces - 1]

    def observe(self, rows: Sequence[Trajectory]) -> None:
        """Record the graded rows of the try with `num_pieces` pieces."""
        assert self.num_pieces is not None, "the search has ended"
        tried = _Try(self.num_pieces, tuple(rows))
        if tried.success < self._config.success_at_least:
            self._too_few = tried.num_pieces
        elif tried.success > self._config.success_at_most:
            self._too_many = tried.num_pieces
        self._tries.append(tried)

    def group(self, bare: Group) -> Group:
        """The group to train on: among the tries with a correct row, the one nearest to the bounds, then the one with
        the fewest pieces; `bare` where no try has a correct row.

        All other rows go to `Group.replaced`.
        """
        solved = [each for each in self._tries if each.success > 0]
        if not solved:
            return Group(bare.uid, bare.trajectories, replaced=(*bare.replaced, *_rows(self._tries)))
        best = min(solved, key=lambda each: (self._distance(each), each.num_pieces))
        others = [each for each in self._tries if each is not best]
        return Group(bare.uid, best.rows, replaced=(*bare.replaced, *bare.trajectories, *_rows(others)))

    def _distance(self, tried: _Try) -> float:
        """Distance of the success rate from the bounds; 0 within them."""
        return max(self._config.success_at_least - tried.success, tried.success - self._config.success_at_most, 0.0)


def _rows(tries: Sequence[_Try]) -> list[Trajectory]:
    return [row for tried in tries for row in tried.rows]


@dataclass(frozen=True, slots=True)
class Anchors:
    """Creates the anchor search of a task, a pure function of the task, the step and the seed.

    A task needs a trace that can be cut into at least two pieces; of several, each step chooses one at random.
    """

    config: AnchorConfig
    decode: Decode
    """Gives the text of tokens and nothing else: a template's opener would put a line end into each."""
    seed: int

    def search(self, task: RolloutTask, step: int) -> AnchorSearch | None:
        """A new search; None where no trace of the task can be cut."""
        usable = []
        for trace in task.demonstrations:
            if ends := piece_ends([self.decode([token_id]) for token_id in trace.token_ids], self.config.pieces):
                usable.append((trace, ends))
        if not usable:
            return None
        trace, ends = usable[derive_seed(self.seed, "anchoring trace", step, task.uid) % len(usable)]
        return AnchorSearch(self.config, trace, ends)


def piece_ends(texts: Sequence[str], pieces: int) -> tuple[int, ...]:
    """Cuts of a trace into at most `pieces` pieces: the number of tokens before each cut, ascending.

    `texts` are the texts of the trace's tokens. Pieces have nearly equal numbers of steps: lines, or words where the
    trace is one line, or tokens where it shows no words. At least two tokens follow the last cut. Empty for a trace of
    one step.
    """
    places = range(1, len(texts) - _FEWEST_LEFT + 1)
    lines = [place for place in places if "\n" in texts[place - 1]]
    words = [place for place in places if texts[place][:1].isspace() or texts[place - 1][-1:].isspace()]
    steps = lines or words or list(places)
    num_pieces = min(pieces, len(steps) + 1)
    return tuple(steps[piece * (len(steps) + 1) // num_pieces - 1] for piece in range(1, num_pieces))


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
        self._total_steps = total_steps
        self._first_step = int(round(config.after * total_steps, 6)) + 1

    def are_due(self, step: int) -> bool:
        """Whether `step` (from 1) may use hints where the bare prompt fails."""
        return self.config.groups is None and step >= self._first_step

    def of(self, task: RolloutTask, step: int) -> list[HintedPrompt]:
        """One hinted prompt per row to sample, ordered by level; empty without a usable trace."""
        levels = range(1, len(self.config.levels) + 1)
        return self._at(task, step, [level for level in levels for _ in range(self.config.rows_per_level)])

    def of_group(self, visit: Visit, size: int) -> list[HintedPrompt]:
        """The prompt of each of `size` rows in a hinted group (`HintConfig.groups`); empty for a group of the bare
        prompt, and without a usable trace."""
        groups, task = self.config.groups, visit.task
        if groups is None or uniform(self._seed, "hinted", visit.step, task.uid, visit.repeat) >= groups.share:
            return []
        level = task.hint_level
        if not isinstance(groups.level, LevelByHistory):
            level = round(value_at(groups.level, visit.step, self._total_steps))
        return self._at(task, visit.step, [level] * size)

    def _at(self, task: RolloutTask, step: int, levels: Sequence[int]) -> list[HintedPrompt]:
        traces = [trace.reply for trace in task.demonstrations if hint_text(trace.reply, self.config.levels[0])]
        if not traces:
            return []
        trace = traces[derive_seed(self._seed, "hinting trace", step, task.uid) % len(traces)]
        written = {level: self._written(task, trace, level) for level in dict.fromkeys(levels)}
        return [written[level] for level in levels]

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


def with_hinted_rows(group: Group, hinted: Sequence[Trajectory], keep: Keep) -> Group:
    """The group with hinted rows in place of rollouts (`Keep`); the replaced rollouts and the unused hinted rows go to
    `Group.replaced`."""
    wrong = [row for row in group.trajectories if not row.is_correct]
    right = [row for row in hinted if row.is_correct]
    if keep == "best":
        staying, leaving = (right or list(hinted))[:1], list(group.trajectories[:1])
    else:
        staying = {"all": list(hinted), "first_correct": right[:1], "all_correct": right[: len(wrong)]}[keep]
        assert len(staying) <= len(wrong), "checked by the configuration"
        leaving = wrong[: len(staying)]
    rollouts = [row for row in group.trajectories if not any(row is other for other in leaving)]
    unused = [row for row in hinted if not any(row is other for other in staying)]
    return Group(group.uid, (*rollouts, *staying), replaced=(*group.replaced, *leaving, *unused))
