"""Metrics of a step's groups: rewards, outcomes, lengths, and how much signal the groups carry."""

from collections import Counter
from collections.abc import Iterable, Sequence
from statistics import fmean

from luffy.types import ANSWER_PROBABILITY, PART_MEASURE, SAMPLED, FinishReason, Group, Outcome, Source, Trajectory


def rollout_metrics(groups: Sequence[Group], *, replays: bool = False) -> dict[str, float]:
    """Metrics of one RL step in the namespaces `batch/`, `rollout/` and `reward/`.

    `rollout/num_drawn` and `rollout/tokens_drawn` count everything sampled: also replaced and failed rollouts,
    continuations of prefixes, and groups that are dropped later; of rows beside a group the tokens alone. Failed rows
    have no reward: they count in the shares of outcomes (`reward/crashed_share`), and in no mean.
    Accuracy is that of rollouts, rows sampled from the prompt alone. In a step without rollouts, where every row is
    off-policy, it is that of the rows that end in sampled tokens. Metrics of traces, of prefix-conditioned rows and
    (without `replays`) of replayed rows are left out when there are none; all others are 0 then.
    """
    rows = [row for group in groups for row in group.trajectories]
    all_off_policy = not any(each.rollouts or each.failed_rollouts for each in groups)
    judged = [
        [row for row in each.trajectories if row.source and row.source[-1] is Source.ON_POLICY]
        if all_off_policy
        else each.rollouts
        for each in groups
    ]
    failed = [row for group in groups for row in (group.failed if all_off_policy else group.failed_rollouts)]
    policy = [row for found in judged for row in found]
    reward = _mean(row.reward for row in policy)
    metrics = {
        "reward/mean": reward,
        "rollout/response_length_mean": _mean(row.num_learnable for row in policy),
        "rollout/truncated_share": _mean(row.is_truncated for row in policy),
        "batch/on_reward": reward,
    }
    for name in sorted({name for row in policy for name in row.measures}):
        metrics[f"rollout/{name}_mean"] = _mean(row.measures[name] for row in policy if name in row.measures)
    # Parts of a mixture of environments, where they played.
    for mark in sorted({name for row in policy for name in row.measures if name.startswith(PART_MEASURE)}):
        if played := [row for row in policy if row.measures.get(mark)]:
            part = mark.removeprefix(PART_MEASURE)
            metrics[f"reward/{part}/mean"] = _mean(row.reward for row in played)
            metrics[f"reward/{part}/correct_share"] = _mean(row.is_correct for row in played)
    for outcome in Outcome:
        metrics[f"reward/{outcome}_share"] = _mean(row.outcome is outcome for row in (*policy, *failed))
    drawn = [row for group in groups for row in (*group.trajectories, *group.replaced, *group.failed)]
    beside = [row for group in groups for row in group.beside]
    sampled, more = ([sum(source in SAMPLED for source in row.source) for row in rows] for rows in (drawn, beside))
    metrics |= {
        "batch/solve_none": _mean(not any(row.is_correct for row in found) for found in judged if found),
        "batch/solve_all": _mean(all(row.is_correct for row in found) for found in judged if found),
        "batch/zero_variance_share": _mean(len(set(group.rewards)) <= 1 for group in groups),
        "batch/off_policy_token_share": _mean(
            source is not Source.ON_POLICY for row in rows for source in row.source if source is not Source.ENVIRONMENT
        ),
        "rollout/num_drawn": float(sum(map(bool, sampled))),
        "rollout/tokens_drawn": float(sum(sampled) + sum(more)),
    }
    if replays:
        metrics["batch/replayed_share"] = _mean(group.is_replayed for group in groups)
    if off_policy := [row for row in rows if Source.OFF_POLICY in row.source]:
        metrics["batch/off_reward"] = _mean(row.reward for row in off_policy)
        metrics["rollout/off_policy_length_mean"] = _mean(row.num_learnable for row in off_policy)
    if prefixed := [row for row in off_policy if Source.ON_POLICY in row.source]:
        shares = (row.source.count(Source.OFF_POLICY) / row.num_learnable for row in prefixed)
        metrics["batch/prefix_share_mean"] = _mean(shares)
    return metrics


def tokens_sampled(groups: Sequence[Group], step: int) -> int:
    """Number of tokens that `step` sampled: without those that earlier steps had sampled for carried groups."""
    return sum(
        source in SAMPLED and not (group.is_carried and version < step - 1)
        for group in groups
        for row in (*group.trajectories, *group.replaced, *group.failed)
        for version, source in zip(row.weight_version, row.source, strict=True)
    )


def partial_metrics(groups: Sequence[Group], step: int) -> dict[str, float]:
    """Metrics of a step with `rl.partial_rollout_tokens`, of its open groups too: their number, the rows that the next
    step continues, and the tokens sampled in this step (the other metrics count a row once its group is complete).
    """
    rows = [row for group in groups for row in group.trajectories]
    return {
        "batch/open_groups": float(sum(group.is_open for group in groups)),
        "rollout/interrupted_rows": float(sum(row.finish_reason is FinishReason.INTERRUPTED for row in rows)),
        "rollout/tokens_drawn": float(tokens_sampled(groups, step)),
    }


def learned_metrics(
    groups: Sequence[Group], demonstrations: Sequence[Trajectory] = (), passes: int = 1
) -> dict[str, float]:
    """Rows and response tokens in the optimizer steps of an RL step: of the groups it keeps, traces included, once for
    each pass over them, and of the SFT step after it."""
    rows = [*passes * [row for group in groups for row in group.learned], *demonstrations]
    return {"batch/num_rows": float(len(rows)), "batch/response_tokens": float(sum(row.num_learnable for row in rows))}


def staleness_metrics(groups: Sequence[Group], step: int, bound: int) -> dict[str, float]:
    """How many RL steps the weights that sampled the tokens of `step` were behind: mean, maximum and share of each lag;
    and the share of groups that are too old to train on.

    Empty with `bound` 0 (`RLConfig.staleness_bound`), where every token is sampled with the weights that are trained on
    it.
    """
    if bound == 0:
        return {}
    lags = Counter(
        step - 1 - version
        for group in groups
        for row in group.trajectories
        for version, source in zip(row.weight_version, row.source, strict=True)
        if source in SAMPLED
    )
    total = max(lags.total(), 1)
    shares = {f"rollout/staleness_{lag}_share": lags[lag] / total for lag in range(bound + 1)}
    return {
        "batch/stale_dropped_share": _mean(group.oldest_weights < step - 1 - bound for group in groups),
        "rollout/staleness_mean": sum(lag * count for lag, count in lags.items()) / total,
        "rollout/staleness_max": float(max(lags, default=0)),
    } | shares


def start_metrics(groups: Sequence[Group], names: Iterable[str]) -> dict[str, float]:
    """Metrics of each start: the share of groups that have rows of it and, over these rows, kept or not, the mean dose
    and the share of correct ones, and the share of these groups in which one is correct."""
    metrics = {}
    for name in names:
        found = [rows for rows in (group.of_start(name) for group in groups) if rows]
        rows = [row for of_group in found for row in of_group]
        doses = [row.start.dose for row in rows if row.start is not None and row.start.dose is not None]
        metrics[f"batch/share_{name}"] = len(found) / len(groups)
        metrics[f"batch/solved_{name}"] = _mean(any(row.is_correct for row in of_group) for of_group in found)
        metrics[f"rollout/success_{name}"] = _mean(row.is_correct for row in rows)
        metrics |= {f"rollout/dose_{name}": _mean(doses)} if doses else {}
    return metrics


def choice_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Metrics of a method whose trainer chooses among traces: the share of groups in which there was a choice, and the
    mean probability of the answer after the chosen traces and after the others."""

    def scores(rows: Iterable[Trajectory]) -> list[float]:
        return [row.measures[ANSWER_PROBABILITY] for row in rows if ANSWER_PROBABILITY in row.measures]

    return {
        "batch/choice_share": _mean(bool(scores(group.replaced)) for group in groups),
        "batch/chosen_answer_probability": _mean(score for group in groups for score in scores(group.trajectories)),
        "batch/other_answer_probability": _mean(score for group in groups for score in scores(group.replaced)),
    }


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return fmean(found) if found else 0.0
