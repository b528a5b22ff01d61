"""What is remembered of earlier groups: correct rollouts to replay, and prompts on which all rollouts failed.

Replay is that of ExGRPO (arXiv 2510.02245); failed prompts are collected for an SFT step as in ReLIFT (arXiv
2506.07527).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from hashlib import blake2b
from typing import Any, NamedTuple

from luffy.config.group import ReplayConfig
from luffy.errors import CheckpointError
from luffy.rl.fold import Event, Fold
from luffy.seeds import uniform
from luffy.types import SAMPLED, Group, Source, Trajectory

MAX_SUCCESSES = 8
"""Successes kept per prompt (the newest). The paper's code has no limit, but each costs a forward pass whenever the
prompt is replayed, and the older it is, the further the policy has moved away from the weights that sampled it."""
_BUCKET_MEAN, _BUCKET_STD = 0.5, 0.125
"""The normal density over the share of correct rows by which buckets are drawn; eight rows have steps of 0.125."""


ReadGroup = Callable[[int, int], Group | None]
"""Reads the group of a step (from 1) at an index (from 0) as it was observed; None if it is lost."""


class _Success(NamedTuple):
    """The location of a correct rollout in the journal, and a digest to find equal responses."""

    step: int
    group: int
    row: int
    digest: str


class _Record(NamedTuple):
    """One prompt in the buffer."""

    share_correct: float
    """Share of correct rows in its last group, the replayed one included, in steps of one row of a full group. 1: it
    was solved, and has left for good."""
    successes: tuple[_Success, ...]
    """Oldest first."""


_NONE = _Record(0.0, ())
_STARTED = ""
"""The place in the memory that tells whether recording has started; no prompt has this uid."""


def _share_correct(group: Group) -> float:
    """Share of correct rows among rollouts and replayed row.

    The replayed row counts, so that every group is counted in n-ths of its n rows: without it the k/8 of fresh groups
    and the k/7 of replayed ones would be different buckets, each sampled whatever its size, and what was replayed once
    would be replayed again and again. A group that lost rows to a failing environment counts as if it were full.
    """
    rows = [*group.rollouts, *(row for row in group.trajectories if Source.REPLAY in row.source)]
    size = len(rows) + len(group.failed)
    return round(sum(row.is_correct for row in rows) * size / len(rows)) / size


class ReplayBuffer:
    """The prompts that can be replayed, each with its stored successes.

    A prompt can be replayed when some rows of its *last* group were correct, a replayed one included: the paper buckets
    prompts by their latest accuracy. If all rollouts fail later, the prompt keeps its successes but is not replayed
    until it is solved again (the paper's code leaves it in its old bucket). A prompt whose rows were all correct, at
    any step, is never replayed.

    Recording starts after the first step whose accuracy is above `config.start_accuracy`, as in the paper's code. With
    `ahead` (`rl.max_staleness`) k, step s is planned after training on step s - 1 - k, so it sees the buffer after that
    step. A resumed run may know later steps, but ignores them and so replays the same prompts. The content is a pure
    function of the observed groups. The buffer stores locations, not rows: the responses stay in the rollout journal,
    and `read` loads them when they are replayed.
    """

    def __init__(self, config: ReplayConfig, seed: int, read: ReadGroup, ahead: int = 0) -> None:
        self._seed = seed
        self._read = read
        self._fold = Fold(
            partial(_enter, config.start_accuracy), ahead, lambda record: _Record(record[0], _successes(record[1]))
        )
        """Events of a step: the share of correct rollouts in all its groups; uid, share and successes of each of those
        with rollouts, in order."""

    def observe(self, step: int, groups: Sequence[Group]) -> None:
        """Record all groups of a step, before filtering, in order; groups without rollouts are ignored."""
        rollouts = [row for group in groups for row in group.rollouts]
        events: list[Event] = [(sum(row.is_correct for row in rollouts) / len(rollouts) if rollouts else 0.0,)]
        for index, group in enumerate(groups):
            if group.rollouts:
                successes = [
                    _Success(step, index, place, blake2b(repr(row.response_ids).encode(), digest_size=16).hexdigest())
                    for place, row in enumerate(group.trajectories)
                    if row.is_correct and not row.is_off_policy
                ]
                events.append((group.uid, _share_correct(group), successes))
        self._fold.add(step, events)

    def sample(self, step: int, count: int) -> dict[str, list[Trajectory]]:
        """Up to `count` prompts for `step`, each with its stored successes, oldest first.

        First a bucket (all prompts with the same accuracy) is sampled in proportion to the normal density at its
        accuracy, whatever its size, and then one of its prompts uniformly. A pure function of the observed groups.
        Raises CheckpointError when the journal has lost a success.
        """
        known = self._fold.known_to(step)
        # The uids of the prompts that can be replayed, by accuracy; both in ascending order.
        buckets: dict[float, list[str]] = {}
        for uid, record in sorted(known.items(), key=lambda entry: (entry[1].share_correct, entry[0])):
            if 0 < record.share_correct < 1:
                buckets.setdefault(record.share_correct, []).append(uid)
        chosen: list[str] = []
        while buckets and len(chosen) < count:
            place = len(chosen)
            share = self._share(list(buckets), uniform(self._seed, "replay", step, place, "bucket"))
            index = int(uniform(self._seed, "replay", step, place, "prompt") * len(buckets[share]))
            chosen.append(buckets[share].pop(index))
            if not buckets[share]:
                del buckets[share]
        return {uid: [self._row(success) for success in known[uid].successes] for uid in chosen}

    def state(self) -> dict[str, object]:
        return self._fold.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        if "started" in state:  # as development versions of 0.2.0 wrote it
            settled = state["prompts"] | dict.fromkeys(state["retired"], _Record(1.0, ()))
            recent = {
                step: [(share,), *((uid, *record) for uid, record in groups)]
                for step, (share, groups) in state["recent"].items()
            }
            state = {"settled": settled | ({_STARTED: _NONE} if state["started"] else {}), "recent": recent}
        self._fold.restore(state)

    def _row(self, success: _Success) -> Trajectory:
        group = self._read(success.step, success.group)
        if group is None:
            raise CheckpointError(
                f"the rollout journal has lost step {success.step}, which the replay buffer needs; "
                "delete the checkpoints to restart the stage"
            )
        row = group.trajectories[success.row]
        own = (logp for logp, source in zip(row.logp_behavior, row.source, strict=True) if source in SAMPLED)
        assert not any(map(math.isnan, own)), "a rollout of the policy without its log-probabilities"
        return row

    def _share(self, shares: Sequence[float], number: float) -> float:
        """The share whose interval of the cumulative distribution contains `number`."""
        exponents = [-0.5 * ((share - _BUCKET_MEAN) / _BUCKET_STD) ** 2 for share in shares]
        # Relative to the largest exponent: the likeliest bucket has weight 1.
        weights = [math.exp(exponent - max(exponents)) for exponent in exponents]
        target = number * sum(weights)
        for share, weight in zip(shares, weights, strict=True):
            target -= weight
            if target < 0:
                return share
        return shares[-1]


def _enter(start_accuracy: float, known: dict[str, _Record], step: int, events: Sequence[Event]) -> None:
    (share_correct,), *groups = events
    is_recording = _STARTED in known
    if share_correct > start_accuracy:
        known[_STARTED] = _NONE
    for uid, share, found in groups:
        before = known.get(uid, _NONE)
        if before.share_correct == 1.0:
            continue
        if share == 1.0:
            known[uid] = _Record(1.0, ())
        elif is_recording and (uid in known or found):
            latest: dict[str, _Success] = {}  # of equal responses the last, with its log-probabilities
            for success in (*before.successes, *_successes(found)):
                latest.pop(success.digest, None)
                latest[success.digest] = success
            known[uid] = _Record(share, tuple(latest.values())[-MAX_SUCCESSES:])


def _successes(values: Sequence[Any]) -> tuple[_Success, ...]:
    return tuple(_Success(*value) for value in values)


class FailedPrompts:
    """A queue of prompts, without duplicates, whose rollouts were all wrong.

    The prompts of a step are put at its front, as in the authors' code (older ones may then never be taken). A prompt
    that is solved while queued stays, as in the authors' code, and one that was taken may be added again.
    """

    def __init__(self) -> None:
        # A dictionary as an ordered set.
        self._waiting: dict[str, None] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def observe(self, groups: Sequence[Group], has_trace: Callable[[str], bool]) -> None:
        """Add the prompts of a step (all its groups, before filtering) that no rollout solved and that have a trace;
        groups without rollouts are ignored."""
        failed = dict.fromkeys(
            group.uid for group in groups if group.rollouts and group.accuracy == 0.0 and has_trace(group.uid)
        )
        self._waiting = failed | self._waiting

    def take(self, count: int) -> list[str] | None:
        """Remove and return the next `count` prompts; None while there are fewer."""
        if len(self._waiting) < count:
            return None
        taken = list(self._waiting)[:count]
        for uid in taken:
            del self._waiting[uid]
        return taken

    def state(self) -> dict[str, object]:
        return {"waiting": list(self._waiting)}

    def restore(self, state: Mapping[str, object]) -> None:
        waiting = state["waiting"]
        assert isinstance(waiting, Sequence)
        self._waiting = dict.fromkeys(waiting)
