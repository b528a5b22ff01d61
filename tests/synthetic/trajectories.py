"""Rows of groups, for tests to which most of a row does not matter."""

from luffy.types import FinishReason, Group, Outcome, Source, Trajectory


def row_of(
    reward: float = 0.0,
    ids: tuple[int, ...] = (2,),
    source: Source | tuple[Source, ...] = Source.ON_POLICY,
    **changes: object,
) -> Trajectory:
    """A row that is right where it has a reward, of tokens that are all from one source unless `source` lists them."""
    known = {
        "prompt_ids": (1,),
        "logp_behavior": (-0.5,) * len(ids),
        "weight_version": (0,) * len(ids),
        "outcome": Outcome.CORRECT if reward else Outcome.WRONG,
        "finish_reason": FinishReason.STOP,
    }
    sources = source if isinstance(source, tuple) else (source,) * len(ids)
    return Trajectory(response_ids=ids, source=sources, reward=float(reward), **known | changes)


def hinted_rows(group: Group) -> list[Trajectory]:
    """The rows that were sampled under another prompt than the bare one, those that are not trained on included."""
    return [row for row in (*group.trajectories, *group.replaced, *group.beside) if row.is_hinted]
