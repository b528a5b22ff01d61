"""Which rows are let through, and why the others are not. Nothing is dropped without being counted."""

import dataclasses
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from transformers import PreTrainedTokenizerBase

from luffy.data.identity import problem_key
from luffy.data.templates import prompt_lengths, trace_lengths
from luffy.types import Prompt, Trace


class Rejection(StrEnum):
    """Why a row, or one of its traces, is not used."""

    DUPLICATE = "duplicate_uid"
    """Its uid occurred before, in the same source."""
    IN_SUITE = "in_evaluation_suite"
    """The same problem is asked in an evaluation suite."""
    PROMPT_TOO_LONG = "prompt_too_long"
    TRACE_TOO_LONG = "trace_too_long"
    """Counted with the stop token."""
    TRACE_HOLDS_STOP_TOKEN = "trace_holds_stop_token"  # noqa: S105 - a token of the vocabulary, no secret
    """The text of the stop token stands inside the trace, so that the policy would learn to end there."""
    TRACE_LOGPROBS_MISMATCH = "trace_logprobs_mismatch"
    """It carries another number of log-probabilities than it has tokens, stop token included."""
    TRACE_UNVERIFIED = "trace_unverified"
    """Its answer was not graded correct."""


@dataclass(frozen=True, slots=True)
class Rules:
    """What a source's rows must keep."""

    max_prompt_tokens: int
    max_trace_tokens: int
    require_verified_traces: bool = True
    allow_repeats: bool = False
    """Whether a uid may occur again (text for a base policy may repeat)."""
    forbidden_problems: Collection[str] = frozenset()
    """`problem_key`s of the evaluation suites."""


@dataclass(frozen=True, slots=True)
class Filtered:
    """What passed, and the account of the rest: `rows_in == len(prompts) + sum(rejected.values())`."""

    rows_in: int
    prompts: list[Prompt]
    prompt_tokens: list[int]
    """Length of each prompt that passed."""
    trace_tokens: list[int]
    """Length of each trace that passed, stop token included."""
    rejected: Counter[Rejection] = field(default_factory=Counter)
    """Rows by their (first) reason."""
    rejected_traces: Counter[Rejection] = field(default_factory=Counter)
    """Traces by reason, also those of rows that passed with another trace."""


def filter_prompts(prompts: Sequence[Prompt], tokenizer: PreTrainedTokenizerBase, rules: Rules) -> Filtered:
    """Return the prompts and traces that keep the rules.

    A prompt that came with traces and loses all of them is rejected for the first one's reason; a prompt that came
    without any stays.
    """
    result = Filtered(len(prompts), [], [], [])
    seen: set[str] = set()
    lengths = prompt_lengths(tokenizer, [prompt.messages for prompt in prompts])
    of_traces = iter(trace_lengths(tokenizer, [trace.text for prompt in prompts for trace in prompt.traces]))
    stop = str(tokenizer.eos_token)
    for prompt, length in zip(prompts, lengths, strict=True):
        traces = [(trace, next(of_traces)) for trace in prompt.traces]
        reason = _reason_against_prompt(prompt, length, rules, seen)
        seen.add(prompt.uid)
        if reason is None:
            reason = _keep(prompt, length, traces, rules, stop, result)
        if reason is not None:
            result.rejected[reason] += 1
    return result


def without_traces(prompts: Sequence[Prompt]) -> list[Prompt]:
    """Return the prompts of an evaluation suite: what is asked and the reference answer, no demonstration."""
    return [dataclasses.replace(prompt, traces=()) if prompt.traces else prompt for prompt in prompts]


def problems_of(prompts: Sequence[Prompt]) -> set[str]:
    """Return the `problem_key` of each prompt."""
    return {problem_key(prompt.messages) for prompt in prompts}


def _reason_against_prompt(prompt: Prompt, length: int, rules: Rules, seen: Collection[str]) -> Rejection | None:
    if not rules.allow_repeats and prompt.uid in seen:
        return Rejection.DUPLICATE
    if rules.forbidden_problems and problem_key(prompt.messages) in rules.forbidden_problems:
        return Rejection.IN_SUITE
    return Rejection.PROMPT_TOO_LONG if length > rules.max_prompt_tokens else None


def _keep(
    prompt: Prompt, length: int, traces: Sequence[tuple[Trace, int]], rules: Rules, stop: str, result: Filtered
) -> Rejection | None:
    """Add the prompt with its usable traces to `result`; the reason where none of its traces is usable."""
    reasons = [_reason_against_trace(trace, tokens, rules, stop) for trace, tokens in traces]
    usable = [item for item, reason in zip(traces, reasons, strict=True) if reason is None]
    result.rejected_traces.update(reason for reason in reasons if reason is not None)
    if traces and not usable:
        return reasons[0]
    if len(usable) < len(traces):
        prompt = dataclasses.replace(prompt, traces=tuple([trace for trace, _ in usable]))
    result.prompts.append(prompt)
    result.prompt_tokens.append(length)
    result.trace_tokens.extend([tokens for _, tokens in usable])
    return None


def _reason_against_trace(trace: Trace, tokens: int, rules: Rules, stop: str) -> Rejection | None:
    if tokens > rules.max_trace_tokens:
        return Rejection.TRACE_TOO_LONG
    if trace.logprobs is not None and len(trace.logprobs) != tokens:
        return Rejection.TRACE_LOGPROBS_MISMATCH
    if stop in trace.text:
        return Rejection.TRACE_HOLDS_STOP_TOKEN
    return Rejection.TRACE_UNVERIFIED if rules.require_verified_traces and not trace.verified else None
