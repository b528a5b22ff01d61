"""Starts: what the rows of a prompt are given before the policy writes, how much of it, and who decides how much.

A start shows something (a whole trace, a prefix of one, a hint in the prompt, a critique of earlier rollouts) to some
rows of a group, in every group or only where the policy fails. The dose is the share of the trace that is shown: a
number, a schedule, a random number, or a controller that looks at what the policy has solved. `luffy.rl.group_starts`
gives them, `luffy.rl.doses` has the rule of every dose.
"""

import itertools
import re
from collections.abc import Iterator, Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Field, PositiveInt

from luffy.config.strict import Fraction, PositiveShare, Share, ShareBelowOne, StrictModel
from luffy.config.terms import (
    Schedule,
    ScheduledValue,
    Written,
    bounds,
    depends_on_length,
    number_as_constant,
)


class WholeTrace(StrictModel):
    """A trace as a row of its own, of which nothing is sampled: LUFFY (arXiv 2504.14945). A prompt with fewer traces
    gets more rollouts."""

    kind: Literal["trace"]
    choose: Literal["in_turn", "likeliest_answer"] = "in_turn"
    """Which of a prompt's traces. `in_turn`: consecutive ones, from another start in every step; `likeliest_answer`: of
    the correct ones those after whose reasoning the policy of this step gives the tokens of the reference answer the
    highest mean probability (AMPO, arXiv 2510.02227)."""


class TracePrefix(StrictModel):
    """The beginning of a trace in the response, which the policy continues. It is never the whole trace: the policy
    samples at least the last token. A row with an empty prefix is a rollout."""

    kind: Literal["prefix"]
    pieces: Annotated[int, Field(ge=2)] | None = None
    """Cut between pieces of equal numbers of steps, the last of which is never given; fewer where the trace has fewer
    steps. Steps are the trace's lines, or its words where it has one line. None: cut at any token."""


class TraceHint(StrictModel):
    """The first steps of a trace in the prompt. Steps are the lines of its reasoning, or its words where it has one
    line. A hint never has the last step, so a trace of one step gives none. Shares are rounded down to whole steps: at
    least one where the dose is fixed, perhaps none where it is random or a controller's, and the prompt is then
    bare."""

    kind: Literal["hint"]
    template: str = "{prompt}\n\nHint: {hint}"
    """Last user message of the prompt; `{prompt}` is its text without the hint. A language model has to be told to
    solve the problem from the start instead of continuing the hint."""

    def _complaints(self) -> Iterator[str]:
        yield from slot_complaints(self.template, "prompt", "hint")


class Critique(StrictModel):
    """Responses of the first round and what the grader found, or just the reference answer, in the prompt of a second
    one: Critique-GRPO (arXiv 2506.03106), LTE (2510.26109), HDPO (2603.23871)."""

    kind: Literal["critique"]
    about: Literal["each", "all"]
    """`each`: one response of the first round, which the rows take in turn; `all`: the wrong ones together."""
    wrong: str
    """Feedback on wrong responses; `{answers}` are their different answers, `{reference}` is the reference answer."""
    truncated: str | None = None
    """Feedback on wrong responses that ran into the length limit; None: as on other wrong ones."""
    right: str | None = None
    """With `about: each`, feedback on a right response; None: right ones are not shown."""
    template: str
    """Last user message of the prompt; `{prompt}` is its text, `{feedback}` the feedback and, with `about: each`,
    `{response}` the response."""
    max_prompt_tokens: PositiveInt | None = None
    """Longest prompt of the second round; a row whose prompt would be longer is not sampled. None: as long as a prompt
    with, where it quotes from responses, one of `rl.max_response_tokens`; for that the model has to have room."""

    @property
    def quotes_responses(self) -> bool:
        """Whether a prompt holds texts of the policy, which may be long."""
        feedback = (self.wrong, self.truncated or "", self.right or "")
        return "{response}" in self.template or any("{answers}" in text for text in feedback)

    def _complaints(self) -> Iterator[str]:
        yield from slot_complaints(self.template, "prompt", "feedback")
        if self.about == "all" and "{response}" in self.template:
            yield "template: {response} has no meaning with about: all; remove it, or set about: each"
        if self.about == "all" and self.right is not None:
            yield "right has no effect with about: all, which is about the wrong responses; remove it"


Show = Annotated[WholeTrace | TracePrefix | TraceHint | Critique, Field(discriminator="kind")]


class UniformDose(Written):
    """U(low, high), both of which may move over the run. LUFFY's strategies: `random` is low 0 and high 1; `linear` has
    low = high falling to 0; `linear_max` is low 0 and high falling in ten levels; `reverse_linear` rises instead.
    Prefix-RFT (arXiv 2507.01679) lets low fall."""

    kind: Literal["uniform"]
    low: ScheduledValue
    high: ScheduledValue

    def _complaints(self) -> Iterator[str]:
        yield from _share_complaints(low=self.low, high=self.high)

    def formula(self) -> str:
        return f"d ~ U({self.low.formula()}, {self.high.formula()})"


class BinomialDose(Written):
    """UFT (arXiv 2505.16984): of `pieces` equal pieces of the trace, Binomial(pieces, probability) are given."""

    kind: Literal["binomial"]
    pieces: PositiveInt = 5
    probability: ScheduledValue

    def _complaints(self) -> Iterator[str]:
        yield from _share_complaints(probability=self.probability)

    def formula(self) -> str:
        return f"d = Binomial({self.pieces}, {self.probability.formula()}) / {self.pieces}"


class EvenDose(Written):
    """Evenly spaced shares from low to high over the rows: LUFFY's `fixed`, StepHint (arXiv 2507.02841)."""

    kind: Literal["even"]
    low: Share = 0.0
    high: Share = 1.0
    written: ClassVar[str] = "d from {low:g} to {high:g}, evenly spaced over the rows"

    def _complaints(self) -> Iterator[str]:
        if self.low >= self.high:
            yield f"low {self.low} must be below high {self.high}"


class LevelsDose(Written):
    """One share after the other, each for as many rows: Scaf-GRPO (arXiv 2510.19807)."""

    kind: Literal["levels"]
    shares: Annotated[tuple[Fraction, ...], Field(min_length=1, strict=False)]

    def _complaints(self) -> Iterator[str]:
        yield from _rising(self.shares)

    def formula(self) -> str:
        return "d = " + " or ".join(f"{share:g}" for share in self.shares)


class Rung(StrictModel):
    """Rows of a group that are sampled together, after those of earlier rungs."""

    rows: PositiveInt = 1
    share: PositiveShare
    """Share of the trace that the rows begin with."""
    below: PositiveShare
    """Only where the share of correct rows so far is below this; else they are rollouts."""


class LadderDose(Written):
    """TRAPO's micro-groups (arXiv 2512.17636): after the rollouts, rung after rung is sampled, whose rows begin with
    some of the trace where the rows so far have failed too often. Each rung is a call of the engine."""

    kind: Literal["ladder"]
    rungs: Annotated[tuple[Rung, ...], Field(min_length=1, strict=False)]

    @property
    def num_rows(self) -> int:
        return sum(rung.rows for rung in self.rungs)

    def formula(self) -> str:
        rungs = (f"{rung.share:g} for {rung.rows} where it is below {rung.below:g}" for rung in self.rungs)
        return f"d by the share of correct rows so far: {', then '.join(rungs)}, else 0"


class SearchDose(Written):
    """A binary search over the pieces of a trace for as many as make the policy succeed sometimes, within one visit of
    a prompt: BREAD (arXiv 2506.17211). Every try is a call of the engine."""

    kind: Literal["search"]
    at_least: Fraction = 0.25
    """Share of correct rows below which more pieces are given."""
    at_most: Fraction = 0.75
    """Share of correct rows above which fewer pieces are given."""
    written: ClassVar[str] = "d by binary search, until between {at_least:g} and {at_most:g} of the rows are correct"

    def _complaints(self) -> Iterator[str]:
        if self.at_least > self.at_most:
            yield f"at_least {self.at_least:g} must not be above at_most {self.at_most:g}"


class FitDose(Written):
    """SEELE (arXiv 2509.06923): the rows are sampled in rounds; after each, a logistic curve of success over the dose
    is fitted to the rounds so far, and the next dose is where it meets `target`."""

    kind: Literal["fit"]
    target: Fraction = 0.5
    """Share of correct rows that is wanted."""
    rounds: Annotated[int, Field(ge=2)] = 4
    """Calls of the engine, each with as many of the rows."""
    first: PositiveShare = 1.0
    """Dose of the first round; 1 is all but the last token."""
    written: ClassVar[str] = (
        "d = {first:g} in the first of {rounds} rounds, then where the fitted success is {target:g}"
    )


class DifficultyDose(Written):
    """ADHint (arXiv 2512.13095): the more of the group's bare rollouts fail, the more of the trace is given."""

    kind: Literal["difficulty"]
    low: Share
    """Where all of them are correct."""
    high: Share
    """Where none is."""
    noise: Share = 0.0
    """A number from U(-noise, noise) is added for each row."""

    def _complaints(self) -> Iterator[str]:
        if self.low >= self.high:
            yield f"low {self.low:g} must be below high {self.high:g}"

    def formula(self) -> str:
        noise = f" + U(-{self.noise:g}, {self.noise:g})" if self.noise else ""
        return f"d = {self.low:g} + {self.high - self.low:g} x (1 - the group's share of correct rollouts){noise}"


class PromptLevels(Written):
    """Levels that each prompt's groups move one by one, from the lowest on: POPE (arXiv 2601.18779) looks for the
    shortest hint under which a prompt is ever solved."""

    kind: Literal["prompt_levels"]
    shares: Annotated[tuple[Fraction, ...], Field(min_length=1, strict=False)]
    more_below: PositiveShare
    """Share of correct rows below which the prompt's next group has the next higher level."""
    fewer_above: ShareBelowOne | None = None
    """Share above which it has the next lower level; None: levels only rise."""

    def _complaints(self) -> Iterator[str]:
        yield from _rising(self.shares)
        if self.fewer_above is not None and self.fewer_above < self.more_below:
            yield f"fewer_above {self.fewer_above:g} must not be below more_below {self.more_below:g}"

    def formula(self) -> str:
        down = "" if self.fewer_above is None else f", one down where it is above {self.fewer_above:g}"
        shares = " or ".join(f"{share:g}" for share in self.shares)
        return (
            f"d = {shares}, for each prompt one up where the share of correct rows was below {self.more_below:g}{down}"
        )


class PromptBisection(Written):
    """AdaBack (arXiv 2506.18110): an interval for each prompt, from [0, 1] on, in which the dose is drawn at random.
    Failure makes it the lower end; success the upper one, with the lower end back at 0."""

    kind: Literal["prompt_bisection"]
    success: PositiveShare = 0.5
    """Share of correct rows from which on a group has succeeded."""
    written: ClassVar[str] = (
        "d ~ U(lo, hi) of the prompt, at first U(0, 1); lo = d where fewer than {success:g} of its rows were correct, "
        "else hi = d and lo = 0"
    )


class PromptFrontier(Written):
    """MFC (arXiv 2609.13997): a prompt's frontier, at first all of the trace, falls to what was shown whenever the
    policy succeeds with less."""

    kind: Literal["prompt_frontier"]
    success: PositiveShare = 0.5
    """Share of correct rows from which on a group has succeeded."""
    written: ClassVar[str] = (
        "d = u / n with u ~ U{{0, ..., g}} of n steps; g of the prompt, at first n, becomes u where at least "
        "{success:g} of its rows were correct"
    )


class BatchRatio(Written):
    """G2RPO-A (arXiv 2508.13023): one share for all prompts, which falls as the accuracy of a step rises above that of
    the two steps before, and rises as it falls. The accuracy is that of all rows, also of prompts without a trace."""

    kind: Literal["batch_ratio"]
    first: PositiveShare = 1.0
    every: Annotated[int, Field(ge=1)] = 3
    """Steps between two changes."""
    written: ClassVar[str] = (
        "d of all prompts, at first {first:g}; every {every} steps times the mean accuracy of the two steps before "
        "over the step's own"
    )


class BatchRoot(Written):
    """AdaPrefix-GRPO (arXiv 2607.07674): one share for all prompts, moved to where a batch succeeds as often as wanted,
    with an offset for each prompt, under an envelope that falls over the run."""

    kind: Literal["batch_root"]
    target: Fraction = 0.5
    """Share of correct rows that is wanted."""
    first: Share = 0.5
    every: Annotated[int, Field(ge=1)] = 10
    """Steps whose rows are averaged before the share is changed."""
    gain: Share = 0.0
    """Offset of a prompt: `gain` times (target - its running share of correct rows, over its earlier visits)."""
    envelope: ScheduledValue
    """Largest dose; it falls to 0, so that the run ends without given tokens."""
    written: ClassVar[str] = (
        "d of all prompts, at first {first:g}, every {every} steps nearer to where {target:g} of the rows are correct"
    )

    def _complaints(self) -> Iterator[str]:
        yield from _share_complaints(envelope=self.envelope)

    def formula(self) -> str:
        offset = f" + {self.gain:g} x ({self.target:g} - the prompt's own share)" if self.gain else ""
        return f"{super().formula()}{offset}, at most {self.envelope.formula()}"


RoundsDose = LadderDose | SearchDose | FitDose
PromptMemory = PromptLevels | PromptBisection | PromptFrontier
BatchMemory = BatchRatio | BatchRoot
Dose = Annotated[
    Schedule
    | UniformDose
    | BinomialDose
    | EvenDose
    | LevelsDose
    | RoundsDose
    | DifficultyDose
    | PromptMemory
    | BatchMemory,
    Field(discriminator="kind"),
    BeforeValidator(number_as_constant),
]
"""Share of a trace that a row is shown, from 0 to 1."""


class When(StrictModel):
    """The groups that have a start; one of three conditions."""

    share: PositiveShare | None = None
    """Each with this probability: QuestA (arXiv 2507.13266), POPE (2601.18779)."""
    accuracy_at_most: Share | None = None
    """Only where the share of correct rollouts of the bare prompt, which are sampled first, is at most this."""
    after: ShareBelowOne = 0.0
    """With `accuracy_at_most`: share of the stage's steps, at its beginning, without the start."""
    pass_rate_at_most: ShareBelowOne | None = None
    """Only prompts whose running pass rate in earlier steps is at most this, or that have none yet."""
    memory: ShareBelowOne = 0.5
    """With `pass_rate_at_most`: weight of the previous running pass rate when a new group's is averaged in; 0: only the
    last group counts."""

    def _complaints(self) -> Iterator[str]:
        given = [name for name in ("share", "accuracy_at_most", "pass_rate_at_most") if getattr(self, name) is not None]
        if len(given) != 1:
            yield (
                f"give one of share, accuracy_at_most and pass_rate_at_most, not {' and '.join(given) or 'none'}; "
                "without the field when, all groups have the start"
            )
        for name, condition in {"after": "accuracy_at_most", "memory": "pass_rate_at_most"}.items():
            if self.changed(name) and condition not in given:
                yield f"{name} has no effect without {condition}; remove it"


Keep = Literal["all", "first_correct", "all_correct", "best", "nearest", "beside"]
"""Which rows of a second round stay in the group. `all`: every one, in place of as many wrong rollouts;
`first_correct`, `all_correct`: the first correct one, or all of them, in place of wrong rollouts; `best`: the first
correct one, else the first, in place of the first rollout, right or wrong; `nearest`: in place of the whole group, the
rows of the try whose share of correct ones is nearest to what `dose.kind: search` looks for, if one is correct;
`beside`: none, but terms on off-policy tokens learn from the correct ones, which have no advantage (HDPO, arXiv
2603.23871)."""


class StartConfig(StrictModel):
    """Rows that are given something before the policy writes."""

    show: Show
    dose: Dose | None = None
    """Share of the trace that is shown: of its tokens or pieces (`prefix`), of its steps (`hint`)."""
    rows: PositiveInt | Literal["all"] = 1
    """Rows of a group with the start. With `when.accuracy_at_most`, rows that are sampled in addition where that holds;
    `all`: as many as the group has, or as are left beside other starts."""
    shared: bool = False
    """The rows of a group take one trace and one dose. Hints are always of one trace."""
    when: When | None = None
    """Which groups; None: all that have a trace."""
    keep: Keep = "all"
    learn: Literal["bare", "shown"] = "bare"
    """The prompt that a row with a hint or a critique is learned under. `bare`: off-policy rows whose recorded
    log-probabilities are those under the prompt that they were sampled with; `shown`: rollouts of another prompt, with
    all that it shows still in it."""

    @property
    def is_fallback(self) -> bool:
        """Whether its rows are sampled where those of the bare prompt have failed."""
        return self.when is not None and self.when.accuracy_at_most is not None

    @property
    def shows_trace(self) -> bool:
        return not isinstance(self.show, Critique)

    @property
    def is_in_prompt(self) -> bool:
        return isinstance(self.show, TraceHint | Critique)

    @property
    def has_off_policy_rows(self) -> bool:
        """Whether rows have tokens that the policy did not sample under the row's prompt."""
        return not self.is_in_prompt or self.learn == "bare"

    @property
    def depends_on_length(self) -> bool:
        """Whether a step is given otherwise when the stage is made longer."""
        values = [getattr(self.dose, name, None) for name in ("low", "high", "probability", "envelope")]
        values += [self.dose] if isinstance(self.dose, Schedule) else []
        moving = any(isinstance(value, Schedule) and depends_on_length(value) for value in values)
        return moving or (self.when is not None and self.when.after > 0)

    @property
    def largest_dose(self) -> float:
        """The largest share of a trace that it shows."""
        match self.dose:
            case UniformDose(low=low, high=high):
                return max(bounds(low)[1], bounds(high)[1])
            case EvenDose(high=high):
                return high
            case DifficultyDose(high=high, noise=noise):
                return min(high + noise, 1.0)
            case LevelsDose(shares=shares) | PromptLevels(shares=shares):
                return shares[-1]
        return bounds(self.dose)[1] if isinstance(self.dose, Schedule) else 1.0

    @property
    def learns(self) -> bool:
        """Whether the dose depends on how rows that were given it did."""
        return isinstance(self.dose, PromptMemory | BatchMemory | FitDose)

    @property
    def may_show_nothing(self) -> bool:
        """Whether a hint of less than one step is none."""
        is_random = isinstance(self.dose, UniformDose | BinomialDose | DifficultyDose)
        return is_random or (self.learns and not isinstance(self.dose, PromptLevels))

    def num_rows(self, size: int) -> int:
        """Rows of a group of `size` in one round of the start."""
        return size if self.rows == "all" else self.rows

    def _complaints(self) -> Iterator[str]:
        kind, dose = self.show.kind, self.dose
        if dose is None and kind in ("prefix", "hint"):
            yield f"show.kind: {kind} needs a dose: the share of the trace that is shown, such as dose: 0.5"
        if dose is not None and kind in ("trace", "critique"):
            yield f"dose has no effect with show.kind: {kind}; remove it, or set show.kind to prefix or hint"
        if isinstance(dose, Schedule):
            yield from _share_complaints(dose=dose)
        if self.learn == "shown" and not self.is_in_prompt:
            yield f"learn: shown is for what is shown in the prompt, and a {kind} is in the response; remove it"
        if self.shared and (
            kind in ("trace", "critique") or isinstance(dose, LadderDose | SearchDose | EvenDose | LevelsDose)
        ):
            given = f"dose.kind: {dose.kind}" if dose is not None else f"show.kind: {kind}"
            yield f"shared contradicts {given}; remove one of them"
        yield from self._complaints_about_rounds()
        yield from self._complaints_about_time()

    def _complaints_about_rounds(self) -> Iterator[str]:
        dose, rows = self.dose, self.rows
        if isinstance(dose, LadderDose | SearchDose | FitDose) and not isinstance(self.show, TracePrefix):
            yield f"dose.kind: {dose.kind} is a share of a prefix; set show.kind: prefix, or choose another dose"
        if isinstance(dose, LadderDose) and rows != dose.num_rows:
            yield f"dose.rungs have {dose.num_rows} rows, which rows, {rows}, has to equal"
        if isinstance(dose, LevelsDose) and (rows == "all" or rows % len(dose.shares)):
            yield f"rows: {rows} must be a multiple of the {len(dose.shares)} shares of dose"
        if isinstance(dose, FitDose) and rows != "all" and rows % dose.rounds:
            yield f"rows: {rows} must be a multiple of dose.rounds, {dose.rounds}"
        if isinstance(dose, SearchDose):
            if not isinstance(self.show, TracePrefix) or self.show.pieces is None:
                yield "dose.kind: search is over pieces of a trace; set show.pieces, such as 10"
            if (self.rows, self.keep, self.is_fallback) != ("all", "nearest", True):
                yield "dose.kind: search is for groups that fail; set rows: all, keep: nearest, when.accuracy_at_most"
            elif self.when is not None and (bound := self.when.accuracy_at_most or 0.0) >= dose.at_least:
                yield (
                    f"when.accuracy_at_most {bound:g} must be below dose.at_least {dose.at_least:g}: a prompt that "
                    "succeeds as often needs no start"
                )
        elif self.keep == "nearest":
            yield "keep: nearest is for dose.kind: search; choose all, first_correct, all_correct or best"
        memory = isinstance(dose, PromptMemory | BatchMemory)
        if isinstance(dose, PromptBisection | PromptFrontier) and not self.shared:
            yield f"dose.kind: {dose.kind} draws one dose for a visit of a prompt; set shared: true"
        if memory and self.is_fallback:
            yield (
                f"dose.kind: {dose.kind if dose else ''} learns from every visit, and with when.accuracy_at_most only "
                "failed groups have the start; remove one of them"
            )

    def _complaints_about_time(self) -> Iterator[str]:
        waits = isinstance(self.dose, LadderDose | DifficultyDose)
        if waits and (self.is_fallback or self.rows == "all"):
            assert self.dose is not None
            yield (
                f"dose.kind: {self.dose.kind} looks at rollouts of the group; give a number of rows, without "
                "when.accuracy_at_most"
            )
        if isinstance(self.dose, FitDose) and self.is_fallback:
            yield "dose.kind: fit has rounds of its own; remove when.accuracy_at_most"
        if not self.is_fallback and isinstance(self.show, Critique):
            yield "show.kind: critique is of rollouts that are sampled first; set when: {accuracy_at_most: 1}"
        if self.keep == "beside" and (not self.is_in_prompt or self.learn == "shown"):
            yield (
                "keep: beside is for rows that are learned without what their prompt showed; set show.kind to hint or "
                "critique, and learn: bare"
            )
        if not self.is_fallback and self.keep != "all":
            yield f"keep: {self.keep} chooses among rows of a second round; set when.accuracy_at_most, or remove it"
        if isinstance(self.show, WholeTrace):
            if self.keep != "all":
                yield "keep has no effect on whole traces, all of which stay; remove it"
            if self.rows == "all":
                yield "rows: all leaves no rollouts beside whole traces; give a number"
            if self.show.choose != "in_turn" and not self.is_fallback:
                yield (
                    f"show.choose: {self.show.choose} is among traces that replace failed rollouts; set "
                    "when.accuracy_at_most, or remove it"
                )


def complaints_about_starts(starts: Mapping[str, StartConfig], size: int) -> Iterator[str]:
    """What is wrong between the starts of a group of `size` rows."""
    fallbacks = {name: start for name, start in starts.items() if start.is_fallback}
    first = {name: start for name, start in starts.items() if not start.is_fallback}
    if len(fallbacks) > 1:
        yield f"starts {' and '.join(fallbacks)} both sample again where rollouts fail; keep one of them"
    takes_all = [name for name, start in first.items() if start.rows == "all"]
    if len(takes_all) > 1:
        yield f"starts {' and '.join(takes_all)} both take all rows; give numbers"
    chooses = [name for name, start in starts.items() if getattr(start.show, "choose", "in_turn") != "in_turn"]
    if chooses and len(starts) > 1:
        yield f"starts.{chooses[0]}.show.choose compares all off-policy rows of a group; remove the other starts"
    numbers = {name: start.rows for name, start in first.items() if start.rows != "all"}
    counted = sum(number for number in numbers.values() if isinstance(number, int))
    whole = any(isinstance(start.show, WholeTrace) for start in first.values())
    waiting = [name for name, start in first.items() if isinstance(start.dose, LadderDose | DifficultyDose)]
    if counted > size or (counted == size and (whole or waiting or takes_all)):
        told = " + ".join(f"{number} of {name}" for name, number in numbers.items())
        yield f"starts take {told} rows, which must be below size {size}: RL needs rollouts"
    for name, start in first.items():
        if start.when is not None and start.when.pass_rate_at_most is not None and (takes_all or counted >= size):
            yield f"starts.{name}.when.pass_rate_at_most depends on rollouts, and the group has none; lower rows"
        if isinstance(start.dose, DifficultyDose) and (takes_all or counted >= size):
            yield f"starts.{name}: dose.kind: difficulty depends on rollouts, and the group has none; lower rows"
        if isinstance(start.dose, FitDose) and start.rows == "all" and len(first) > 1:
            yield f"starts.{name}: dose.kind: fit needs to know how many rows a round has; give rows a number"
        if isinstance(start.dose, FitDose) and start.num_rows(size) % start.dose.rounds:
            yield f"starts.{name}: rows, {start.num_rows(size)}, must be a multiple of dose.rounds, {start.dose.rounds}"
    always = [name for name, start in first.items() if start.when is None and start.rows == "all"]
    for name, start in fallbacks.items():
        if always or counted >= size:
            yield f"starts.{name}.when.accuracy_at_most depends on rollouts, and the group has none; lower rows"
        yield from _about_fallback(name, start, size if isinstance(start.dose, SearchDose) else size - counted)


def _about_fallback(name: str, start: StartConfig, size: int) -> Iterator[str]:
    """What is wrong with a fallback of groups with `size` rollouts or, of a search, rows."""
    assert start.when is not None and start.when.accuracy_at_most is not None
    rows, bound = start.num_rows(size), start.when.accuracy_at_most
    if isinstance(start.dose, SearchDose):
        low, high = start.dose.at_least, start.dose.at_most
        if not any(low <= num / size <= high for num in range(size + 1)):
            yield (
                f"starts.{name}.dose: no number of correct rows among size {size} is a share between {low:g} and "
                f"{high:g}; widen the bounds"
            )
        return
    if isinstance(start.show, WholeTrace):
        if rows >= size:
            yield f"starts.{name}.rows {rows} must be below size {size}: RL needs rollouts"
        return
    if start.keep != "all":
        return
    if rows > size:
        yield f"starts.{name}: {rows} rows are above size {size}; sample fewer, or set keep: first_correct"
    most_correct = max(num for num in range(size + 1) if num / size <= bound)
    if most_correct + rows > size:
        yield (
            f"starts.{name}: with accuracy_at_most {bound:g} a group may have fewer wrong rollouts than the {rows} "
            "rows that replace them; lower accuracy_at_most or the number of rows"
        )


def _rising(shares: tuple[float, ...]) -> Iterator[str]:
    if any(low >= high for low, high in itertools.pairwise(shares)):
        yield f"shares {list(shares)} must rise: a higher level shows more of the trace"


def _share_complaints(**shares: ScheduledValue) -> Iterator[str]:
    for name, value in shares.items():
        low, high = bounds(value)
        if low < 0 or high > 1:
            yield f"{name} runs from {low:g} to {high:g}; it is a share of the trace, between 0 and 1"


def slot_complaints(template: str, *names: str) -> Iterator[str]:
    """Every slot, such as `{trace}`, has to be in the template exactly once."""
    for name in names:
        if template.count(f"{{{name}}}") != 1:
            yield f"template must have {{{name}}} once; it is {template!r}"


def fill_slots(template: str, texts: Mapping[str, str]) -> str:
    """The template with its slots filled. The texts themselves may hold braces or the name of a slot."""
    slots = "|".join(re.escape(f"{{{name}}}") for name in texts)
    return re.sub(slots, lambda slot: texts[slot[0][1:-1]], template)
