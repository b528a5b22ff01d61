"""A few rollouts of an RL step as a person would read them."""

from collections.abc import Callable, Sequence

from luffy.config.objective import ObjectiveConfig
from luffy.tracking.samples import SampleRollout
from luffy.training.rl_update import advantages_of
from luffy.types import Group, Trajectory

Decode = Callable[[Sequence[int]], str]


def sample_rollouts(
    groups: Sequence[Group], objective: ObjectiveConfig, count: int, decode_prompt: Decode, decode_response: Decode
) -> list[SampleRollout]:
    """One row of each of the first `count` groups: rollouts, and last a demonstration where there is one."""
    chosen = groups[:count]
    advantages = iter(advantages_of(chosen, objective.advantage).tolist())
    samples = []
    for index, group in enumerate(chosen):
        pairs = [(row, next(advantages)) for row in group.trajectories]
        row, advantage = pairs[-1] if index == len(chosen) - 1 else pairs[0]
        samples.append(_sample(group.uid, row, advantage, decode_prompt, decode_response))
    return samples


def _sample(
    uid: str, row: Trajectory, advantage: float, decode_prompt: Decode, decode_response: Decode
) -> SampleRollout:
    return SampleRollout(
        uid=uid,
        prompt=decode_prompt(row.prompt_ids),
        response=decode_response(row.response_ids),
        source="off_policy" if row.is_off_policy else "on_policy",
        reward=row.reward,
        outcome=row.outcome.value,
        advantage=advantage,
    )
