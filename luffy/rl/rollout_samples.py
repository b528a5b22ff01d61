"""A few rows of an RL step as text, for the log of samples."""

from collections.abc import Callable, Collection, Iterator, Sequence

from luffy.config.objective import AdvantageConfig, GroupAdvantage
from luffy.environments.transcript import transcript
from luffy.tracking.samples import SampleRollout
from luffy.training.batching import row_advantages
from luffy.types import Group, Trajectory

Decode = Callable[[Sequence[int]], str]


def sample_rollouts(
    groups: Sequence[Group],
    config: AdvantageConfig,
    count: int,
    decode_prompt: Decode,
    decode_response: Decode,
    confidential: Collection[str] = (),
) -> list[SampleRollout]:
    """One row of each of the first `count` groups: the first row, but the last row, often a trace, of the last group.

    Failed rows, which have no advantage, are shown where a group has no others. Groups whose uids are in `confidential`
    are left out.
    """
    advantages: Iterator[float | None] = iter(_advantages(groups, config))
    pairs: list[tuple[Group, list[tuple[Trajectory, float | None]]]] = [
        (group, [(row, next(advantages)) for row in group.trajectories]) for group in groups
    ]
    chosen = [(group, rows) for group, rows in pairs if group.uid not in confidential][:count]
    samples = []
    for index, (group, rows) in enumerate(chosen):
        shown = rows or [(row, None) for row in group.failed]
        row, advantage = shown[-1] if index == len(chosen) - 1 else shown[0]
        samples.append(_sample(group.uid, row, advantage, decode_prompt, decode_response))
    return samples


def _advantages(groups: Sequence[Group], config: AdvantageConfig) -> list[float] | list[None]:
    if isinstance(config, GroupAdvantage):
        return row_advantages(groups, config).tolist()
    return [None for group in groups for _ in group.trajectories]


def _sample(
    uid: str, row: Trajectory, advantage: float | None, decode_prompt: Decode, decode_response: Decode
) -> SampleRollout:
    return SampleRollout(
        uid=uid,
        prompt=decode_prompt(row.prompt_ids),
        response=transcript(row.response_ids, row.source, decode_response, row.prompt_ids, row.context_starts),
        source="off_policy" if row.is_off_policy else "on_policy",
        reward=row.reward,
        outcome=row.outcome.value,
        advantage=advantage,
        measures=dict(row.measures),
        hint_level=None if row.hint is None else row.hint.level,
        hint="" if row.hint is None else row.hint.text,
    )
