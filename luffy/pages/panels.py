"""The curves of a training stage; a curve whose metric was not logged is left out."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle

from luffy.config.objective import EntropyLoss, TermConfig
from luffy.pages.headline import CURVE_METRICS
from luffy.pages.plotter import Plot, Series, curve_plot, stacked_plot
from luffy.tracking.metrics import MetricRow, accuracy_names, training_rows
from luffy.types import Outcome

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
class Curve:
    """One line: which metric, how it is called and coloured."""

    metric: str
    label: str
    color: str = "c1"


@dataclass(frozen=True, slots=True)
class Panel:
    """One small plot."""

    title: str
    note: str
    """Explanation for the reader."""
    curves: tuple[Curve, ...]
    percent: bool = False
    exact: bool = False
    """The metric is set, not measured: drawn without smoothing, from 0."""


_REWARD_PANELS = (
    Panel(
        "Reward",
        "Mean reward of the group's rows; demonstrations are graded, not assumed right.",
        (Curve("reward/mean", "rollouts"), Curve("batch/off_reward", "demonstrations", "c2")),
        percent=True,
    ),
    Panel(
        "Response length",
        "Tokens of a response.",
        (
            Curve("rollout/response_length_mean", "rollouts"),
            Curve("rollout/off_policy_length_mean", "demonstrations", "c2"),
        ),
    ),
)
_POLICY_PANELS = (
    Panel(
        "Entropy",
        "The policy's entropy at the tokens of rollouts and of demonstrations, in nats.",
        (
            Curve("actor/entropy_on_policy", "on-policy tokens"),
            Curve("actor/entropy_off_policy", "off-policy tokens", "c2"),
        ),
    ),
    Panel(
        "Probability of tokens",
        "Mean probability that the policy gives to the tokens it learns from.",
        (
            Curve("actor/on_policy_prob", "on-policy tokens"),
            Curve("actor/off_policy_prob", "off-policy tokens", "c2"),
        ),
        percent=True,
    ),
    Panel(
        "Off-policy share",
        "Share of the batch's response tokens that come from demonstrations.",
        (Curve("batch/off_policy_token_share", "off-policy tokens", "c2"),),
        percent=True,
    ),
    Panel(
        "Shaping weight",
        "Mean weight f(ρ) of the off-policy surrogate.",
        (Curve("actor/off_policy_weight_mean", "off-policy weight", "c2"),),
    ),
    Panel(
        "Signal in the groups",
        "Groups without a solved rollout, with all solved, and groups that teach nothing (no variance of reward).",
        (
            Curve("batch/solve_none", "none solved", "c6"),
            Curve("batch/solve_all", "all solved", "c3"),
            Curve("batch/zero_advantage_share", "no signal", "c4"),
        ),
        percent=True,
    ),
    Panel("Gradient norm", "Before clipping.", (Curve("actor/grad_norm", "norm"),)),
    Panel(
        "Truncation and clipping",
        "Rollouts that ran into the length limit; tokens whose ratio was clipped.",
        (
            Curve("rollout/truncated_share", "truncated", "c6"),
            Curve("actor/clip_fraction", "clipped", "c4"),
        ),
        percent=True,
    ),
    Panel(
        "Sampler against trainer",
        "Mean gap between the log-probabilities of the sampler and of the trainer for the same tokens.",
        (Curve("rollout/logp_gap_mean", "gap", "c4"),),
    ),
)
_COMMON_PANELS = (
    Panel("Learning rate", "The rate of each optimizer step.", (Curve("actor/lr", "rate", "c6"),), exact=True),
    Panel("Speed", "Tokens a second.", (Curve("perf/tokens_per_s", "tokens/s", "c6"),)),
)


@dataclass(frozen=True, slots=True)
class Figure:
    """A plot with its caption."""

    title: str
    note: str
    legend: tuple[tuple[str, str], ...]
    """(color, label) of each series; empty if the title is enough."""
    svg: str


def rl_panels(terms: Sequence[TermConfig]) -> tuple[Panel, ...]:
    """The plots of an RL run whose objective has these terms."""
    learning = [term.name for term in terms if not isinstance(term.loss, EntropyLoss)]
    losses = (Curve(f"actor/{name}_loss", name, color) for name, color in zip(learning, cycle(_COLORS), strict=False))
    loss = Panel(
        "Loss", "Terms of the objective, and the sum of all of them.", (*losses, Curve("actor/loss", "total", "fg"))
    )
    return (*_REWARD_PANELS, loss, *_POLICY_PANELS, *_COMMON_PANELS)


def supervised_panels() -> tuple[Panel, ...]:
    """The plots of a supervised stage."""
    return (
        Panel("Loss", "Mean over the tokens of the step.", (Curve("actor/loss", "loss"),)),
        Panel("Gradient norm", "Before clipping.", (Curve("actor/grad_norm", "norm"),)),
        *_COMMON_PANELS,
    )


def draw_panels(node: str, panels: Sequence[Panel], rows: Sequence[MetricRow]) -> list[Figure]:
    """The panels with data; `node` distinguishes the ids of equal panels of several stages."""
    return [figure for panel in panels if (figure := _draw(node, panel, rows)) is not None]


def draw_outcomes(rows: Sequence[MetricRow]) -> Figure | None:
    """What grading found over the steps of RL, stacked; None where it was not logged."""
    rows = training_rows(rows)
    logged = [outcome for outcome in OUTCOME_COLORS if any(row.get(_share(outcome), 0.0) > 0 for row in rows)]
    if not logged:
        return None
    steps = [row["step"] for row in rows]
    series = [
        Series(_spell(outcome), OUTCOME_COLORS[outcome], steps, [row.get(_share(outcome), 0.0) for row in rows])
        for outcome in logged
    ]
    note = "Share of the rollouts by what grading found; each outcome but the first earns nothing."
    return Figure("Outcomes", note, tuple(_legend(series)), stacked_plot("rl-outcomes", series))


def panel_plots(panels: Sequence[Panel], rows: Sequence[MetricRow]) -> list[Plot]:
    """The panels that have something to show, for a picture."""
    return [plot for panel in panels if (plot := _plot(panel, rows)).series]


def headline_plots(rows: Sequence[MetricRow]) -> list[Plot]:
    """The few curves that show whether training works, validation included."""
    loss = Panel("Loss", "", (Curve("actor/loss", "Loss"),))
    known = [panel for panel in (*_REWARD_PANELS, loss, *_POLICY_PANELS) if panel.curves[0].metric in CURVE_METRICS]
    held_out = (Panel(name, "", (Curve(name, name),), percent=True) for name in accuracy_names(rows))
    return panel_plots([*known, *held_out], rows)


def _plot(panel: Panel, rows: Sequence[MetricRow]) -> Plot:
    series = [line for curve in panel.curves if (line := _series(curve, rows)).steps]
    shares = panel.percent and all(0 <= value <= 1 for line in series for value in line.values)
    return Plot(panel.title, series, percent=shares, exact=panel.exact)


def _draw(node: str, panel: Panel, rows: Sequence[MetricRow]) -> Figure | None:
    plot = _plot(panel, rows)
    if not plot.series:
        return None
    legend = tuple(_legend(plot.series)) if len(panel.curves) > 1 else ()
    name = f"{node}-{panel.title.lower().replace(' ', '-')}"
    svg = curve_plot(name, plot.series, percent=plot.percent, exact=plot.exact)
    return Figure(panel.title, panel.note, legend, svg)


def _series(curve: Curve, rows: Sequence[MetricRow]) -> Series:
    points = [(row["step"], row[curve.metric]) for row in rows if math.isfinite(row.get(curve.metric, math.nan))]
    return Series(curve.label, curve.color, [step for step, _ in points], [value for _, value in points])


def _legend(series: Sequence[Series]) -> Iterator[tuple[str, str]]:
    return ((line.color, line.label) for line in series)


def _share(outcome: Outcome) -> str:
    return f"reward/{outcome}_share"


def _spell(outcome: Outcome) -> str:
    return outcome.value.replace("_", " ")
