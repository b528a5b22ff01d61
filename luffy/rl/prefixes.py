"""How much of its trace a guided row begins with."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from luffy.config.objective import BinomialLength, EvenlySpacedLength, PrefixConfig, ScheduledValue, UniformLength
from luffy.objectives.schedules import value_at
from luffy.rl.draws import uniform

_At = Callable[[ScheduledValue], float]
_Draw = Callable[[int], float]


@dataclass(frozen=True, slots=True)
class GuidedRow:
    """A guided row of a group."""

    uid: str
    """The prompt."""
    index: int
    """Index among the group's guided rows, from 0."""
    count: int
    """Number of guided rows in the group."""
    visit: int = 0
    """How often the prompt came earlier in this step."""


def prefix_length(
    config: PrefixConfig, trace_tokens: int, row: GuidedRow, step: int, total_steps: int, seed: int
) -> int:
    """Tokens of a trace of `trace_tokens` (its stop token counted) that `row` begins with: from 0 to all but one.

    The last token is always the policy's to write, so that every row of an RL step has a sampled token: a length that
    comes out as the whole trace leaves the stop token out, and a trace that is nothing but its stop token gives no
    prefix at all.

    A pure function: the random number belongs to (seed, step, prompt, visit, row), and to the group as a whole where
    `config.shared`. A share of the trace is rounded down to whole tokens. Schedules are read at `step` (from 1) of
    `total_steps`.
    """
    sampled_for = 0 if config.shared else row.index
    draw = partial(uniform, seed, "prefix", step, row.uid, row.visit, sampled_for)
    at = partial(value_at, step=step, total_steps=total_steps)
    return min(_LENGTHS[config.length.kind](config.length, trace_tokens, row, at, draw), trace_tokens - 1)


def _uniform(length: UniformLength, trace_tokens: int, row: GuidedRow, at: _At, draw: _Draw) -> int:
    low, high = at(length.low), at(length.high)
    return _whole_tokens(low + (high - low) * draw(0), trace_tokens)


def _binomial(length: BinomialLength, trace_tokens: int, row: GuidedRow, at: _At, draw: _Draw) -> int:
    # A trace of fewer tokens than chunks is cut token by token.
    chunks = min(length.chunks, trace_tokens)
    probability = at(length.probability)
    given = sum(draw(chunk) < probability for chunk in range(chunks))
    return given * trace_tokens // chunks


def _evenly_spaced(length: EvenlySpacedLength, trace_tokens: int, row: GuidedRow, at: _At, draw: _Draw) -> int:
    # One row alone stands in the middle; LUFFY's code divides by zero there.
    place = row.index / (row.count - 1) if row.count > 1 else 0.5
    return _whole_tokens(length.low + (length.high - length.low) * place, trace_tokens)


def _whole_tokens(share: float, trace_tokens: int) -> int:
    return math.floor(round(share * trace_tokens, 6))  # 0.29 x 100 is 29, not 28.999999999999996


_LENGTHS: dict[str, Callable[..., int]] = {
    "uniform": _uniform,
    "binomial": _binomial,
    "evenly_spaced": _evenly_spaced,
}
