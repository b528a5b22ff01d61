"""A comparison of methods under Prefect: shared stages once, arms tuned, the reported runs, the page."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from prefect import task
from prefect.cache_policies import NO_CACHE

from luffy.cli.console import stage_title
from luffy.config.many_runs.arm_run import SHARED_NODES, folder_of
from luffy.config.many_runs.comparison import Candidate, Comparison
from luffy.config.many_runs.selection_split import decoding_of
from luffy.errors import LuffyError
from luffy.evaluation.checkpoint_scores import read_scores
from luffy.evaluation.method_comparison.arms import Arm
from luffy.evaluation.method_comparison.findings import Findings, as_json, find
from luffy.evaluation.method_comparison.tuning import ArmTuning, Try, Tuning, tried
from luffy.files import write_atomic
from luffy.pipeline.reuse import FinishedStage
from luffy.pipeline.workspace import Workspace
from luffy.report.figures import Chart, colored, picture_url
from luffy.report.page import html
from luffy.report.sweep_pages import accuracy_table, comparison_page, cost_table, difference_table, tries_table
from luffy.tasks.artifacts import Artifact
from luffy.tasks.many_runs import (
    ManyRuns,
    RunOutcome,
    offer_artifacts,
    open_runs,
    page_artifact,
    parted,
    run_all,
    table_artifact,
)

PAGE_FILE = "comparison.html"
DATA_FILE = "comparison.json"
_UNTUNED = "no point of its grid has finished with every seed of select.seeds"


@dataclass(frozen=True)
class ReportedRuns:
    """Outcomes of the reported runs of a comparison, and of its tuning."""

    outcomes: Mapping[str, RunOutcome]
    """By `ArmRun.folder`; arms without a chosen value are missing."""
    tuning: Tuning | None
    """None: the comparison has no `select`."""


@contextmanager
def open_comparison(comparison: Comparison, workspace: Workspace, *, verify: bool) -> Iterator[ManyRuns]:
    """Open what the runs of `comparison` share (see `open_runs`)."""
    # An arm has the same stages at every point of its grid, so titles can be listed before values are chosen.
    first = {name: comparison.candidates_of(name)[0] for name in comparison.config.arms}
    runs = (*comparison.tuning_runs, *comparison.reported_runs(first))
    titles = [*SHARED_NODES, *(stage_title(run.title, node) for run in runs for node in run.nodes)]
    workers = comparison.config.workers
    with open_runs(comparison.shared, titles, workspace, workers=workers, verify=verify, tag="comparison") as running:
        yield running


def run_arms(running: ManyRuns, comparison: Comparison, shared: Mapping[str, FinishedStage]) -> ReportedRuns:
    """Tune the arms that have a grid, then execute the reported runs with the chosen values."""
    tuning = tune(running, comparison, shared)
    chosen = {name: _chosen(comparison, name, tuning) for name in comparison.config.arms}
    runs = comparison.reported_runs({name: each for name, each in chosen.items() if each is not None})
    return ReportedRuns(run_all(running, runs, shared), tuning)


def tune(running: ManyRuns, comparison: Comparison, shared: Mapping[str, FinishedStage]) -> Tuning | None:
    """Run the points of every arm's grid with the seeds of `select`; None without `select`."""
    select, evaluation = comparison.config.select, running.session.run.experiment.config.evaluation
    if select is None:
        return None
    assert evaluation is not None
    outcomes = run_all(running, comparison.tuning_runs, shared)
    return tuned(comparison, outcomes, evaluation.confidence)


def tuned(comparison: Comparison, outcomes: Mapping[str, RunOutcome], confidence: float) -> Tuning:
    """What the tuning runs of a comparison that has `select` found; `outcomes` by `ArmRun.folder`."""
    select = comparison.config.select
    assert select is not None
    cell = (select.on, decoding_of(comparison.candidates[0].config, select))
    tries: dict[str, list[Try]] = {}
    for each in comparison.candidates:
        of_seeds = {seed: outcomes[folder_of(each.arm, seed, each.point)] for seed in select.seeds}
        tries.setdefault(each.arm, []).append(tried(each.point, *parted(of_seeds), cell, confidence))
    arms = tuple(ArmTuning(arm, tuple(found)) for arm, found in tries.items())
    return Tuning(*cell, select.seeds, select.random is not None, arms)


@task(name="comparison", task_run_name="comparison", retries=0, cache_policy=NO_CACHE, persist_result=False)
def conclude(
    running: ManyRuns, comparison: Comparison, reported: ReportedRuns, evaluated_base: FinishedStage
) -> Findings:
    """Write the page, the data and the artifacts; never cached, since it only reads finished results."""
    config = comparison.config
    findings = find(
        config.name,
        config.budget,
        config.reference,
        config.seeds,
        read_scores(evaluated_base.directory),
        [_arm(comparison, reported, name) for name in config.arms],
        reported.tuning,
    )
    write_atomic(running.folder / PAGE_FILE, html(comparison_page(findings)))
    write_atomic(running.folder / DATA_FILE, as_json(findings))
    artifacts = _artifacts(findings, running)
    offer_artifacts(findings.name, "comparison", artifacts, running.session.publisher)
    return findings


def _chosen(comparison: Comparison, name: str, tuning: Tuning | None) -> Candidate | None:
    """The arm's candidate for the reported seeds; None if no point finished with every seed."""
    candidates = comparison.candidates_of(name)
    if tuning is None:
        return candidates[0]
    best = tuning.chosen(name)
    return next((each for each in candidates if best is not None and each.point == best.point), None)


def _arm(comparison: Comparison, reported: ReportedRuns, name: str) -> Arm:
    recipe, unmade = comparison.config.arms[name], LuffyError(_UNTUNED)
    found = {seed: reported.outcomes.get(folder_of(name, seed), unmade) for seed in comparison.config.seeds}
    seeds, failures = parted(found)
    return Arm(name, recipe.chain, recipe.method, seeds, failures)


def _artifacts(findings: Findings, running: ManyRuns) -> dict[str, Artifact]:
    decoding = findings.decodings[0]
    found = {
        "accuracy": table_artifact(accuracy_table(findings, decoding), f"Accuracy in %, {decoding}, with its interval"),
        "costs": table_artifact(cost_table(findings), "Costs of a seed, mean over seeds"),
        "page": page_artifact(running.folder / PAGE_FILE, "Comparison"),
    }
    if (differences := difference_table(findings, decoding)) is not None:
        words = f"Percentage points minus {findings.reference}, {decoding}; p-values after Holm's correction"
        found["differences"] = table_artifact(differences, words)
    if findings.tuning is not None:
        found["tuning"] = table_artifact(tries_table(findings.tuning), "What was tried for each arm, accuracy in %")
    curves = {arm.name: [(point.steps, point.reward) for point in arm.curve] for arm in findings.arms if arm.curve}
    if curves:
        picture = picture_url([Chart("Reward", colored(curves), over="optimizer steps")])
        found["curves"] = Artifact("markdown", f"![reward]({picture})", "Reward over optimizer steps, mean over seeds")
    return found
