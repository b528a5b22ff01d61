"""The curves of a training stage, and which metrics come first wherever a run is shown.

A curve whose metric was not logged is left out.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import cycle

from luffy.config.objective import ObjectiveConfig
from luffy.config.terms import EntropyLoss
from luffy.report.figures import Chart, Line, chart
from luffy.report.page import Figure
from luffy.tracking.metrics import NAMESPACES, MetricRow, accuracy_names, held_out_curves, training_rows
from luffy.types import Outcome

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
OUTCOME_COLORS = {
    Outcome.CORRECT: "c3",
    Outcome.WRONG: "c2",
    Outcome.NO_ANSWER: "c6",
    Outcome.UNPARSABLE: "c4",
    Outcome.TIMED_OUT: "c5",
    Outcome.CRASHED: "c7",
}
_COLORS = ("c1", "c2", "c4", "c5", "c3", "c7")


@dataclass(frozen=True, slots=True)
class Panel:
    """One small plot of metrics over steps."""

    title: str
    note: str
    curves: tuple[tuple[str, str, str], ...]
    """(metric, label, colour) of each line."""
    percent: bool = False
    exact: bool = False
    """The metric is set, not measured: drawn without smoothing, from 0."""

    def chart(self, rows: Sequence[MetricRow]) -> Chart:
        """What was logged; without a line where nothing was."""
        lines = []
        for metric, label, color in self.curves:
            points = [(row["step"], row[metric]) for row in rows if math.isfinite(row.get(metric, math.nan))]
            if points:
                lines.append(Line(label, color, [step for step, _ in points], [value for _, value in points]))
        shares = self.percent and all(0 <= value <= 1 for line in lines for value in line.ys)
        return Chart(self.title, lines, percent=shares, exact=self.exact)


_REWARD_PANELS = (
    Panel(
        "Reward",
        "Mean reward of the group's rows; demonstrations are graded, not assumed right.",
        (("reward/mean", "rollouts", "c1"), ("batch/off_reward", "demonstrations", "c2")),
        percent=True,
    ),
    Panel(
        "Response length",
        "Tokens of a response.",
        (
            ("rollout/response_length_mean", "rollouts", "c1"),
            ("rollout/off_policy_length_mean", "demonstrations", "c2"),
        ),
    ),
)
_ENTROPY_PANEL = Panel(
    "Entropy",
    "The policy's entropy at the tokens of rollouts and of demonstrations, in nats.",
    (("actor/entropy_on_policy", "on-policy tokens", "c1"), ("actor/entropy_off_policy", "off-policy tokens", "c2")),
)
_GRADIENT_PANEL = Panel("Gradient norm", "Before clipping.", (("actor/grad_norm", "norm", "c1"),))
_POLICY_PANELS = (
    _ENTROPY_PANEL,
    Panel(
        "Probability of tokens",
        "Mean probability that the policy gives to the tokens it learns from.",
        (("actor/on_policy_prob", "on-policy tokens", "c1"), ("actor/off_policy_prob", "off-policy tokens", "c2")),
        percent=True,
    ),
    Panel(
        "Off-policy share",
        "Share of the batch's response tokens that come from demonstrations.",
        (("batch/off_policy_token_share", "off-policy tokens", "c2"),),
        percent=True,
    ),
    Panel(
        "Shaping weight",
        "Mean weight f(ρ) of the off-policy surrogate.",
        (("actor/off_policy_weight_mean", "off-policy weight", "c2"),),
    ),
    Panel(
        "Signal in the groups",
        "Groups without a solved rollout, with all solved, and groups that teach nothing (no variance of reward).",
        (
            # First, hence below the others: where no group is unsolved, it is the same as "all solved".
            ("batch/zero_advantage_share", "no signal", "c4"),
            ("batch/solve_none", "none solved", "c6"),
            ("batch/solve_all", "all solved", "c3"),
        ),
        percent=True,
    ),
    _GRADIENT_PANEL,
    Panel(
        "Truncation and clipping",
        "Rollouts that ran into the length limit; tokens whose ratio was clipped.",
        (("rollout/truncated_share", "truncated", "c6"), ("actor/clip_fraction", "clipped", "c4")),
        percent=True,
    ),
    Panel(
        "Sampler against trainer",
        "Mean gap between the log-probabilities of the sampler and of the trainer for the same tokens.",
        (("rollout/logp_gap_mean", "gap", "c4"),),
    ),
)
_COMMON_PANELS = (
    Panel("Learning rate", "The rate of each optimizer step.", (("actor/lr", "rate", "c6"),), exact=True),
    Panel("Speed", "Tokens a second.", (("perf/tokens_per_s", "tokens/s", "c6"),)),
)


def headlines_first(names: Iterable[str]) -> list[str]:
    """Metric names (without `step`): headlines first, the others by namespace and name."""
    known = [name for name in names if name != "step"]
    rest = sorted(
        (name for name in known if name not in HEADLINE_METRICS),
        key=lambda name: (NAMESPACES.index(name.partition("/")[0]), name),
    )
    return [name for name in HEADLINE_METRICS if name in known] + rest


def rl_panels(objective: ObjectiveConfig) -> tuple[Panel, ...]:
    """The plots of an RL run."""
    learning = [term.name for term in objective.terms if not isinstance(term.loss, EntropyLoss)]
    losses = ((f"actor/{name}_loss", name, color) for name, color in zip(learning, cycle(_COLORS), strict=False))
    loss = Panel(
        "Loss", "Terms of the objective, and the sum of all of them.", (*losses, ("actor/loss", "total", "fg"))
    )
    starts = (
        Panel(
            f"Start {name}",
            "Share of the trace that the rows with this start were given; share of these rows that were right.",
            ((f"rollout/dose_{name}", "given", "c2"), (f"rollout/success_{name}", "right", "c3")),
            percent=True,
        )
        for name, start in objective.group.starts.items()
        if start.dose is not None
    )
    return (*_REWARD_PANELS, *starts, loss, *_POLICY_PANELS, *_COMMON_PANELS)


def supervised_panels() -> tuple[Panel, ...]:
    """The plots of a supervised stage."""
    loss = Panel("Loss", "Mean over the tokens of the step.", (("actor/loss", "loss", "c1"),))
    return loss, _GRADIENT_PANEL, *_COMMON_PANELS


def panel_charts(panels: Sequence[Panel], rows: Sequence[MetricRow]) -> list[Chart]:
    """The panels that have something to show, for a picture."""
    return [drawn for panel in panels if (drawn := panel.chart(rows)).lines]


def headline_charts(rows: Sequence[MetricRow]) -> list[Chart]:
    """The few curves that show whether training works, validation included."""
    loss = Panel("Loss", "", (("actor/loss", "Loss", "c1"),))
    held_out = (Panel(name, "", ((name, name, "c1"),), percent=True) for name in accuracy_names(rows))
    return panel_charts([*_REWARD_PANELS, loss, _ENTROPY_PANEL, *held_out], rows)


def draw_panels(panels: Sequence[Panel], rows: Sequence[MetricRow]) -> list[Figure]:
    """The panels with data."""
    figures = []
    for panel in panels:
        if (drawn := panel.chart(rows)).lines:
            legend = _legend(drawn) if len(panel.curves) > 1 else ()
            figures.append(Figure(panel.title, panel.note, chart(drawn), legend))
    return figures


def draw_outcomes(rows: Sequence[MetricRow]) -> Figure | None:
    """What grading found over the steps of RL, stacked; None where it was not logged."""
    rows, lines = training_rows(rows), []
    for outcome, color in OUTCOME_COLORS.items():
        shares = [row.get(f"reward/{outcome}_share", 0.0) for row in rows]
        if any(share > 0 for share in shares):
            lines.append(Line(outcome.value.replace("_", " "), color, [row["step"] for row in rows], shares))
    if not lines:
        return None
    drawn = Chart("Outcomes", lines, percent=True, stacked=True)
    note = "Share of the rollouts by what grading found; each outcome but the first earns nothing."
    return Figure("Outcomes", note, chart(drawn), _legend(drawn))


def draw_held_out(rows: Sequence[MetricRow]) -> list[Figure]:
    """Held-out accuracy, a figure per suite over optimizer steps, from before training on; none without validation."""
    note = "By the engine in training; the first point is the policy before training. Band: interval over problems."
    figures = []
    for suite, points in held_out_curves([rows]).items():
        values = ([getattr(point, each) for point in points] for each in ("steps", "accuracy", "low", "high"))
        line = Line(suite, "c3", *values)
        drawn = chart(Chart(suite, [line], over="optimizer step", percent=True))
        figures.append(Figure(f"Held-out accuracy, {suite}", note, drawn))
    return figures


def _legend(drawn: Chart) -> tuple[tuple[str, str], ...]:
    return tuple((line.color, line.label) for line in drawn.lines)
