"""Filters for rows and traces. Nothing is dropped without being counted.

Traces are used where they end in the right answer. Training rows whose reference answer cannot be met are rejected;
suites keep them, and their card says so (`check_golds`).
"""

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal, NamedTuple

from transformers import PreTrainedTokenizerBase

from luffy.config.environment import History
from luffy.config.grading import GradingConfig, leaves
from luffy.data.conversations import encode_demonstrations
from luffy.data.overlap import BenchmarkIndex, Hit
from luffy.data.schema import problem_text
from luffy.data.templates import (
    is_complete,
    prompt_lengths,
    prompt_opener,
    prompt_texts,
    stop_texts,
    trace_lengths,
    with_opened_thinking,
)
from luffy.errors import DataError
from luffy.grading.equivalence.certain import canonical_number, normalise
from luffy.grading.extract import read_reference
from luffy.grading.pool import GraderPool
from luffy.grading.request import GradeRequest, problem_of, require_verdicts
from luffy.types import Message, Outcome, Prompt, Trace


class Rejection(StrEnum):
    """Why a row, or one of its traces, is not used."""

    IN_SUITE = "in_evaluation_suite"
    """The same problem is asked in an evaluation suite or another benchmark."""
    HOLDS_BENCHMARK_PROBLEM = "holds_benchmark_problem"
    """The prompt shares too many word runs with a benchmark's problem."""
    PROMPT_TOO_LONG = "prompt_too_long"
    REFERENCE_FAILS = "reference_fails"
    """Its reference answer states none (`proof`, `notfound`), or is not graded correct as an answer: no response could
    earn the reward."""
    DUPLICATE = "duplicate_uid"
    """Its uid occurred before, in the same source; where repeats are merged, it brings no new trace."""
    EQUAL_PROBLEM = "duplicate_problem"
    """The same problem, case and spacing aside, occurred before under another uid; where repeats are merged, the row
    brings no new trace."""
    OTHER_ANSWER = "duplicate_with_other_answer"
    """The same problem occurred before with another reference answer."""
    NEAR_DUPLICATE = "near_duplicate"
    TRACE_TOO_LONG = "trace_too_long"
    """The trace, stop token included, has more than `max_trace_tokens` tokens."""
    TRACE_HOLDS_STOP_TOKEN = "trace_holds_stop_token"  # noqa: S105 - a token of the vocabulary, no secret
    """The text of the stop token occurs inside the trace: the policy would learn to stop there."""
    TRACE_LOGPROBS_MISMATCH = "trace_logprobs_mismatch"
    """The number of its log-probabilities differs from its number of tokens, stop token included."""
    TRACE_INCOMPLETE = "trace_incomplete"
    """Its reasoning, perhaps opened by the chat template, is not closed by `</think>`."""
    TRACE_HOLDS_BENCHMARK_PROBLEM = "trace_holds_benchmark_problem"
    TRACE_WRONG = "trace_wrong"
    TRACE_NO_ANSWER = "trace_no_answer"
    TRACE_UNPARSABLE = "trace_unparsable"
    TRACE_TIMED_OUT = "trace_timed_out"
    TRACE_CRASHED = "trace_crashed"
    TRACE_UNDECODED = "trace_undecoded"
    """A teacher's answer has undecodable bytes (U+FFFD): SFT would teach the policy to write that character."""


_RAISE = "the longest has {{}} tokens: raise {} to keep it"
_REMEDIES = {
    "use problems that are not in data.suites or data.decontamination.benchmarks": (
        Rejection.IN_SUITE,
        Rejection.HOLDS_BENCHMARK_PROBLEM,
        Rejection.TRACE_HOLDS_BENCHMARK_PROBLEM,
    ),
    _RAISE.format("data.max_prompt_tokens"): (Rejection.PROMPT_TOO_LONG,),
    "give problems with an answer, name the column that holds it (fields.answer), or a grading.kind that reads it": (
        Rejection.REFERENCE_FAILS,
    ),
    _RAISE.format("data.max_trace_tokens"): (Rejection.TRACE_TOO_LONG,),
    "give traces that close their reasoning, or a model.chat_template that does not open it": (
        Rejection.TRACE_INCOMPLETE,
    ),
    "check the reference answers and grading.kind, or set data.require_verified_traces: false": tuple(
        Rejection(f"trace_{outcome}") for outcome in Outcome if outcome is not Outcome.CORRECT
    ),
}


def remedies(reasons: Collection[str], longest: Mapping[str, int]) -> list[str]:
    """What a user can do about rows that are rejected for these reasons; `longest` as in `ShardStatistics`."""
    found = [
        remedy.format(longest.get(remedied[0]))
        for remedy, remedied in _REMEDIES.items()
        if not set(remedied).isdisjoint(reasons)
    ]
    return found or ["change the source"]


@dataclass(frozen=True, slots=True)
class Rules:
    """The rules for the rows of a source."""

    max_prompt_tokens: int | None
    """None: an evaluation suite, from which nothing is dropped."""
    max_trace_tokens: int
    require_verified_traces: bool = True
    repeats: Literal["allow", "reject", "merge", "fold"] = "reject"
    """What happens to a row whose problem occurred before: it is allowed (base text may repeat), rejected, merged
    (its traces go to the first row) or folded (an evaluation suite asks each problem once)."""
    unique_problems: bool = False
    """Whether the same problem under another uid is a repeat, too."""
    near_duplicates: float | None = None
    keeps_traces: bool = True
    """False: an evaluation suite, whose demonstrations are dropped and which is not compared with the benchmarks."""
    history: History = "exact"
    """How a trace of many turns is encoded under a chat template that rewrites earlier turns."""
    requires_gold: GradingConfig | None = None
    """Rejects rows whose reference answer fails under its grader; None: references are not checked."""


@dataclass(frozen=True, slots=True)
class FilteredRow:
    """One row after filtering, or the reason for its rejection."""

    prompt: Prompt
    """With only its usable traces."""
    reason: Rejection | None
    """None: it passed, perhaps without any of its traces."""
    prompt_tokens: int
    trace_tokens: tuple[int, ...]
    """Lengths of the usable traces, stop token included."""
    outcomes: tuple[Outcome, ...]
    """For all traces, usable or not."""
    rejected_traces: tuple[tuple[Trace, Rejection], ...]
    hits: tuple[tuple[str, Hit], ...] = ()
    """`prompt` or `trace`, and the benchmark problem that it contains."""
    too_long: Mapping[Rejection, int] = field(default_factory=dict)
    """Tokens of the prompt and of the longest trace that are rejected for their length."""
    gold: "Gold | None" = None
    """None: its reference was not looked at."""


def grade_traces(prompts: Sequence[Prompt], grader: GraderPool, template: str = "") -> list[list[Outcome]]:
    """Return what grading found for each trace of each prompt; `template` as in `problem_of`.

    Raises LostError if a judge could not be reached: that is not a verdict on the traces.
    """
    requests = [
        GradeRequest(trace.reply, prompt.ground_truth, problem_of(prompt, template))
        for prompt in prompts
        for trace in prompt.traces
    ]
    grades = grader.grade(requests)
    require_verdicts(grades, "traces", "finished shards are kept, and the same command continues after them")
    outcomes = iter([grade.outcome for grade in grades])
    return [[next(outcomes) for _ in prompt.traces] for prompt in prompts]


MEETS_ITSELF, FAILS, TEXT_ALONE, NOT_CHECKED = "meets_itself", "fails", "text_alone", "not_checked"
Gold = tuple[str, Outcome]
"""What a reference answer is worth, and the outcome that shows it."""
_MATHEMATICAL = {"math", "math_strict"}
_CHECKED = {*_MATHEMATICAL, "choice", "exact"}
"""Custom functions, judges and format graders may rightly reject a bare box."""
_ANOTHER = r"\boxed{\frac{\pi}{7919}}"


def check_golds(prompts: Sequence[Prompt], grader: GraderPool, grading: GradingConfig) -> list[Gold]:
    r"""Grade each reference against itself, as `\boxed{gold}`, by the grader of its row or the experiment's.

    One that `fails` would count every right answer as wrong. Equal texts are accepted without being parsed, so each is
    also compared with an unrelated number: where the grader cannot parse it, it is matched by its `text_alone`.
    """
    golds: list[Gold] = [(NOT_CHECKED, Outcome.CORRECT)] * len(prompts)
    asked: list[tuple[int, str]] = []
    for place, prompt in enumerate(prompts):
        kinds = {leaf.kind for leaf in leaves(grading.grader(prompt.grader, prompt.data_source))}
        if kinds <= _CHECKED:
            gold = (kinds & _MATHEMATICAL and read_reference(prompt.ground_truth)) or prompt.ground_truth
            asked.append((place, f"\\boxed{{{gold}}}"))
            if kinds & _MATHEMATICAL and canonical_number(normalise(gold)) is None:
                asked.append((place, _ANOTHER))
    requests = [GradeRequest(text, prompts[at].ground_truth, problem_of(prompts[at])) for at, text in asked]
    for (place, text), grade in zip(asked, grader.grade(requests), strict=True):
        if text != _ANOTHER:
            is_met = grade.outcome is Outcome.CORRECT
            golds[place] = MEETS_ITSELF if is_met else FAILS, grade.outcome
        elif golds[place][0] == MEETS_ITSELF and grade.outcome not in (Outcome.WRONG, Outcome.CORRECT):
            golds[place] = TEXT_ALONE, grade.outcome
    return golds


class _JudgedTrace(NamedTuple):
    """A trace, and the findings about it."""

    trace: Trace
    outcome: Outcome
    num_tokens: int
    held: Hit | None
    """The benchmark problem that it contains."""


@dataclass(frozen=True, slots=True)
class RowFilter:
    """Applies the rules that concern one row alone; repeats need all rows (`luffy.data.selection`)."""

    tokenizer: PreTrainedTokenizerBase
    rules: Rules
    benchmarks: BenchmarkIndex

    def apply(self, prompts: Sequence[Prompt], grader: GraderPool) -> list[FilteredRow]:
        """Return one verdict per prompt, in order.

        A prompt that loses all its traces stays, like one that came without any: RL then sees the same problems whether
        a bad trace was removed here or before.
        """
        prompts = self.normalised(prompts)
        judged = self.judged(prompts, grade_traces(prompts, grader, self.template))
        if self.rules.requires_gold is None:
            return judged
        # A reference with a correct trace can be met.
        unproven = [place for place, row in enumerate(judged) if Outcome.CORRECT not in row.outcomes]
        found = check_golds([prompts[place] for place in unproven], grader, self.rules.requires_gold)
        golds = dict(zip(unproven, found, strict=True))
        for place, row in enumerate(judged):
            gold = golds.get(place, (MEETS_ITSELF, Outcome.CORRECT))
            judged[place] = row = dataclasses.replace(row, gold=gold)
            if gold[0] == FAILS and row.reason is None:
                judged[place] = dataclasses.replace(row, reason=Rejection.REFERENCE_FAILS)
        return judged

    @property
    def template(self) -> str:
        """A prompt under the policy's chat template, which decides where its answers stand."""
        return prompt_texts(self.tokenizer, [[Message("user", "")]])[0]

    def normalised(self, prompts: Sequence[Prompt]) -> list[Prompt]:
        """Return the prompts with their traces as the policy has to write them."""
        found = []
        for prompt in prompts:
            traces = prompt.traces if self.rules.keeps_traces else ()
            opened = [trace.text if trace.turns else with_opened_thinking(trace.text) for trace in traces]
            if any(text is not trace.text for text, trace in zip(opened, traces, strict=True)):
                pairs = zip(traces, opened, strict=True)
                traces = tuple([dataclasses.replace(trace, text=text) for trace, text in pairs])
            found.append(prompt if traces is prompt.traces else _with_traces(prompt, traces))
        return found

    def judged(self, prompts: Sequence[Prompt], outcomes: Sequence[Sequence[Outcome]]) -> list[FilteredRow]:
        """Return the result of `apply` for `normalised` prompts whose traces are already graded."""
        in_prompts: Sequence[Hit | None] = [None] * len(prompts)
        if self.rules.keeps_traces:  # benchmarks are not compared with themselves
            in_prompts = self.benchmarks.find([problem_text(prompt.messages) for prompt in prompts])
        traces = [trace for prompt in prompts for trace in prompt.traces]
        if any(trace.turns for trace in traces):  # whose lengths include the environment's tokens
            encoded = encode_demonstrations(self.tokenizer, prompts, self.rules.history)
            sizes = [found.length for of_prompt in encoded for found in of_prompt]
        else:
            sizes = trace_lengths(self.tokenizer, [trace.text for trace in traces])
        of_traces = zip(sizes, self.benchmarks.find([trace.text for trace in traces]), strict=True)
        lengths = prompt_lengths(self.tokenizer, [prompt.messages for prompt in prompts])
        opener = prompt_opener(self.tokenizer)
        judged = []
        for prompt, found, length, held in zip(prompts, outcomes, lengths, in_prompts, strict=True):
            verdicts = zip(prompt.traces, found, strict=True)
            judged_traces = [_JudgedTrace(*verdict, *next(of_traces)) for verdict in verdicts]
            judged.append(self._row(prompt, judged_traces, length, held, opener))
        return judged

    def _row(
        self, prompt: Prompt, traces: Sequence[_JudgedTrace], length: int, held: Hit | None, opener: str
    ) -> FilteredRow:
        rules, reason, hit = self.rules, None, held
        if rules.keeps_traces and (equal := self.benchmarks.equal(prompt)):
            reason, hit = Rejection.IN_SUITE, equal
        elif held is not None:
            reason = Rejection.HOLDS_BENCHMARK_PROBLEM
        elif rules.max_prompt_tokens is not None and length > rules.max_prompt_tokens:
            reason = Rejection.PROMPT_TOO_LONG
        hits = [("prompt", hit)] if hit else []
        usable: list[tuple[Trace, int]] = []
        rejected: list[tuple[Trace, Rejection]] = []
        for each in traces if reason is None else ():
            against = self._against_trace(each, opener)
            if against is None:
                # A verdict that its source brought along is replaced.
                verified = dataclasses.replace(each.trace, verified=each.outcome is Outcome.CORRECT)
                usable.append((verified, each.num_tokens))
            else:
                rejected.append((each.trace, against))
            if against is Rejection.TRACE_HOLDS_BENCHMARK_PROBLEM and each.held is not None:
                hits.append(("trace", each.held))
        too_long = {Rejection.PROMPT_TOO_LONG: length} if reason is Rejection.PROMPT_TOO_LONG else {}
        if any(against is Rejection.TRACE_TOO_LONG for _, against in rejected):
            too_long[Rejection.TRACE_TOO_LONG] = max(each.num_tokens for each in traces)
        return FilteredRow(
            prompt=_with_traces(prompt, tuple([trace for trace, _ in usable])) if traces else prompt,
            reason=reason,
            prompt_tokens=length,
            trace_tokens=tuple([tokens for _, tokens in usable]),
            outcomes=tuple([each.outcome for each in traces]),
            rejected_traces=tuple(rejected),
            hits=tuple(hits),
            too_long=too_long,
        )

    def _against_trace(self, each: _JudgedTrace, opener: str) -> Rejection | None:
        rules, trace = self.rules, each.trace
        if each.num_tokens > rules.max_trace_tokens:
            return Rejection.TRACE_TOO_LONG
        if trace.logprobs is not None and len(trace.logprobs) != each.num_tokens:
            return Rejection.TRACE_LOGPROBS_MISMATCH
        if any(text in trace.text for text in stop_texts(self.tokenizer)):
            return Rejection.TRACE_HOLDS_STOP_TOKEN
        if not is_complete(trace.text, opener):
            return Rejection.TRACE_INCOMPLETE
        if rules.require_verified_traces and each.outcome is not Outcome.CORRECT:
            return Rejection(f"trace_{each.outcome.value}")
        return Rejection.TRACE_HOLDS_BENCHMARK_PROBLEM if each.held is not None else None


def _with_traces(prompt: Prompt, traces: tuple[Trace, ...]) -> Prompt:
    # `dataclasses.replace` would take a tenth of the time of a large corpus.
    uid, data_source, messages, truth = prompt.uid, prompt.data_source, prompt.messages, prompt.ground_truth
    return Prompt(uid, data_source, messages, truth, traces, prompt.ability, prompt.extra_info, prompt.grader)


def unplayed_source(data_source: str, played: Iterable[str | None]) -> DataError:
    """Return the error for a prompt that no part of a mixture of environments plays."""
    return DataError(
        f"environment.parts: no part plays the data source {data_source!r}; add it to the `plays` of one (they have "
        f"{', '.join(sorted(filter(None, played)))})"
    )


def with_instructions(prompts: Iterable[Prompt], instructions: Mapping[str | None, str]) -> list[Prompt]:
    """Return the prompts with their instructions at the end of their system message, or as one of their own.

    `instructions` are by data source; those under None are for all others. DataError for a source without an entry.
    """
    found = []
    for prompt in prompts:
        source = prompt.data_source if prompt.data_source in instructions else None
        if source not in instructions:
            raise unplayed_source(prompt.data_source, instructions)
        text, first = instructions[source], prompt.messages[0]
        messages = (Message("system", text), *prompt.messages)
        if first.role == "system":
            messages = (Message("system", f"{first.content}\n\n{text}"), *prompt.messages[1:])
        found.append(dataclasses.replace(prompt, messages=messages) if text else prompt)
    return found


def without_system(prompts: Sequence[Prompt]) -> list[Prompt]:
    """Return the prompts without their system messages, except for one that has no others."""
    asked = [tuple(message for message in prompt.messages if message.role != "system") for prompt in prompts]
    return [
        prompt if len(left) in (0, len(prompt.messages)) else dataclasses.replace(prompt, messages=left)
        for prompt, left in zip(prompts, asked, strict=True)
    ]


def with_system_prompt(prompts: Iterable[Prompt], system_prompt: str) -> list[Prompt]:
    """Return the prompts with `system_prompt` in front, unless they have a system message of their own."""
    first = Message("system", system_prompt)
    return [
        prompt
        if any(message.role == "system" for message in prompt.messages)
        else dataclasses.replace(prompt, messages=(first, *prompt.messages))
        for prompt in prompts
    ]
