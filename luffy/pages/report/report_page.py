"""The report as one HTML file that needs nothing else, and as Markdown.

All text from models and files is escaped. The same inputs give the same bytes; times come from the stages.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle, groupby

from luffy.config.yaml_source import dump_yaml
from luffy.environments.transcript import turns_of
from luffy.evaluation.results import advice_on, checkpoint_name
from luffy.grading.extract import THINK_CLOSE, THINK_OPEN
from luffy.pages import wording
from luffy.pages.breakdown import BreakdownSection, Scored, breakdown_sections
from luffy.pages.evaluation_tables import agreements, choices, forms, health, votes
from luffy.pages.held_out_figures import held_out_figures
from luffy.pages.panels import (
    OUTCOME_COLORS,
    Figure,
    draw_outcomes,
    draw_panels,
    rl_panels,
    supervised_panels,
)
from luffy.pages.plotter import Dot, Share, bar_plot, dot_plot
from luffy.pages.rendering import render
from luffy.pages.report.inputs import FinishedChain
from luffy.pages.report.opening import Headline, headlines, summarise
from luffy.pages.report.report_tables import (
    accuracy_table,
    data_table,
    detail_table,
    difference_table,
    difficulty_tables,
    mapping_table,
    measure_table,
    sample_table,
    stage_table,
    synthesis_table,
)
from luffy.pages.tables import Table
from luffy.tracking.advice import advice_on_rl
from luffy.tracking.metrics import training_rows
from luffy.tracking.tracker import SampleRollout
from luffy.types import Outcome

_CHECKPOINT_COLORS = {"base": "c6", "sft": "c2", "rl": "c1"}
_OTHER_COLORS = ("c3", "c4", "c5", "c7")
"""For checkpoints of other stages, in the order of the chain."""
_MEASURES = (
    ("Several responses to a problem: at least one of k correct (pass@k), the most frequent answer (maj@k)", votes),
    ("Responses: shares in percent, and how long they are", health),
    ("Responses by form and answer", forms),
    ("Agreement of two graders on the same responses", agreements),
    ("Multiple choice: a response that names no option counts as a guess in the adjusted score", choices),
)
_SAMPLES_SHOWN = 4
_STAGE_TITLES = {"rl": "Reinforcement learning", "sft": "Supervised fine-tuning", "base": "Base policy"}


@dataclass(frozen=True, slots=True)
class DecodingResults:
    """The results under one decoding."""

    name: str
    sampling: str
    accuracies: Table
    differences: Table | None
    dots: str
    outcomes: str
    measures: list[tuple[str, Table]]
    """Tables of other measures than accuracy, each with its title."""
    advice: list[str]
    """A line for each checkpoint without readable answers on some suite."""
    breakdowns: list[BreakdownSection]
    """By subject and level, where the data names them."""


@dataclass(frozen=True, slots=True)
class TrainingSection:
    """The curves of one stage."""

    node: str
    title: str
    note: str
    figures: list[Figure]
    advice: list[str]


@dataclass(frozen=True, slots=True)
class ReportSample:
    """A rollout as the page shows it."""

    rollout: SampleRollout
    turns: Sequence["ReportTurn"]
    measures: Sequence[tuple[str, float]]
    """Those of an episode that are not 0."""


@dataclass(frozen=True, slots=True)
class ReportTurn:
    """A turn of a rollout, its reasoning apart from its reply."""

    written_by: str
    """`policy`, `environment` or `demonstration`; "" for the only turn."""
    reasoning: str
    reply: str


@dataclass(frozen=True, slots=True)
class ReportPage:
    """Everything the templates show."""

    name: str
    subtitle: str
    finished: str
    summary: str
    confidence: str
    headlines: list[Headline]
    headline_note: str
    checkpoint_legend: list[tuple[str, str]]
    outcome_legend: list[tuple[str, str]]
    decodings: list[DecodingResults]
    details: Table
    training: list[TrainingSection]
    samples: list[tuple[int, list[ReportSample]]]
    """Early and late steps."""
    data: Table
    difficulty: tuple[Table, ...]
    """Which prompts RL got; empty where it took them all."""
    synthesis: tuple[Table, ...]
    """What teachers answered; empty without any."""
    sampled: Table | None
    """What the policy answered in each round, and which traces came of it."""
    stages: Table
    versions: Table
    hardware: Table
    config: str


def build_page(chain: FinishedChain) -> ReportPage:
    """Lay out the report of a finished chain."""
    manifests = chain.manifests
    last = max(manifests.values(), key=lambda manifest: wording.moment(manifest.ended))
    return ReportPage(
        name=chain.config.name,
        subtitle=_subtitle(chain),
        finished=wording.timestamp(last.ended),
        summary=summarise(chain),
        confidence=f"{100 * chain.evaluations[0].results.confidence:g}",
        headlines=headlines(chain),
        headline_note=f"{chain.suites[0]}, {chain.decodings[0]} decoding",
        checkpoint_legend=[(color, checkpoint_name(name)) for name, color in _colors(chain).items()],
        outcome_legend=[(OUTCOME_COLORS[name], name.replace("_", " ")) for name in _seen_outcomes(chain)],
        decodings=[_decoding(chain, name) for name in chain.decodings],
        details=detail_table(chain),
        training=_training(chain),
        samples=_early_and_late(chain.samples),
        data=data_table(chain.data_card),
        difficulty=difficulty_tables(chain.difficulty) if chain.difficulty else (),
        synthesis=(synthesis_table(chain.synthesis),) if chain.synthesis else (),
        sampled=sample_table(chain.sampled) if chain.sampled else None,
        stages=stage_table(manifests),
        versions=mapping_table(("package", "version"), last.versions),
        hardware=mapping_table(("part", "found"), last.hardware),
        config=dump_yaml(chain.config.model_dump(mode="json")),
    )


def render_html(page: ReportPage) -> str:
    """The page a person opens."""
    return render("report.html.jinja", page=page)


def render_markdown(page: ReportPage) -> str:
    """The same in text: tables and samples, no plots."""
    return render("report.md.jinja", page=page)


def _subtitle(chain: FinishedChain) -> str:
    config = chain.config
    parts = (
        " → ".join(checkpoint_name(evaluation.checkpoint) for evaluation in chain.evaluations),
        f"method {config.method}" if config.method else "",
        f"seed {config.seed}",
    )
    return " · ".join(part for part in parts if part)


def _decoding(chain: FinishedChain, name: str) -> DecodingResults:
    assert chain.config.evaluation is not None
    decoding = chain.config.evaluation.decodings[name]
    samples = wording.count(decoding.num_samples, "response")
    sampling = "the likeliest token" if decoding.temperature == 0 else f"temperature {decoding.temperature:g}"
    return DecodingResults(
        name=name,
        sampling=f"{sampling}, {samples} a problem",
        accuracies=accuracy_table(chain, name),
        differences=difference_table(chain, name) if chain.transitions else None,
        dots=dot_plot(f"accuracy-{name}", [(suite, _dots(chain, suite, name)) for suite in chain.suites]),
        outcomes=bar_plot(f"outcomes-{name}", [(suite, _bars(chain, suite, name)) for suite in chain.suites]),
        measures=[
            (title, table) for title, measure in _MEASURES if (table := measure_table(chain, name, measure)).rows
        ],
        advice=_advice(chain, name),
        breakdowns=[
            section
            for suite in chain.suites
            for section in breakdown_sections(f"breakdown-{name}", _scored(chain, suite, name))
        ],
    )


def _advice(chain: FinishedChain, decoding: str) -> list[str]:
    found = {
        checkpoint_name(evaluation.checkpoint): advice_on(
            [row for row in evaluation.results.rows if row.decoding == decoding]
        )
        for evaluation in chain.evaluations
    }
    return [f"{name}, {text}" for name, text in found.items() if text]


def _scored(chain: FinishedChain, suite: str, decoding: str) -> list[Scored]:
    colors = _colors(chain)
    found = ((e.checkpoint, e.row((suite, decoding))) for e in chain.evaluations)
    return [Scored(checkpoint_name(name), colors[name], row) for name, row in found if row is not None]


def _dots(chain: FinishedChain, suite: str, decoding: str) -> list[Dot]:
    return [Dot(scored.color, scored.row.accuracy, *scored.row.interval) for scored in _scored(chain, suite, decoding)]


def _colors(chain: FinishedChain) -> dict[str, str]:
    """Color of each evaluated checkpoint, in the order of the chain."""
    others = cycle(_OTHER_COLORS)
    names = (evaluation.checkpoint for evaluation in chain.evaluations)
    return {name: _CHECKPOINT_COLORS.get(name) or next(others) for name in names}


def _bars(chain: FinishedChain, suite: str, decoding: str) -> list[tuple[str, list[Share]]]:
    bars = []
    for evaluation in chain.evaluations:
        row = evaluation.row((suite, decoding))
        if row is not None:
            total = sum(row.outcomes.values())
            shares = [Share(OUTCOME_COLORS[o], row.outcomes[o] / total) for o in OUTCOME_COLORS if row.outcomes.get(o)]
            bars.append((checkpoint_name(evaluation.checkpoint), shares))
    return bars


def _seen_outcomes(chain: FinishedChain) -> list[Outcome]:
    rows = [row for evaluation in chain.evaluations for row in evaluation.results.rows]
    return [outcome for outcome in OUTCOME_COLORS if any(row.outcomes.get(outcome) for row in rows)]


def _training(chain: FinishedChain) -> list[TrainingSection]:
    sections = []
    for node, rows in reversed(chain.metrics.items()):
        title = _stage_title(node)
        objective = chain.config.objective if node == "rl" else None
        figures = draw_panels(node, rl_panels(objective.terms) if objective else supervised_panels(), rows)
        outcomes = draw_outcomes(rows) if objective else None
        if outcomes:
            figures.insert(1, outcomes)
        figures = [*held_out_figures(node, rows), *figures]
        steps = training_rows(rows)
        advice = advice_on_rl(objective, steps) if objective else []
        sections.append(TrainingSection(node, title, wording.count(len(steps), "logged step"), figures, advice))
    return sections


def _stage_title(node: str) -> str:
    """`Supervised fine-tuning 2` for the second round's."""
    stage, _, number = node.rpartition("_")
    if number.isdecimal() and stage in _STAGE_TITLES:
        return f"{_STAGE_TITLES[stage]} {number}"
    return _STAGE_TITLES.get(node, node)


def _early_and_late(samples: Sequence[tuple[int, SampleRollout]]) -> list[tuple[int, list[ReportSample]]]:
    """The rollouts of the first logged step and of the last."""
    steps = [(step, [rollout for _, rollout in rows]) for step, rows in groupby(samples, key=lambda sample: sample[0])]
    chosen = [steps[0], steps[-1]] if len(steps) > 1 else steps
    return [(step, [_shown(rollout) for rollout in rollouts[:_SAMPLES_SHOWN]]) for step, rollouts in chosen]


def _shown(rollout: SampleRollout) -> ReportSample:
    turns = [_turn(written_by, text) for written_by, text in turns_of(rollout.response)]
    return ReportSample(rollout, turns, [(name, value) for name, value in rollout.measures.items() if value])


def _turn(written_by: str, text: str) -> ReportTurn:
    before, close, after = text.rpartition(THINK_CLOSE)
    if not close and THINK_OPEN in text:
        return ReportTurn(written_by, reasoning=text, reply="")
    return ReportTurn(written_by, reasoning=before + close, reply=after)
