"""Chooses which graded answers to a prompt are kept as traces.

    traces = kept_traces(right, KeepAnswers(choose="diverse", max_per_prompt=4))  # correct, complete, and text

Only correct answers that ended by themselves are kept: a trace teaches where to stop. An answer with undecodable bytes
(U+FFFD) is not kept either: SFT would teach the policy to write that character. Where answers differ only in
whitespace, the first is kept. The choice for a smaller `max_per_prompt` is a prefix of the choice for a larger one.
"""

from collections.abc import Sequence

import numpy as np

from luffy.config.answers import KeepAnswers
from luffy.data.overlap import Hashes, word_triples
from luffy.types import Trace

_UNDECODED = "\ufffd"


def is_text(answer: str) -> bool:
    """Whether the answer has text, without undecodable bytes."""
    return bool(answer.strip()) and _UNDECODED not in answer


def kept_traces(answers: Sequence[Trace], rule: KeepAnswers) -> tuple[Trace, ...]:
    """The traces that `rule` keeps, in the order of choice.

    `answers` are those that may be kept, in the order of sampling.
    """
    first: dict[str, Trace] = {}
    for answer in answers:
        first.setdefault(" ".join(answer.text.split()), answer)
    traces = list(first.values())
    if rule.choose == "shortest":
        traces.sort(key=lambda trace: trace.num_tokens or 0)  # stable: ties stay in the order of sampling
    if rule.choose == "diverse":
        traces = [traces[place] for place in farthest_first([trace.text for trace in traces], rule.max_per_prompt)]
    return tuple(traces[: rule.max_per_prompt])


def farthest_first(texts: Sequence[str], count: int) -> list[int]:
    """Indices of `count` texts: the first, then always the one whose nearest chosen text is farthest away.

    Farthest-first traversal (Gonzalez 1985), which is within a factor of two of the largest possible least distance.
    The distance is Jaccard's over the sets of word triples, without case and punctuation. Ties go to the earlier text.
    """
    runs = [word_triples(text) for text in texts]
    nearest = [np.inf] * len(runs)  # distance of each text from those chosen
    chosen: list[int] = []
    while len(chosen) < min(count, len(runs)):
        found = max((index for index in range(len(runs)) if index not in chosen), key=lambda index: nearest[index])
        chosen.append(found)
        nearest = [min(before, _distance(own, runs[found])) for before, own in zip(nearest, runs, strict=True)]
    return chosen


def _distance(one: Hashes, other: Hashes) -> float:
    shared = len(np.intersect1d(one, other, assume_unique=True))
    union = len(one) + len(other) - shared
    return 1 - shared / union if union else 0.0
