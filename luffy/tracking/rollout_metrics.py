"""Metrics of a step's groups: rewards, outcomes, lengths, and how much signal the groups carry."""

from collections import Counter
from collections.abc import Iterable, Sequence
from statistics import fmean

from luffy.types import PART_MEASURE, SAMPLED, Group, Outcome, Source, Trajectory


def rollout_metrics(groups: Sequence[Group], *, replays: bool = False) -> dict[str, float]:
    """Metrics of one RL step in the namespaces `batch/`, `rollout/` and `reward/`.

    `rollout/num_drawn` and `rollout/tokens_drawn` count everything sampled: also replaced and failed rollouts,
    continuations of prefixes, and groups that are dropped later. Failed rows have no reward: they count in the shares
    of outcomes (`reward/crashed_share`), and in no mean.
    Accuracy is that of rollouts, rows sampled from the prompt alone. In a step without rollouts, where every row is
    off-policy, it is that of the rows that end in sampled tokens. Metrics of traces, of prefix-conditioned rows and
    (without `replays`) of replayed rows are left out when there are none; all others are 0 then.
    """
    rows = [row for group in groups for row in group.trajectories]
    all_off_policy = not any(each.rollouts or each.failed_rollouts for each in groups)
    judged = [_judged_rows(group, all_off_policy) for group in groups]
    failed = [row for group in groups for row in (group.failed if all_off_policy else group.failed_rollouts)]
    metrics = _policy_metrics([row for found in judged for row in found], failed)
    metrics |= {
        "batch/solve_none": _mean(not any(row.is_correct for row in found) for found in judged if found),
        "batch/solve_all": _mean(all(row.is_correct for row in found) for found in judged if found),
        "batch/zero_variance_share": _mean(len(set(group.rewards)) <= 1 for group in groups),
        "batch/off_policy_token_share": _mean(
            source is not Source.ON_POLICY for row in rows for source in row.source if source is not Source.ENVIRONMENT
        ),
    }
    drawn = [row for group in groups for row in (*group.trajectories, *group.replaced, *group.failed)]
    sampled = [sum(source in SAMPLED for source in row.source) for row in drawn]
    metrics |= {"rollout/num_drawn": float(sum(map(bool, sampled))), "rollout/tokens_drawn": float(sum(sampled))}
    if replays:
        metrics["batch/replayed_share"] = _mean(group.is_replayed for group in groups)
    return metrics | _off_policy_metrics([row for row in rows if Source.OFF_POLICY in row.source])


def learned_metrics(
    groups: Sequence[Group], demonstrations: Sequence[Trajectory] = (), passes: int = 1
) -> dict[str, float]:
    """Rows and response tokens in the optimizer steps of an RL step: of the groups it keeps, traces included, once for
    each pass over them, and of the SFT step after it."""
    rows = [*passes * [row for group in groups for row in group.trajectories], *demonstrations]
    return {
        "batch/num_rows": float(len(rows)),
        "batch/response_tokens": float(sum(row.num_learnable for row in rows)),
    }


def staleness_metrics(groups: Sequence[Group], step: int, max_staleness: int) -> dict[str, float]:
    """How many RL steps the weights that sampled the tokens of `step` were behind: mean, maximum and share of each lag;
    and the share of groups that are too old to train on.

    Empty with `max_staleness` 0, where every token is sampled with the weights that are trained on it.
    """
    if max_staleness == 0:
        return {}
    lags = Counter(
        step - 1 - version
        for group in groups
        for row in group.trajectories
        for version, source in zip(row.weight_version, row.source, strict=True)
        if source in SAMPLED
    )
    total = max(lags.total(), 1)
    shares = {f"rollout/staleness_{lag}_share": lags[lag] / total for lag in range(max_staleness + 1)}
    return {
        "batch/stale_dropped_share": _mean(group.oldest_weights < step - 1 - max_staleness for group in groups),
        "rollout/staleness_mean": sum(lag * count for lag, count in lags.items()) / total,
        "rollout/staleness_max": float(max(lags, default=0)),
    } | shares


def _policy_metrics(rows: Sequence[Trajectory], failed: Sequence[Trajectory]) -> dict[str, float]:
    reward = _mean(row.reward for row in rows)
    metrics = {
        "reward/mean": reward,
        "rollout/response_length_mean": _mean(row.num_learnable for row in rows),
        "rollout/truncated_share": _mean(row.is_truncated for row in rows),
        "batch/on_reward": reward,
    }
    names = sorted({name for row in rows for name in row.measures})
    metrics |= {
        f"rollout/{name}_mean": _mean(row.measures[name] for row in rows if name in row.measures) for name in names
    }
    metrics |= _part_metrics(rows)
    graded = [*rows, *failed]
    return metrics | {f"reward/{outcome}_share": _mean(row.outcome is outcome for row in graded) for outcome in Outcome}


def _part_metrics(rows: Sequence[Trajectory]) -> dict[str, float]:
    """Reward and accuracy by part of a mixture of environments, of those parts that played."""
    metrics: dict[str, float] = {}
    for mark in sorted({name for row in rows for name in row.measures if name.startswith(PART_MEASURE)}):
        played = [row for row in rows if row.measures.get(mark)]
        if played:
            part = mark.removeprefix(PART_MEASURE)
            metrics[f"reward/{part}/mean"] = _mean(row.reward for row in played)
            metrics[f"reward/{part}/correct_share"] = _mean(row.is_correct for row in played)
    return metrics


def _off_policy_metrics(off_policy: Sequence[Trajectory]) -> dict[str, float]:
    """Metrics of whole traces and prefix-conditioned rows together, and the prefix share of the latter."""
    if not off_policy:
        return {}
    metrics = {
        "batch/off_reward": _mean(row.reward for row in off_policy),
        "rollout/off_policy_length_mean": _mean(row.num_learnable for row in off_policy),
    }
    prefixed = [row for row in off_policy if Source.ON_POLICY in row.source]
    if prefixed:
        shares = (row.source.count(Source.OFF_POLICY) / row.num_learnable for row in prefixed)
        metrics["batch/prefix_share_mean"] = _mean(shares)
    return metrics


def hint_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Metrics of a method with hints: the share of groups that were rolled out with them, the share of these that a
    hinted row solved, and the accuracy at each level that was sampled."""
    with_hints = [group.hinted for group in groups if group.hinted]
    levels: dict[int, list[bool]] = {}
    for row in (row for found in with_hints for row in found):
        assert row.hint is not None
        levels.setdefault(row.hint.level, []).append(row.is_correct)
    return {
        "batch/hinted_share": len(with_hints) / len(groups),
        "batch/hint_solved_share": _mean(any(row.is_correct for row in found) for found in with_hints),
    } | {f"batch/hint_level_{level}_accuracy": _mean(found) for level, found in sorted(levels.items())}


def anchor_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Metrics of a method with anchors: the share of groups that were searched for one, the share of these that found a
    correct row, and the mean number of rows that a search sampled."""
    branches = [
        [row for row in (*group.trajectories, *group.replaced) if Source.OFF_POLICY in row.source] for group in groups
    ]
    searched = [rows for rows in branches if rows]
    return {
        "batch/anchor_searched_share": len(searched) / len(groups),
        "batch/anchor_solved_share": _mean(any(row.is_correct for row in rows) for rows in searched),
        "batch/anchor_rows_mean": _mean(len(rows) for rows in searched),
    }


def _judged_rows(group: Group, all_off_policy: bool) -> Sequence[Trajectory]:
    """The group's rollouts; if no group has any, its rows that end in sampled tokens."""
    if not all_off_policy:
        return group.rollouts
    return [row for row in group.trajectories if row.source and row.source[-1] is Source.ON_POLICY]


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return fmean(found) if found else 0.0
