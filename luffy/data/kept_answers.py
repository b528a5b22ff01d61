"""Chooses which graded answers to a prompt are kept as traces.

    traces = kept_traces(answers, KeepAnswers(choose="diverse", max_per_prompt=4))

Only correct answers that ended by themselves are kept: a trace teaches where to stop. An answer with undecodable bytes
(U+FFFD) is not kept either: SFT would teach the policy to write that character. Where answers differ only in
whitespace, the first is kept. The choice for a smaller `max_per_prompt` is a prefix of the choice for a larger one.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from luffy.config.answers import KeepAnswers
from luffy.data.overlap import Hashes, run_hashes, word_hashes, words
from luffy.types import Message, Origin, Outcome, Trace

UNDECODED = "\ufffd"
_RUN = 3
"""Words in a row that are compared."""


@dataclass(frozen=True, slots=True)
class GradedAnswer:
    """One answer of a model to a prompt, and what grading found."""

    text: str
    """The whole reply, without the stop token."""
    num_tokens: int
    """By the model's own tokenizer, stop token included."""
    outcome: Outcome
    is_complete: bool
    """Whether the model ended it, rather than a limit."""
    author: str
    model: str | None = None
    """The model's folder, hub id or name at its endpoint."""
    decoding: str | None = None
    """How it was sampled, e.g. `temperature 1, top_p 1`."""
    logprobs: tuple[float, ...] | None = None
    """One per token of the trace by the policy's tokenizer, where these are the tokens that the model sampled."""
    turns: tuple[Message, ...] = ()
    """The turns of an episode: the model's, and the environment's between them; `text` then joins them as lines."""
    origin: Origin | None = None
    """Where training data is rewritten: whether the expert's trace was in the prompt."""

    @property
    def may_be_kept(self) -> bool:
        is_text = bool(self.text.strip()) and UNDECODED not in self.text
        return self.outcome is Outcome.CORRECT and self.is_complete and is_text

    def trace(self) -> Trace:
        """This answer as a trace whose answer was graded correct."""
        return Trace(
            self.text,
            self.author,
            verified=True,
            logprobs=self.logprobs,
            turns=self.turns,
            model=self.model,
            decoding=self.decoding,
            num_tokens=self.num_tokens,
            origin=self.origin,
        )


def kept_traces(answers: Sequence[GradedAnswer], rule: KeepAnswers) -> tuple[Trace, ...]:
    """The traces that `rule` keeps, in the order of choice; none where no answer is correct and complete.

    `answers` are in the order of sampling.
    """
    first: dict[str, Trace] = {}
    for answer in answers:
        if answer.may_be_kept:
            first.setdefault(" ".join(answer.text.split()), answer.trace())
    traces = list(first.values())
    if rule.choose == "shortest":
        traces.sort(key=lambda trace: trace.num_tokens or 0)  # stable: ties stay in the order of sampling
    if rule.choose == "diverse":
        traces = [traces[place] for place in farthest_first([trace.text for trace in traces], rule.max_per_prompt)]
    return tuple(traces[: rule.max_per_prompt])


def farthest_first(texts: Sequence[str], count: int) -> list[int]:
    """Indices of `count` texts: the first, then always the one whose nearest chosen text is farthest away.

    Farthest-first traversal (Gonzalez 1985), which is within a factor of two of the largest possible least distance.
    The distance is Jaccard's over the sets of word triples, without case and punctuation; a text of fewer words than
    three is one run. Ties go to the earlier text.
    """
    runs = [_runs(text) for text in texts]
    nearest = [np.inf] * len(runs)  # distance of each text from those chosen
    chosen: list[int] = []
    while len(chosen) < min(count, len(runs)):
        found = max((index for index in range(len(runs)) if index not in chosen), key=lambda index: nearest[index])
        chosen.append(found)
        nearest = [min(before, _distance(own, runs[found])) for before, own in zip(nearest, runs, strict=True)]
    return chosen


def _runs(text: str) -> Hashes:
    hashes = word_hashes(words(text), {})
    return np.unique(run_hashes(hashes, min(_RUN, max(len(hashes), 1))))


def _distance(one: Hashes, other: Hashes) -> float:
    shared = len(np.intersect1d(one, other, assume_unique=True))
    union = len(one) + len(other) - shared
    return 1 - shared / union if union else 0.0
