"""The finished runs of a study in a workspace, the values that tuning has chosen so far, and the rows of both."""

from collections.abc import Iterable
from pathlib import Path

from luffy.config.many_runs.sweep_runs import Chosen, Sweep, SweepRun, distinct
from luffy.errors import LuffyError
from luffy.evaluation.across_runs.run_results import RunOutcome, read_run
from luffy.evaluation.across_runs.sweep_findings import choose, tuning_of
from luffy.evaluation.across_runs.sweep_results import REPORTED, TRIED, SweepResults, base_rows, run_rows, together
from luffy.evaluation.results import read_scores
from luffy.pipeline.experiment import open_experiment
from luffy.pipeline.manifest import finished_manifest
from luffy.pipeline.workspace import Workspace


class SweepProgress:
    """The finished runs of a study in one workspace. Lookups are cached; `forget` drops those of unfinished runs."""

    def __init__(self, sweep: Sweep, workspace: Workspace, *, verify: bool = False) -> None:
        self.sweep = sweep
        self._workspace = workspace
        self._verify = verify
        self._finished: dict[str, dict[str, Path] | None] = {}

    def forget(self) -> None:
        """Drop the cached lookups of unfinished runs."""
        self._finished = {key: found for key, found in self._finished.items() if found is not None}

    def finished(self, run: SweepRun) -> dict[str, Path] | None:
        """Directories of the run's stages by name if all of them are finished, else None."""
        if run.made_as not in self._finished:
            self._finished[run.made_as] = self._look_up(run)
        return self._finished[run.made_as]

    def seconds(self, run: SweepRun) -> float:
        """Seconds that the own stages of a finished run took, from their manifests."""
        stages = self.finished(run) or {}
        return sum(finished_manifest(stages[name]).total_s for name in stages if name not in run.start)

    def left(self, runs: Iterable[SweepRun]) -> list[SweepRun]:
        """The unfinished runs, without duplicates."""
        return [run for run in distinct(runs) if self.finished(run) is None]

    def chosen(self, cells: Iterable[str]) -> Chosen:
        """The chosen point of each arm whose tuning runs are all finished."""
        runs = self.sweep.tuning_runs(cells)
        outcomes: dict[str, RunOutcome] = {
            run.folder: LuffyError("not finished") if (stages := self.finished(run)) is None else read_run(run, stages)
            for run in runs
        }
        tuned = dict.fromkeys(run.cell for run in runs)
        return {cell: choose(tuning_of(self.sweep, cell, outcomes), strict=True) for cell in tuned}

    def collect(self, runs: Iterable[SweepRun]) -> SweepResults:
        """The rows of those of `runs` that are finished, and of the base of their cells."""
        parts, bases = list[SweepResults](), set[str]()
        for run in runs:
            if (stages := self.finished(run)) is None:
                continue
            role = TRIED if run.is_try else REPORTED
            parts.append(run_rows(run.cell, role, run.arm, run.point, read_run(run, stages)))
            if not run.is_try and run.cell not in bases:
                bases.add(run.cell)
                parts.append(base_rows(run.cell, read_scores(stages["evaluate_base"])))
        found = together(parts)
        return SweepResults(tuple(sorted(found.measures)), tuple(sorted(found.outcomes)))

    def _look_up(self, run: SweepRun) -> dict[str, Path] | None:
        experiment = open_experiment(run.config, self._workspace, verify=self._verify)
        found = {}
        for node in experiment.nodes:
            if node.name in run.nodes:
                plan = experiment.plan_node(node.name)
                if plan.action != "reuse":
                    return None  # what comes after it cannot be finished either
                found[node.name] = plan.directory
        return found
