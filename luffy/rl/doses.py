"""How much of a trace each row is shown: the rule of every `dose` (`luffy.config.starts`).

`dose_of` is a pure function of what a row's start may look at (`Ask`). Controllers that learn from earlier steps do so
in `memory_of`: they observe the doses that the journal has, so a step read back teaches what a sampled one did.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from statistics import fmean
from typing import Any, NamedTuple

from luffy.config.starts import (
    BatchRatio,
    BatchRoot,
    BinomialDose,
    DifficultyDose,
    Dose,
    EvenDose,
    FitDose,
    LadderDose,
    LevelsDose,
    PromptBisection,
    PromptFrontier,
    PromptLevels,
    SearchDose,
    StartConfig,
    UniformDose,
)
from luffy.objectives.schedules import value_at
from luffy.rl.fold import Event, Fold
from luffy.types import Group, Trajectory


class StartRound(NamedTuple):
    """One round of a start in one group."""

    dose: float
    """That of its first row."""
    rows: tuple[Trajectory, ...]

    @property
    def success(self) -> float:
        """Share of correct rows; 0 without rows."""
        return fmean(row.is_correct for row in self.rows) if self.rows else 0.0


@dataclass(frozen=True, slots=True)
class Ask:
    """All that the dose of a row may depend on."""

    step: int
    total_steps: int
    index: int
    """Place of the row among those of its start in the group, from 0; 0 for all of them where they share a dose."""
    count: int
    """Rows of the start in the group."""
    length: int
    """Units of the trace: tokens or pieces of a prefix, steps of a hint. The last one is never shown."""
    random: Callable[[int], float]
    """Uniform numbers in [0, 1) of the row."""
    known: Mapping[str, Any]
    """What earlier steps have taught (`Memory.known_to`), of this prompt alone or of all."""
    round: int = 0
    """Rounds of the start in this group before this one."""
    so_far: float | None = None
    """Share of correct rows among those of the group that were sampled before; None: there are none."""
    bare: float | None = None
    """The same of those without a start."""
    tried: tuple[StartRound, ...] = ()
    """Earlier rounds of the start in this group."""


def dose_of(dose: Dose, ask: Ask) -> float | None:
    """The share of the trace that a row is shown, from 0 to 1; None: the start has no further round in the group."""
    at = partial(value_at, step=ask.step, total_steps=ask.total_steps)
    match dose:
        case UniformDose(low=low, high=high):
            return at(low) + (at(high) - at(low)) * ask.random(0)
        case BinomialDose(pieces=most, probability=probability):
            # A trace with fewer tokens than pieces is split into single tokens.
            pieces, wanted = min(most, ask.length), at(probability)
            return sum(ask.random(piece) < wanted for piece in range(pieces)) / pieces
        case EvenDose(low=low, high=high):
            # A single row takes the middle of the range; LUFFY's code divides by zero here.
            return low + (high - low) * (ask.index / (ask.count - 1) if ask.count > 1 else 0.5)
        case LevelsDose(shares=shares):
            return shares[ask.index * len(shares) // ask.count]
        case LadderDose(rungs=rungs):
            rung = rungs[ask.round]
            return rung.share if ask.so_far is not None and ask.so_far < rung.below else 0.0
        case DifficultyDose(low=low, high=high, noise=noise):
            failing = 0.0 if ask.bare is None else 1 - ask.bare
            return _share(low + (high - low) * failing + noise * (2 * ask.random(0) - 1))
        case SearchDose():
            return _searched(dose, ask)
        case FitDose():
            tried = [(each.dose, each.success) for each in ask.tried if each.rows]
            return fitted_dose(tuple(tried), dose.target) if tried else dose.first
        case PromptLevels(shares=shares):
            return shares[ask.known.get("level", 1) - 1]
        case PromptBisection():
            low, high = ask.known.get("interval", (0.0, 1.0))
            return low + (high - low) * ask.random(0)
        case PromptFrontier():
            most = min(round(ask.known.get("frontier", 1.0) * ask.length), ask.length - 1)
            return math.floor(ask.random(0) * (most + 1)) / ask.length
        case BatchRatio():
            return ask.known.get("share", dose.first)
        case BatchRoot(target=target, gain=gain, envelope=envelope):
            own = ask.known.get("success", target)
            return min(_share(ask.known.get("share", dose.first) + gain * (target - own)), at(envelope))
        case _:
            return at(dose)


def _share(value: float) -> float:
    return min(max(value, 0.0), 1.0)


def distance(dose: SearchDose, tried: StartRound) -> float:
    """Distance of a try's share of correct rows from what the search looks for; 0 within the bounds."""
    return max(dose.at_least - tried.success, tried.success - dose.at_most, 0.0)


def _searched(dose: SearchDose, ask: Ask) -> float | None:
    """The next try of a binary search over pieces of the trace, `ask.length` of them: more where a try was below the
    bounds, fewer where it was above. It ends with the first try within them, when no number is left, or where all rows
    of a try have failed, so that nothing is known."""
    too_few, too_many = 0, ask.length
    for tried in ask.tried:
        pieces = round(tried.dose * ask.length)
        if not distance(dose, tried) or not tried.rows:
            return None
        too_few, too_many = (pieces, too_many) if tried.success < dose.at_least else (too_few, pieces)
    return None if too_many - too_few < 2 else (too_few + too_many) // 2 / ask.length


@lru_cache(maxsize=128)  # the rows of a round all ask for the same
def fitted_dose(tried: tuple[tuple[float, float], ...], target: float) -> float:
    """Where a curve through the doses and shares of correct rows so far meets the target (SEELE, arXiv 2509.06923).

    The curve is f(d) = b + (1 - b) / (1 + exp(-k (d - m))), least squares. Two points do not determine its three
    parameters, so b is 0 until there are three of them, and after a single round the dose is halved, or half of what is
    missing to 1 is added.
    """
    from scipy.optimize import least_squares  # slow to import, and no other dose needs it

    if len(tried) == 1:
        ((at, seen),) = tried
        return at / 2 if seen > target else (at + 1) / 2

    def success(parameters: Sequence[float], at: float) -> float:
        slope, middle, least = (*parameters, 0.0)[:3]
        return least + (1 - least) / (1 + math.exp(-slope * (at - middle)))

    def errors(parameters: Sequence[float]) -> list[float]:
        return [success(parameters, at) - seen for at, seen in tried]

    bounds = ([_SLOPES[0], -1.0, 0.0], [_SLOPES[1], 2.0, 0.9])
    number = 2 if len(tried) == 2 else 3
    start = [5.0, fmean(at for at, _ in tried), 0.1]
    found = least_squares(errors, start[:number], bounds=(bounds[0][:number], bounds[1][:number])).x
    slope, middle, least = (*map(float, found), 0.0)[:3]
    if least >= target:
        return 0.0
    return _share(middle - math.log((1 - least) / (target - least) - 1) / slope)


_SLOPES = (0.5, 50.0)
"""Bounds of the fitted curve: nearly flat, and a step. Success never falls with the dose."""


@dataclass(frozen=True)
class Memory:
    """What the groups of earlier steps have taught a start's controller."""

    name: str
    """The start's."""
    fold: Fold[Any]
    is_of_prompt: bool
    """Whether a prompt knows only what its own groups have taught."""

    def observe(self, step: int, groups: Sequence[Group]) -> None:
        """Record the closed groups of a step, before filtering: of each that has the start, the dose that it was given
        and the share of correct rows under it; of all, the share of correct rows."""
        events: list[Event] = []
        for group in groups:
            own = [row for row in group.of_start(self.name) if row.start is not None]
            if group.is_open or not group.trajectories:
                continue
            if own:
                dose = fmean(row.start.dose or 0.0 for row in own if row.start is not None)
                events.append((group.uid, dose, _accuracy(own), _accuracy(group.trajectories)))
            elif not self.is_of_prompt:
                events.append((group.uid, None, None, _accuracy(group.trajectories)))
        self.fold.add(step, events)

    def known_to(self, step: int) -> Callable[[str], Mapping[str, Any]]:
        """What the plan of `step` may know, by prompt."""
        known = self.fold.known_to(step)
        if self.is_of_prompt:
            return lambda uid: known.get(uid, {})
        of_prompts = known.get("prompts", {})
        return lambda uid: {**known, "success": of_prompts[uid]} if uid in of_prompts else known


def _accuracy(rows: Sequence[Trajectory]) -> float:
    return fmean(row.is_correct for row in rows)


def memory_of(name: str, start: StartConfig, ahead: int) -> Memory | None:
    """The memory of a start's dose; None where a dose looks at no earlier step."""
    match start.dose:
        case PromptLevels():
            return Memory(name, Fold(partial(_of_prompts, partial(next_level, start.dose)), ahead), True)
        case PromptBisection():
            return Memory(name, Fold(partial(_of_prompts, partial(next_interval, start.dose)), ahead), True)
        case PromptFrontier():
            return Memory(name, Fold(partial(_of_prompts, partial(next_frontier, start.dose)), ahead), True)
        case BatchRatio():
            return Memory(name, Fold(partial(_enter_ratio, start.dose), ahead), False)
        case BatchRoot():
            return Memory(name, Fold(partial(_enter_root, start.dose), ahead), False)
    return None


Known = dict[str, Any]


def _of_prompts(
    rule: Callable[[Mapping[str, Any], float, float], Known], known: Known, step: int, events: Sequence[Event]
) -> None:
    for uid, dose, success, *_ in events:
        known[uid] = rule(known.get(uid, {}), dose, success)


def next_level(config: PromptLevels, known: Mapping[str, Any], dose: float, success: float) -> Known:
    """The level (from 1) after a group: one up below the bound, one down above the other (POPE, arXiv 2601.18779)."""
    most = config.fewer_above
    move = int(success < config.more_below) - int(most is not None and success > most)
    return {"level": min(max(known.get("level", 1) + move, 1), len(config.shares))}


def next_interval(config: PromptBisection, known: Mapping[str, Any], dose: float, success: float) -> Known:
    """The interval after a group (AdaBack, arXiv 2506.18110).

    Where a failed dose lies above the interval, as can be where groups of a prompt overtake one another or stand in one
    step, its upper end goes back to 1.
    """
    _, high = known.get("interval", (0.0, 1.0))
    if success >= config.success:
        return {"interval": [0.0, dose]}
    return {"interval": [dose, high if dose < high else 1.0]}


def next_frontier(config: PromptFrontier, known: Mapping[str, Any], dose: float, success: float) -> Known:
    """The frontier after a group: what was shown, where the policy succeeded with less (MFC, arXiv 2609.13997)."""
    frontier = known.get("frontier", 1.0)
    return {"frontier": min(dose, frontier) if success >= config.success else frontier}


def _enter_ratio(config: BatchRatio, known: Known, step: int, events: Sequence[Event]) -> None:
    """L <- L x mean(accuracy of the two steps before) / accuracy, in every `every`-th step (G2RPO-A, arXiv 2508.13023);
    a step whose accuracy, or the mean before it, is 0 changes nothing."""
    if not events:
        return
    # Every group has as many rows, but for failed ones.
    before, now = known.get("accuracies", []), fmean(accuracy for *_, accuracy in events)
    known["accuracies"] = [*before, now][-2:]
    if step % config.every == 0 and len(before) == 2 and now > 0 and sum(before) > 0:
        known["share"] = min(known.get("share", config.first) * fmean(before) / now, 1.0)


def _enter_root(config: BatchRoot, known: Known, step: int, events: Sequence[Event]) -> None:
    """Average `every` steps, then move the share to where their success would have been the target."""
    guided = [(uid, dose, success) for uid, dose, success, _ in events if dose is not None]
    known["window"] = [*known.get("window", []), *([dose, success] for _, dose, success in guided)]
    rates = dict(known.get("prompts", {}))
    for uid, _, success in guided:
        rates[uid] = (rates[uid] + success) / 2 if uid in rates else success
    known["prompts"] = rates
    known["steps"] = known.get("steps", 0) + 1
    if known["steps"] < config.every or not known["window"]:
        return
    dose, success = (fmean(each[place] for each in known["window"]) for place in (0, 1))
    known["low"], known["high"] = next_bracket(config.target, known.get("low"), known.get("high"), dose, success)
    known["share"] = next_root(config.target, known["low"], known["high"])
    known["steps"], known["window"] = 0, []


Point = Sequence[float] | None
"""A dose and the share of correct rows under it; None: not tried yet."""


def next_bracket(target: float, low: Point, high: Point, dose: float, success: float) -> tuple[Point, Point]:
    """The doses between which success passes the target, after another one was tried.

    The policy improves meanwhile: a dose that contradicts the other end opens that side again.
    """
    point = [dose, success]
    if success < target:
        return point, high if high is not None and high[0] > dose else None
    return low if low is not None and low[0] < dose else None, point


_EDGE = 0.1
"""A secant step stays within the bracket by this share of its width, so that each window narrows it."""


def next_root(target: float, low: Point, high: Point) -> float:
    """The next dose: a secant step inside the bracket; its middle while an end has not been tried."""
    least, most = (0.0 if low is None else low[0]), (1.0 if high is None else high[0])
    if low is None or high is None:
        return (least + most) / 2
    root = least + (target - low[1]) * (most - least) / (high[1] - low[1])
    edge = _EDGE * (most - least)
    return min(max(root, least + edge), most - edge)
