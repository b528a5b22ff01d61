"""The metrics that come first wherever a run is shown: reports, the terminal, the Prefect UI."""

from collections.abc import Iterable

from luffy.tracking.metrics import NAMESPACES

HEADLINE_METRICS = (
    "reward/mean",
    "batch/off_reward",
    "actor/loss",
    "actor/entropy_on_policy",
    "actor/grad_norm",
    "rollout/response_length_mean",
    "rollout/truncated_share",
    "perf/tokens_per_s",
    "perf/mfu",
    "perf/gpu_hours",
    "perf/peak_memory_gib",
)
CURVE_METRICS = ("reward/mean", "actor/loss", "actor/entropy_on_policy", "rollout/response_length_mean")
"""Metrics to plot where there is little space."""


def headlines_first(names: Iterable[str]) -> list[str]:
    """Metric names (without `step`): headlines first, the others by namespace and name."""
    known = [name for name in names if name != "step"]
    rest = sorted(
        (name for name in known if name not in HEADLINE_METRICS),
        key=lambda name: (NAMESPACES.index(name.partition("/")[0]), name),
    )
    return [name for name in HEADLINE_METRICS if name in known] + rest
