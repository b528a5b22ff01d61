"""Lengths of the prefixes in prefix-conditioned rows."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, singledispatch

from luffy.config.objective import (
    BinomialLength,
    EvenlySpacedLength,
    PrefixConfig,
    PrefixLength,
    ScheduledValue,
    UniformLength,
)
from luffy.objectives.schedules import value_at
from luffy.seeds import uniform

_At = Callable[[ScheduledValue], float]
_Uniform = Callable[[int], float]


@dataclass(frozen=True, slots=True)
class PrefixedRow:
    """A prefix-conditioned row of a group."""

    uid: str
    """Uid of the prompt."""
    index: int
    """Index among the group's prefix-conditioned rows, from 0."""
    count: int
    """Number of prefix-conditioned rows in the group."""
    visit: int = 0
    """Number of earlier occurrences of the prompt in this step."""


def prefix_length(
    config: PrefixConfig, trace_tokens: int, row: PrefixedRow, step: int, total_steps: int, seed: int
) -> int:
    """Prefix length of `row` in tokens, for a trace of `trace_tokens` (stop token included): at most all but one.

    The policy always samples at least the last token: a length of the whole trace is reduced by the stop token, and a
    trace that consists of its stop token alone gives an empty prefix.

    A pure function: the random number depends on (seed, step, prompt, visit, row), but not on the row when
    `config.shared`. A share of the trace is rounded down to whole tokens. Schedules are evaluated at `step` (from 1)
    of `total_steps`.
    """
    random_row = 0 if config.shared else row.index
    sample = partial(uniform, seed, "prefix", step, row.uid, row.visit, random_row)
    at = partial(value_at, step=step, total_steps=total_steps)
    return min(_length(config.length, trace_tokens, row, at, sample), trace_tokens - 1)


@singledispatch
def _length(length: PrefixLength, trace_tokens: int, row: PrefixedRow, at: _At, sample: _Uniform) -> int:
    raise NotImplementedError(f"no prefixes for {type(length).__name__}")


@_length.register
def _uniform(length: UniformLength, trace_tokens: int, row: PrefixedRow, at: _At, sample: _Uniform) -> int:
    low, high = at(length.low), at(length.high)
    return _whole_tokens(low + (high - low) * sample(0), trace_tokens)


@_length.register
def _binomial(length: BinomialLength, trace_tokens: int, row: PrefixedRow, at: _At, sample: _Uniform) -> int:
    # A trace with fewer tokens than chunks is split into single tokens.
    chunks = min(length.chunks, trace_tokens)
    probability = at(length.probability)
    given = sum(sample(chunk) < probability for chunk in range(chunks))
    return given * trace_tokens // chunks


@_length.register
def _evenly_spaced(length: EvenlySpacedLength, trace_tokens: int, row: PrefixedRow, at: _At, sample: _Uniform) -> int:
    # A single row takes the middle of the range; LUFFY's code divides by zero here.
    place = row.index / (row.count - 1) if row.count > 1 else 0.5
    return _whole_tokens(length.low + (length.high - length.low) * place, trace_tokens)


def _whole_tokens(share: float, trace_tokens: int) -> int:
    return math.floor(round(share * trace_tokens, 6))  # 0.29 x 100 is 29, not 28.999999999999996
