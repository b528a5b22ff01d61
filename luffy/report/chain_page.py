"""The report of a chain: its finished stages read from disk, and laid out as a page.

Times come from the stages, so that the same inputs give the same bytes.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import cycle, groupby, islice
from pathlib import Path

from luffy.config import ExperimentConfig
from luffy.config.data import HubSource
from luffy.config.evaluation import VALIDATION, DecodingConfig
from luffy.config.yaml_source import dump_yaml
from luffy.data.answer_cards import DifficultyCard, SampleCard, TaughtCard, read_card
from luffy.environments.transcript import turns_of
from luffy.errors import LuffyError
from luffy.evaluation.results import Cell, CheckpointScores, advice_on, checkpoint_name, read_scores
from luffy.evaluation.sample_files import SampleRecord, find_samples, read_samples_of
from luffy.grading.extract import THINK_CLOSE, THINK_OPEN
from luffy.pipeline.graph import build_graph, providing, showing
from luffy.pipeline.manifest import Manifest, finished_manifest
from luffy.report.cards import difficulty_section, sample_section, taught_section
from luffy.report.cells import (
    NBSP,
    NONE,
    Table,
    TableCell,
    accuracy,
    count,
    difference,
    duration,
    moment,
    size_words,
    sources_table,
    step_times_table,
    table,
    table_of,
    timestamp,
    tone,
)
from luffy.report.curves import OUTCOME_COLORS, draw_held_out, draw_outcomes, draw_panels, rl_panels, supervised_panels
from luffy.report.evaluation_page import Scored, accuracies, breakdowns, measures, scores
from luffy.report.figures import bars
from luffy.report.page import Figure, Page, Sample, Section, Tile, Turn, markdown
from luffy.statistics.paired import BenchmarkComparison
from luffy.tracking.advice import advice_on_rl
from luffy.tracking.metrics import METRICS_FILE, MetricRow, read_metrics, training_rows
from luffy.tracking.step_times import step_times
from luffy.tracking.tracker import SAMPLES_FILE, SampleRollout, read_samples

_CHECKPOINT_COLORS = {"base": "c6", "sft": "c2", "rl": "c1"}
_OTHER_COLORS = ("c3", "c4", "c5", "c7")
"""For checkpoints of other stages, in the order of the chain."""
_SAMPLES_SHOWN = 4
_MAX_READ = 100_000
"""Responses of an evaluation among which those that are shown are looked for."""
_STAGE_TITLES = {"rl": "Reinforcement learning", "sft": "Supervised fine-tuning", "base": "Base policy"}


@dataclass(frozen=True, slots=True)
class FinishedChain:
    """A finished chain."""

    config: ExperimentConfig
    manifests: Mapping[str, Manifest]
    """By node, in the order of the chain."""
    metrics: dict[str, list[MetricRow]]
    """Training curves by node, those that exist."""
    decodings: Mapping[str, DecodingConfig]
    """Evaluated decodings; the first makes the headline."""
    rl: Mapping[str, ExperimentConfig]
    """The experiment as each stage of RL sees it, by node."""
    samples: tuple[tuple[int, SampleRollout], ...]
    """Rollouts of RL with their steps."""
    responses: tuple[SampleRecord, ...]
    """Without RL a right and a wrong response of the last evaluation to each suite, as far as they may be shown."""
    evaluations: tuple[CheckpointScores, ...]
    """In the order of the chain."""
    data_card: Mapping[str, object]
    difficulty: DifficultyCard | None = None
    taught: TaughtCard | None = None
    sampled: tuple[SampleCard, ...] = ()
    """Round by round."""

    @property
    def suites(self) -> list[str]:
        """Evaluated suites in the order of the configuration, the held-out training prompts last."""
        evaluated = {row.suite for evaluation in self.evaluations for row in evaluation.results.rows}
        return [name for name in dict.fromkeys((*self.config.data.suites, VALIDATION)) if name in evaluated]

    @property
    def transitions(self) -> list[tuple[CheckpointScores, CheckpointScores]]:
        """Consecutive checkpoints."""
        return list(zip(self.evaluations, self.evaluations[1:], strict=False))

    @property
    def colors(self) -> dict[str, str]:
        """Colour of each evaluated checkpoint, in the order of the chain."""
        others = cycle(_OTHER_COLORS)
        names = (evaluation.checkpoint for evaluation in self.evaluations)
        return {name: _CHECKPOINT_COLORS.get(name) or next(others) for name in names}

    def scored(self, cell: Cell) -> list[Scored]:
        """The checkpoints that were evaluated on a suite under a decoding."""
        found = ((each.checkpoint, each.row(cell)) for each in self.evaluations)
        return [Scored(checkpoint_name(name), self.colors[name], row) for name, row in found if row is not None]


def read_chain(config: ExperimentConfig, inputs: Mapping[str, Path]) -> FinishedChain:
    """Read the stages in `inputs`, which are named as the report's node in the chain's graph names them.

    Raises LuffyError when a stage is not finished or there is no evaluation.
    """
    nodes = build_graph(config)
    entries = {name: entry for entry, name in next(node for node in nodes if node.kind.reads_all).inputs.items()}
    stages = {node.name: inputs[entries[node.name]] for node in nodes if entries.get(node.name) in inputs}
    kinds = {node.name: node.stage for node in nodes if node.name in stages}
    evaluations = providing("evaluation", kinds)
    if not evaluations:
        raise LuffyError("the report needs at least one evaluated checkpoint")

    def cards(stage: str) -> list[Path]:
        return [stages[node.name] / "card.json" for node in nodes if node.stage == stage and node.name in stages]

    manifests = [finished_manifest(directory) for directory in stages.values()]
    curves = {name: read_metrics(stages[name] / METRICS_FILE) for name in showing("training_curves", kinds)}
    sampled = showing("rollout_samples", kinds)
    return FinishedChain(
        config=config,
        manifests={manifest.node: manifest for manifest in manifests},
        metrics={name: rows for name, rows in curves.items() if rows},
        decodings={
            name: decoding
            for node in nodes
            if node.stage == "evaluate" and node.name in stages and node.config.evaluation is not None
            for name, decoding in node.config.evaluation.decodings.items()
        },
        rl={node.name: node.config for node in nodes if node.stage == "rl"},
        samples=tuple(sample for name in sampled for sample in read_samples(stages[name] / SAMPLES_FILE)),
        responses=() if sampled else tuple(_responses(stages[evaluations[-1]])),
        evaluations=tuple(read_scores(stages[name], config.checkpoint_names) for name in evaluations),
        data_card=next((json.loads(path.read_bytes()) for path in cards("prepare_data")), {}),
        sampled=() if config.teachers else tuple(read_card(path, SampleCard) for path in cards("sample")),
        difficulty=next((read_card(path, DifficultyCard) for path in cards("difficulty")), None),
        taught=next((read_card(path, TaughtCard) for path in cards("sample")), None) if config.teachers else None,
    )


def _responses(directory: Path) -> list[SampleRecord]:
    found: dict[tuple[str, bool], SampleRecord] = {}
    for record in islice(read_samples_of(directory), _MAX_READ) if find_samples(directory) else ():
        if record.may_be_shown:
            found.setdefault((record.suite, record.correct), record)
    return list(found.values())


def chain_page(chain: FinishedChain) -> Page:
    """Lay out the report of a finished chain."""
    config, manifests = chain.config, chain.manifests
    last = max(manifests.values(), key=lambda manifest: moment(manifest.ended))
    facts = (
        " → ".join(checkpoint_name(evaluation.checkpoint) for evaluation in chain.evaluations),
        _methods(chain),
        f"seed {config.seed}",
        f"finished {timestamp(last.ended)}",
    )
    confidence = _confidence(chain)
    tables = Section(title="Tables", anchor="tables", sections=tuple(_more(chain, name) for name in chain.decodings))
    sections = (
        *(_opening(chain, confidence), _results(chain), *_training(chain), *_samples(chain)),
        *(tables, *_times(chain), _data(chain), _provenance(chain, last)),
    )
    return Page(config.name, " · ".join(filter(None, facts)), sections, "report")


def _methods(chain: FinishedChain) -> str:
    """The methods of the stages of RL in their order, or that of the experiment."""
    methods = dict.fromkeys(seen.method for seen in chain.rl.values() if seen.method)
    named = [*methods] or ([chain.config.method] if chain.config.method else [])
    return f"method{'s' if len(named) > 1 else ''} {', '.join(named)}" if named else ""


def chain_summary(chain: FinishedChain) -> str:
    """Accuracies and differences as Markdown, which depend on no time."""
    return markdown(Page(chain.config.name, "", (_results(chain),)))


def _confidence(chain: FinishedChain) -> str:
    return f"{100 * chain.evaluations[0].results.confidence:g} %"


def _results(chain: FinishedChain) -> Section:
    return Section(
        title="Results",
        anchor="results",
        notes=(
            f"Accuracy in percent, mean over all responses. The {_confidence(chain)} intervals are over problems: what "
            "another set of problems of the same kind would give. Differences are paired: the same problems, the same "
            "random seeds; green and red ones are significant after Holm's correction over the suites, whose p-value "
            "stands below them.",
        ),
        sections=tuple(_decoding(chain, name) for name in chain.decodings),
    )


def model_card(chain: FinishedChain, node: str, explained: Iterable[tuple[str, str]], file: str) -> str:
    """What a hub shows of the policy that the stage `node` made: data, method, accuracies, and how to make it again.

    `explained`: the title of each training stage and its loss in symbols; `file`: the experiment beside the card.
    """
    config, made = chain.config, chain.manifests[node]
    sources = (*config.data.training_sources.values(), *config.data.suites.values())
    path = config.model.path
    header = {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "base_model": path if path and path.count("/") == 1 and not Path(path).exists() else None,
        "datasets": list(dict.fromkeys(each.path for each in sources if isinstance(each, HubSource))),
        "tags": list(dict.fromkeys(filter(None, ("luffy", config.method)))),
    }
    origin = config.model.shown_name or "a policy trained from scratch"
    last = chain.evaluations[-1]
    cells = [(row.suite, row.decoding) for row in last.results.rows]
    _, shown = _accuracies(chain, {", ".join(cell): cell for cell in cells})
    level = f"{100 * last.results.confidence:g}{NBSP}%"
    versions = [f"{name} {made.versions[name]}" for name in ("luffy", "commit") if name in made.versions]
    sections = (
        Section(text=(f"The policy after the stage {node} of {config.name}, which starts from {origin}.",)),
        Section(
            title="Accuracy",
            notes=(f"In percent, of each evaluated checkpoint; {level} intervals over problems.",),
            tables=(shown,),
        ),
        Section(title="Method", sections=tuple(Section(title=name, code=text) for name, text in explained)),
        _data(chain),
        Section(title="To make it again", code=f"luffy run {file}", notes=(", ".join([*versions, f"key {made.key}"]),)),
    )
    known = dump_yaml({name: value for name, value in header.items() if value})
    return f"---\n{known}---\n\n{markdown(Page(config.name, '', sections))}"


def difference_table(chain: FinishedChain, decoding: str) -> Table:
    """Percentage points between consecutive checkpoints on the same problems."""
    header = (f"{checkpoint_name(a.checkpoint)} → {checkpoint_name(b.checkpoint)}" for a, b in chain.transitions)
    comparisons = [second.against(first, chain.suites, decoding) for first, second in chain.transitions]

    def shown(row: BenchmarkComparison) -> TableCell:
        found, color = row.paired, tone(row.paired.difference, row.is_significant)
        notes = (f"{found.wins} better,", f"{found.losses} worse,", f"{found.ties} same")
        return difference(found.difference, row.adjusted_p, notes=notes, tone=color)

    rows = ((suite, *(shown(each.on(suite)) for each in comparisons)) for suite in chain.suites)
    return table(("suite", *header), rows, "Change in percentage points", style="numbers")


def _opening(chain: FinishedChain, confidence: str) -> Section:
    """The headline accuracies, and how long all of it took."""
    cells = ((suite, decoding) for decoding in chain.decodings for suite in chain.suites)
    suite, decoding = next(cell for cell in cells if chain.scored(cell))
    scored = chain.scored((suite, decoding))
    problems = count(scored[0].row.num_problems, "problem")
    took = duration(sum(manifest.total_s for manifest in chain.manifests.values()))
    return Section(
        tiles=tuple(Tile(one.name, accuracy(one.row.estimate), one.color) for one in scored),
        notes=(
            f"Accuracy on {suite} ({problems}), {decoding} decoding; {confidence} interval.",
            f"The {count(len(chain.manifests), 'stage')} took {took} in all.",
        ),
    )


def _decoding(chain: FinishedChain, name: str) -> Section:
    decoding = chain.decodings[name]
    sampling = "the likeliest token" if decoding.temperature == 0 else f"temperature {decoding.temperature:g}"
    scored = {suite: chain.scored((suite, name)) for suite in chain.suites}
    counted = (one.row.outcomes for found in scored.values() for one in found)
    seen = {outcome for outcomes in counted for outcome, number in outcomes.items() if number}
    drawn, shown = _accuracies(chain, {suite: (suite, name) for suite in chain.suites})
    note = "Share of the responses; only a correct answer counts."
    legends = tuple((color, outcome.replace("_", " ")) for outcome, color in OUTCOME_COLORS.items() if outcome in seen)

    def shares(outcomes: Mapping[str, int]) -> list[tuple[str, float]]:
        total = sum(outcomes.values())
        return [(color, outcomes[each] / total) for each, color in OUTCOME_COLORS.items() if outcomes.get(each)]

    by_outcome = bars(
        [(suite, [(one.name, shares(one.row.outcomes)) for one in found]) for suite, found in scored.items()]
    )
    advice = {
        checkpoint_name(each.checkpoint): advice_on([row for row in each.results.rows if row.decoding == name])
        for each in chain.evaluations
    }
    tables = [shown, *([difference_table(chain, name)] if chain.transitions else [])]
    return Section(
        title=name,
        aside=f"{sampling}, {count(decoding.num_samples, 'response')} a problem",
        notes=tuple(f"{checkpoint}, {text}" for checkpoint, text in advice.items() if text),
        figures=(drawn, Figure("Outcomes of grading", note, by_outcome, legends)),
        tables=tuple(tables),
    )


def _accuracies(chain: FinishedChain, cells: Mapping[str, Cell]) -> tuple[Figure, Table]:
    """Accuracies of all checkpoints as a figure and a table, a row for each of the named `cells`."""
    models = [(color, checkpoint_name(each)) for each, color in chain.colors.items()]
    found = {label: {one.name: one.row.estimate for one in chain.scored(cell)} for label, cell in cells.items()}
    return accuracies("suite", models, found)


def _more(chain: FinishedChain, decoding: str) -> Section:
    """Every number of a decoding's results, a row per suite and checkpoint; and accuracy by subject and level."""
    by_suite = [chain.scored((suite, decoding)) for suite in chain.suites]
    scored = [one for found in by_suite for one in found]
    tables = (scores(scored, named=True), *measures(scored, named=True))
    return Section(
        title=f"Every number of {decoding} decoding, by suite: accuracies, forms, lengths, subjects",
        is_folded=True,
        tables=tuple(each for each in tables if each.rows),
        sections=tuple(section for found in by_suite for section in breakdowns(found)),
    )


def _training(chain: FinishedChain) -> list[Section]:
    sections = []
    for node, rows in reversed(chain.metrics.items()):
        objective = chain.rl[node].objective if node in chain.rl else None
        figures = draw_panels(rl_panels(objective) if objective else supervised_panels(), rows)
        outcomes = draw_outcomes(rows) if objective else None
        if outcomes:
            figures.insert(1, outcomes)
        steps = training_rows(rows)
        sections.append(
            Section(
                title=checkpoint_name(node, _STAGE_TITLES),
                aside=count(len(steps), "logged step"),
                anchor=node,
                notes=tuple(advice_on_rl(objective, steps) if objective else ()),
                figures=(*draw_held_out(rows), *figures),
            )
        )
    if sections:
        faint = "Faint lines: every step. Strong lines: mean over a window of a twentieth of the run."
        sections[0] = replace(sections[0], notes=(*sections[0].notes, faint))
    return sections


def _times(chain: FinishedChain) -> list[Section]:
    """Where a step's time went; empty where nothing was trained."""
    found = {name: step_times(training_rows(rows), rows) for name, rows in chain.metrics.items()}
    times = {name: each for name, each in found.items() if each is not None}
    if not times:
        return []
    note = (
        "Mean over the steps of a stage, as the trainer spent them: the parts add up to a step. Scoring: the batch, "
        "and log-probabilities under the old policy, the reference and the teacher. Of rollouts that are generated "
        "ahead, beside the training, only the wait for them is counted."
    )
    return [Section(title="Time of a step", anchor="times", notes=(note,), tables=(step_times_table(times),))]


def _samples(chain: FinishedChain) -> list[Section]:
    """The rollouts of the first logged step and of the last; without RL a right and a wrong response to each suite."""
    if not chain.samples:
        shown = tuple(map(_response, chain.responses))
        aside = checkpoint_name(chain.evaluations[-1].checkpoint)
        return [Section(title="Sample responses", aside=aside, anchor="samples", samples=shown)] if shown else []
    by_step = [[*rows] for _, rows in groupby(chain.samples, key=lambda sample: sample[0])]
    chosen = {"Early": by_step[0], "Late": by_step[-1]} if len(by_step) > 1 else {"Samples": by_step[0]}
    sections = []
    for title, rows in chosen.items():
        shown = tuple(_sample(rollout) for _, rollout in rows[:_SAMPLES_SHOWN])
        sections.append(Section(title=title, aside=f"step {rows[0][0]}", samples=shown))
    return [Section(title="Sample rollouts", anchor="samples", in_columns=True, sections=tuple(sections))]


def _response(record: SampleRecord) -> Sample:
    badges = (
        f"{record.suite}, {record.decoding}",
        record.outcome.replace("_", " "),
        "no answer" if record.answer is None else f"answer {record.answer}",
        f"reference {record.ground_truth}",
    )
    return _shown(badges, record.prompt.strip(), record.response, is_good=record.correct)


def _sample(rollout: SampleRollout) -> Sample:
    badges = [
        rollout.source.replace("_", "-"),
        f"{rollout.start} {'' if rollout.dose is None else f'{rollout.dose:.2g}'}".strip() if rollout.start else "",
        rollout.outcome.replace("_", " "),
        f"reward {rollout.reward:g}",
        f"advantage {rollout.advantage:+.3f}" if rollout.advantage is not None else "",
        f"reference {rollout.reference}" if rollout.reference else "",
        *(f"{name.replace('_', ' ')} {value:g}" for name, value in rollout.measures.items() if value),
    ]
    shown = tuple(filter(None, badges))
    return _shown(shown, rollout.prompt.strip(), rollout.response, rollout.hint, is_good=rollout.reward > 0)


def _shown(badges: tuple[str, ...], prompt: str, response: str, hint: str = "", *, is_good: bool) -> Sample:
    turns, text = [Turn("prompt", "", prompt)], prompt
    if hint:
        turns.append(Turn("prompt", "", f"hint while sampling:\n{hint}"))
        text += f"\n[hint] {hint}"
    for written_by, said in turns_of(response):
        before, close, after = said.rpartition(THINK_CLOSE)
        is_open = not close and THINK_OPEN in said
        turns.append(Turn(written_by, said, "") if is_open else Turn(written_by, before + close, after))
    return Sample(badges, is_good, tuple(turns), f"{text}\n{response}")


def _data(chain: FinishedChain) -> Section:
    """What the stages that make data have counted: of each source, teacher, pass rate and round of sampling."""
    sections = [
        *([taught_section(chain.taught)] if chain.taught else []),
        *([difficulty_section(chain.difficulty)] if chain.difficulty else []),
        *([sample_section(chain.sampled)] if chain.sampled else []),
    ]
    sources = chain.data_card.get("sources", {})
    assert isinstance(sources, Mapping)
    note = "Token counts: median and maximum of what passed."
    return Section(
        title="Data", anchor="data", notes=(note,), tables=(sources_table(sources),), sections=tuple(sections)
    )


def _provenance(chain: FinishedChain, last: Manifest) -> Section:
    def resumed(manifest: Manifest) -> str:
        extended = f", continues {manifest.extended}" if manifest.extended else ""
        return (f"from step {manifest.resumed_from}" if manifest.resumed_from else NONE) + extended

    stages = table_of(
        chain.manifests.items(),
        {
            "stage": lambda item: item[0],
            "key": lambda item: item[1].key,
            "started": lambda item: timestamp(item[1].started),
            "took": lambda item: duration(item[1].total_s),
            "size": lambda item: size_words(sum(output.bytes for output in item[1].outputs)),
            "resumed": lambda item: resumed(item[1]),
        },
    )
    machine = Section(
        in_columns=True,
        tables=(
            table(("package", "version"), last.versions.items(), "Versions"),
            table(("part", "found"), last.hardware.items(), "Hardware"),
        ),
    )
    config = dump_yaml(chain.config.model_dump(mode="json"))
    folded = Section(title="Configuration", is_folded=True, code=config)
    shown = (replace(stages, style="compact keys"),)
    return Section(title="Provenance", anchor="provenance", tables=shown, sections=(machine, folded))
