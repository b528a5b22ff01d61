"""Chooses among a prompt's traces by what the policy makes of them (`choose: likeliest_answer`)."""

import itertools
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from luffy.rl.rows import RolloutTask
from luffy.types import ANSWER_PROBABILITY, Group, Source, Trajectory


@dataclass(frozen=True, slots=True)
class TraceChoice:
    """A pure function of the groups, in whose `replaced` the collector left traces to choose from, and of the scores.

    A trace's score is the mean probability of the tokens of the reference answer, in the place of its own (AMPO,
    arXiv 2510.02227); a trace that does not show its answer scores 0. The score becomes a measure of the row.
    """

    decode: Callable[[Sequence[int]], str]
    """Gives the text of tokens and nothing else."""
    encode: Callable[[str], Sequence[int]]
    """Gives the tokens of a text and nothing else."""
    longest: int
    """Most tokens that the trainer takes; a longer row is not scored, and counts as 0."""

    def made(
        self,
        groups: Sequence[Group],
        tasks: Mapping[str, RolloutTask],
        score: Callable[[Sequence[Trajectory]], Sequence[float]],
    ) -> list[Group]:
        """The groups with the traces of the highest scores, as many as they have; ties go to the traces that they have.

        `score` gives the mean probability of the learnable tokens of each row.
        """
        traces = [_traces(group.trajectories) + _traces(group.replaced) for group in groups]
        compared = [found if _traces(group.replaced) else [] for group, found in zip(groups, traces, strict=True)]
        probes = [
            [self.probe(row, tasks[group.uid].ground_truth) for row in found]
            for group, found in zip(groups, compared, strict=True)
        ]
        asked = [probe for probe in itertools.chain(*probes) if probe is not None]
        scores = iter(score(asked) if asked else ())
        made = []
        for group, found, own in zip(groups, compared, probes, strict=True):
            if not found:
                made.append(group)
                continue
            measured = [
                replace(row, measures={**row.measures, ANSWER_PROBABILITY: 0.0 if probe is None else next(scores)})
                for row, probe in zip(found, own, strict=True)
            ]
            best = sorted(measured, key=lambda row: -row.measures[ANSWER_PROBABILITY])
            count = len(_traces(group.trajectories))
            rest, left = (
                tuple(row for row in rows if Source.OFF_POLICY not in row.source)
                for rows in (group.trajectories, group.replaced)
            )
            made.append(replace(group, trajectories=(*rest, *best[:count]), replaced=(*left, *best[count:])))
        return made

    def probe(self, row: Trajectory, ground_truth: str) -> Trajectory | None:
        """The trace up to its answer, then the reference answer, whose tokens alone are learnable; None where the trace
        does not show its answer, or there is no room.

        A token in which the answer begins behind other text counts as part of it.
        """
        text = self.decode(row.response_ids)
        place = text.rfind(row.answer) if row.answer and ground_truth else -1
        if place < 0:
            return None
        starts = range(len(row.response_ids))
        num_given = bisect_right(starts, place, key=lambda start: len(self.decode(row.response_ids[:start]))) - 1
        given = row.response_ids[:num_given]
        answer = tuple(self.encode(text[len(self.decode(given)) : place] + ground_truth))
        if len(row.prompt_ids) + len(given) + len(answer) > self.longest:
            return None
        return replace(
            row,
            response_ids=given + answer,
            source=(Source.ENVIRONMENT,) * len(given) + (Source.OFF_POLICY,) * len(answer),
            logp_behavior=(float("nan"),) * (len(given) + len(answer)),
            weight_version=(-1,) * (len(given) + len(answer)),
        )


def _traces(rows: Sequence[Trajectory]) -> list[Trajectory]:
    return [row for row in rows if Source.OFF_POLICY in row.source]
