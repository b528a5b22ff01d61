"""Measures of whole groups, for `environment.scoring.group_measures`.

group_measures: {shortest: "luffy.environments.relative:shortest_correct"}
weights: {answer: 1.0, shortest: 0.2}
"""

from collections.abc import Mapping, Sequence


def shortest_correct(completions: Sequence[Sequence[Mapping[str, str]]], correct: Sequence[bool]) -> list[float]:
    """1 for the correct episode in which the policy wrote the fewest characters, ties included; 0 for the others."""
    lengths = [
        sum(len(turn["content"]) for turn in completion if turn["role"] == "assistant") for completion in completions
    ]
    least = min((length for length, right in zip(lengths, correct, strict=True) if right), default=None)
    return [float(right and length == least) for length, right in zip(lengths, correct, strict=True)]
