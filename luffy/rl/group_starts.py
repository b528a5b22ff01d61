"""Gives rows their starts: traces, prefixes of traces, hints and critiques (`luffy.config.starts`)."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

from luffy.config.starts import (
    Critique,
    DifficultyDose,
    FitDose,
    Keep,
    LadderDose,
    SearchDose,
    StartConfig,
    TraceHint,
    TracePrefix,
    WholeTrace,
    fill_slots,
)
from luffy.errors import DataError
from luffy.rl.doses import Ask, StartRound, distance, dose_of
from luffy.rl.rows import Demonstration, RolloutTask, Row, ShownPrompt, Visit
from luffy.rollout.engine import StopTexts
from luffy.seeds import derive_seed, uniform
from luffy.types import TOKEN_LIMITS, Group, Message, Source, Start, Trajectory

EncodePrompt = Callable[[Sequence[Message]], tuple[int, ...]]
"""Token ids of a prompt, up to where the policy begins to write."""
Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True, slots=True)
class Texts:
    """How starts read and write tokens."""

    encode: EncodePrompt
    decode: Decode
    """Gives the text of tokens and nothing else: a template's opener would put a line end into each."""
    reply: Decode
    """Gives the text of a response."""
    stops: StopTexts | None = None
    """Texts that end a response."""


class Slot(NamedTuple):
    """The trace of a row with a start."""

    trace: Demonstration
    ends: tuple[int, ...] | None = None
    """Where it may be cut (`piece_ends`); None: at any token."""


@dataclass(frozen=True, slots=True)
class GroupStart:
    """One start of every group. Its methods are pure functions of their arguments, the start's configuration and the
    seed."""

    name: str
    config: StartConfig
    texts: Texts
    seed: int
    total_steps: int
    size: int
    """Rows of a group."""
    salt: tuple[str, ...] = ()
    """Tells the random numbers of a second start from those of the first."""
    longest: int = 0
    """Most tokens of a critique's prompt; rows with longer ones are not sampled."""

    @property
    def waits(self) -> bool:
        """Whether its first row is planned once the bare rows are graded."""
        return self.config.is_fallback or isinstance(self.config.dose, LadderDose | DifficultyDose)

    def is_in(self, visit: Visit) -> bool:
        """Whether a group has the start, as far as that is known before any of its rows is sampled."""
        when = self.config.when
        if self.name in visit.task.without:
            return False
        if when is None or when.share is None:
            return True
        return self._uniform("hinted", visit, visit.repeat) < when.share

    def is_due(self, visit: Visit, group: Group) -> bool:
        """Whether the rollouts of a group call for a fallback. Where the environment failed in all of them, or some are
        interrupted, nothing is known."""
        when = self.config.when
        assert when is not None and when.accuracy_at_most is not None
        first_step = int(round(when.after * self.total_steps, 6)) + 1
        known = bool(group.rollouts) and not group.is_open
        return known and group.accuracy <= when.accuracy_at_most and visit.step >= first_step

    def slots(self, visit: Visit, count: int) -> list[Slot | None]:
        """The traces of at most `count` rows of a group; fewer, or none, where the prompt has too few. A row whose slot
        is None gets nothing: rungs of a ladder are sampled in turn also without a trace."""
        found: list[Slot | None] = [*self._slots(visit, count)]
        return found or ([None] * count if isinstance(self.config.dose, LadderDose) else [])

    def _slots(self, visit: Visit, count: int) -> list[Slot]:
        show, step, task = self.config.show, visit.step, visit.task
        match show:
            case TraceHint():
                usable = [Slot(trace) for trace in task.demonstrations if len(steps_of(trace.reply)[0]) > 1]
                return [usable[self._seed("hinting trace", step, task.uid) % len(usable)]] * count if usable else []
            case TracePrefix(pieces=int(pieces)):
                cut = [
                    (trace, piece_ends([*map(self._text, trace.token_ids)], pieces)) for trace in task.demonstrations
                ]
                available = [Slot(trace, ends) for trace, ends in cut if ends]
            case _:
                # Controllers would learn from rows that were given nothing.
                least = 2 if self.config.learns else 1
                available = [Slot(trace) for trace in task.demonstrations if len(trace.token_ids) >= least]
        if not available:
            return []
        if isinstance(self.config.dose, SearchDose):
            return [available[self._seed("anchoring trace", step, task.uid) % len(available)]] * count
        first = self._seed("demonstration", step, task.uid) % len(available)
        if isinstance(show, WholeTrace):  # each is used once; all of them where the trainer is to choose
            count = min(count, len(available)) if show.choose == "in_turn" else len(available)
        stride = 0 if self.config.shared else 1
        return [available[(first + place * stride) % len(available)] for place in range(count)]

    def rows_in_round(self, number: int, count: int) -> int:
        """Number of rows, among the `count` of a group, that are sampled in round `number` (from 0)."""
        match self.config.dose:
            case LadderDose(rungs=rungs):
                return rungs[number].rows
            case FitDose(rounds=rounds):
                return count // rounds
        return count

    def row(self, visit: Visit, slot: Slot | None, place: int, ask: Callable[[int], Ask]) -> Row | None:
        """A row with the start; None where there is no further round. For `place` see `seed_of`; `ask` takes the length
        of the trace."""
        bare = Row(visit.task.prompt_ids, self.seed_of(visit, place))
        if slot is None:
            return bare
        trace, dose = slot.trace, self.config.dose
        if dose is None:
            return replace(bare, trace=trace, num_given=len(trace.token_ids), start=Start(self.name))
        length = self._length(slot)
        share = dose_of(dose, ask(length))
        if share is None:
            return None
        given = replace(bare, start=Start(self.name, share))
        if isinstance(self.config.show, TraceHint):
            text = hint_text(trace.reply, share, least=0 if self.config.may_show_nothing else 1)
            return under(given, self._prompt(visit.task, text)) if text else given
        units = min(math.floor(round(share * length, 6)), length - 1)  # 0.29 x 100 is 29, not 28.999999999999996
        wanted = units if slot.ends is None else slot.ends[units - 1] if units else 0
        seed = self.seed_of(visit, place, units) if isinstance(dose, SearchDose) else bare.seed
        return replace(given, seed=seed, trace=trace, num_given=self._trimmed(trace, wanted))

    def critiques(self, visit: Visit, rollouts: Sequence[Trajectory]) -> list[ShownPrompt]:
        """One prompt per row of a second round; empty where the first round has nothing to show."""
        show, task = self.config.show, visit.task
        assert isinstance(show, Critique)
        shown = [row for row in rollouts if not row.is_correct or show.right is not None]
        if show.about == "all":
            prompts = [self._prompt(task, self._feedback(task, shown))] if shown else []
        else:
            texts = ((self._feedback(task, [row]), self.texts.reply(row.response_ids)) for row in shown)
            prompts = [self._prompt(task, *each) for each in texts]
        rows = self.config.num_rows(self.size)
        in_turn = [prompts[place % len(prompts)] for place in range(rows)] if prompts else []
        return [prompt for prompt in in_turn if len(prompt.prompt_ids) <= self.longest]

    def longest_prompt(self, tasks: Sequence[RolloutTask]) -> int:
        """Number of tokens in the longest prompt that it may write for `tasks`; 0 where it writes none."""
        if isinstance(self.config.show, Critique):
            return self.longest
        if not isinstance(self.config.show, TraceHint):
            return 0
        share = self.config.largest_dose
        texts = ((task, hint_text(trace.reply, share)) for task in tasks for trace in task.demonstrations)
        return max((len(self.prompt_ids(task.messages, text)) for task, text in texts if text), default=0)

    def with_room(self, tasks: Sequence[RolloutTask], max_response_tokens: int, context: int | None) -> "GroupStart":
        """The start with the length that its critiques may have. Raises DataError where the longest may have, with its
        response, more tokens than `context` (None: no limit)."""
        show = self.config.show
        if not isinstance(show, Critique):
            return self
        longest = show.max_prompt_tokens
        if longest is None:
            prompts = (self.prompt_ids(task.messages, self._feedback(task, ())) for task in tasks)
            longest = max(map(len, prompts)) + (max_response_tokens if show.quotes_responses else 0)
        if context is not None and longest + max_response_tokens > context:
            room, setting = context - max_response_tokens, f"objective.group.starts.{self.name}.show"
            raise DataError(
                f"{setting}: a prompt of the second round may have {longest} tokens, and {context} positions of the "
                f"model less {max_response_tokens} of rl.max_response_tokens leave {room}; set "
                f"{setting}.max_prompt_tokens to at most {room}, so that longer ones are left out, or take a model "
                "with a longer context"
            )
        return replace(self, longest=longest)

    def changed(self, group: Group, tried: Sequence[StartRound]) -> Group:
        """The group with the rows of a fallback in it (`keep`); what leaves it, and what was not chosen, goes to
        `Group.replaced`."""
        rows = [row for each in tried for row in each.rows]
        if not rows:
            return group
        if isinstance(self.config.show, WholeTrace):
            return _with_traces(group, rows, self.config.num_rows(self.size), self.config.show.choose != "in_turn")
        if isinstance(self.config.dose, SearchDose):
            return _nearest(group, tried, self.config.dose)
        return _with_second_round(group, rows, self.config.keep)

    def random(self, visit: Visit, index: int) -> Callable[[int], float]:
        """Uniform numbers of row `index`; the same for all rows of a group that shares a dose."""
        purpose = "prefix" if isinstance(self.config.show, TracePrefix) else "hint"
        return partial(self._uniform, purpose, visit, visit.repeat, 0 if self.config.shared else index)

    def seed_of(self, visit: Visit, place: int, pieces: int = 0) -> int:
        """Seed of a row. `place` counts the rows of all visits of the prompt in the step: all rows of their groups, or
        those of a second round; `pieces` those of the trace that a search gives."""
        at = (visit.step, visit.task.uid)
        if not self.config.is_fallback:
            return derive_seed(self.seed, "rollout", *at, place)
        if self.config.is_in_prompt:
            return self._seed("hinted rollout", *at, place)
        return self._seed("branch", *at, pieces, place)

    def _seed(self, purpose: str, *parts: int | str) -> int:
        return derive_seed(self.seed, purpose, *parts, *self.salt)

    def _uniform(self, purpose: str, visit: Visit, *parts: int) -> float:
        return uniform(self.seed, purpose, visit.step, visit.task.uid, *parts, *self.salt)

    def _text(self, token_id: int) -> str:
        return self.texts.decode([token_id])

    def _length(self, slot: Slot) -> int:
        """Units of a trace, of which the last is never shown."""
        if isinstance(self.config.show, TraceHint):
            return len(steps_of(slot.trace.reply)[0])
        return len(slot.trace.token_ids) if slot.ends is None else len(slot.ends) + 1

    def _trimmed(self, trace: Demonstration, wanted: int) -> int:
        """At most `wanted` tokens of a trace, without a stop text, so that the policy has something left to write, and
        up to the end of a turn of the assistant, which the live environment answers itself."""
        if self.texts.stops is not None:
            wanted = self.texts.stops.before_first(trace.token_ids[:wanted])
        while wanted and trace.source and trace.source[wanted - 1] is Source.ENVIRONMENT:
            wanted -= 1
        return wanted

    def prompt_ids(self, messages: Sequence[Message], shown: str, response: str = "") -> tuple[int, ...]:
        """The prompt that shows a hint, or feedback on a response."""
        *before, question = messages
        show = self.config.show
        assert isinstance(show, TraceHint | Critique)
        texts = {"hint": shown} if isinstance(show, TraceHint) else {"feedback": shown, "response": response}
        text = fill_slots(show.template, {"prompt": question.content, **texts})
        return self.texts.encode([*before, replace(question, content=text)])

    def _prompt(self, task: RolloutTask, shown: str, response: str = "") -> ShownPrompt:
        return ShownPrompt(self.prompt_ids(task.messages, shown, response), shown, self.config.learn == "shown")

    def _feedback(self, task: RolloutTask, rows: Sequence[Trajectory]) -> str:
        """What is said of these rows; empty `rows`: everything that may be said, without answers."""
        show = self.config.show
        assert isinstance(show, Critique)
        wrong = [row for row in rows if not row.is_correct]
        is_cut = [show.truncated is not None and row.finish_reason in TOKEN_LIMITS for row in wrong]
        answers = [row.answer for row, cut in zip(wrong, is_cut, strict=True) if row.answer and not cut]
        texts = (
            show.right if not wrong else None,
            show.truncated if any(is_cut) or not rows else None,
            show.wrong if not all(is_cut) or not rows else None,
        )
        said = " ".join(text for text in texts if text is not None)
        named = ", ".join(dict.fromkeys(answers)) or "none"
        return fill_slots(said, {"answers": named, "reference": task.ground_truth})


def under(row: Row, prompt: ShownPrompt) -> Row:
    """The row, to be sampled under a prompt that shows more."""
    assert row.start is not None
    return replace(row, shown=prompt, start=replace(row.start, shown=prompt.text))


def open_starts(
    configs: Mapping[str, StartConfig], texts: Texts, seed: int, total_steps: int, size: int
) -> list[GroupStart]:
    """The starts of a group of `size` rows, in order."""
    return [
        GroupStart(name, config, texts, seed, total_steps, size, (name,) if place else ())
        for place, (name, config) in enumerate(configs.items())
    ]


_FEWEST_LEFT = 2
"""Minimum number of tokens after the last cut: one of the trace's text, and the stop token."""
_THINK_OPEN, _THINK_CLOSE = "<think>", "</think>"


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


def steps_of(trace: str) -> tuple[list[str], str]:
    """The steps of a trace, and what joins them: the lines of the reasoning between the thinking tags, or of the whole
    text without tags; where that is a single line, its words."""
    reasoning = trace.partition(_THINK_CLOSE)[0].replace(_THINK_OPEN, "", 1)
    lines = [line for line in reasoning.splitlines() if line.strip()]
    return (lines, "\n") if len(lines) > 1 else (reasoning.split(), " ")


def hint_text(trace: str, share: float, least: int = 1) -> str:
    """The first steps of a trace: `share` of them, rounded down, at least `least` and never the last; empty where the
    trace has a single step, or the share is 0."""
    steps, joint = steps_of(trace)
    count = min(max(int(round(share * len(steps), 6)), least), len(steps) - 1)
    return joint.join(steps[:count]) if count > 0 and share > 0 else ""


def _with_traces(group: Group, found: Sequence[Trajectory], rows: int, chosen_later: bool) -> Group:
    """Whole traces in place of the last wrong rollouts. Where the trainer is to choose (`luffy.rl.trace_choice`), the
    other correct traces go to `Group.replaced`."""
    wrong = [row for row in group.rollouts if not row.is_correct]
    traces = [row for row in found if row.is_correct] if chosen_later else found
    count = min(len(traces), len(wrong), rows)
    leaving, surplus = wrong[len(wrong) - count :], traces[count:] if chosen_later else []
    staying = _without(group.trajectories, leaving)
    return replace(group, trajectories=(*staying, *traces[:count]), replaced=(*group.replaced, *leaving, *surplus))


def _with_second_round(group: Group, found: Sequence[Trajectory], keep: Keep) -> Group:
    """Rows of a second round in place of the first rollouts, or beside the group."""
    if keep == "beside":
        return replace(group, beside=tuple(found))
    wrong = [row for row in group.rollouts if not row.is_correct]
    right = [row for row in found if row.is_correct]
    if keep == "best":
        staying, leaving = (right or list(found))[:1], list(group.rollouts[:1])
    else:
        staying = {"all": list(found), "first_correct": right[:1], "all_correct": right[: len(wrong)]}[keep]
        staying = staying[: len(wrong)]  # a rollout may have failed
        leaving = wrong[: len(staying)]
    rows, unused = _without(group.trajectories, leaving), _without(found, staying)
    return replace(group, trajectories=(*rows, *staying), replaced=(*group.replaced, *leaving, *unused))


def _nearest(group: Group, tried: Sequence[StartRound], dose: SearchDose) -> Group:
    """The rows of the try nearest to the bounds of a search, then of that with the least dose, among those with a
    correct row; the group as it is where no try has one."""
    solved = [each for each in tried if each.success > 0]
    best = min(solved, key=lambda each: (distance(dose, each), each.dose), default=None)
    others = [row for each in tried if each is not best for row in each.rows]
    if best is None:
        return replace(group, replaced=(*group.replaced, *others))
    return replace(group, trajectories=best.rows, replaced=(*group.replaced, *group.trajectories, *others))


def _without(rows: Sequence[Trajectory], leaving: Sequence[Trajectory]) -> list[Trajectory]:
    return [row for row in rows if not any(row is other for other in leaving)]
