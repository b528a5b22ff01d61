"""Progress of a study: the finished runs in a workspace, and the values that tuning has chosen so far."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from luffy.config.many_runs.selection_split import decoding_of
from luffy.config.many_runs.study import CellRun, Chosen, Study, distinct
from luffy.evaluation.method_comparison.arms import FinishedSeed, read_seed
from luffy.evaluation.method_comparison.tuning import ArmTuning, tried
from luffy.pipeline.experiment import open_experiment
from luffy.pipeline.manifest import finished_manifest
from luffy.pipeline.workspace import Workspace


@dataclass(frozen=True)
class FinishedCellRun:
    """A run of a cell that is finished."""

    planned: CellRun
    stages: dict[str, Path]
    """Directories of its stages, by name."""

    def read(self) -> FinishedSeed:
        """Its results; raises LuffyError if a file is missing."""
        return read_seed(self.planned.run, self.stages)

    @property
    def evaluation(self) -> Path:
        """Directory of the evaluation of its last policy."""
        return self.stages[f"evaluate_{self.planned.run.last}"]

    @property
    def learning(self) -> list[Path]:
        """Directories of the stages that are not shared by all arms."""
        run = self.planned.run
        return [directory for name, directory in self.stages.items() if name not in run.start]


class StudyProgress:
    """The finished runs of a study in one workspace. Lookups are cached; `forget` drops those of unfinished runs."""

    def __init__(self, study: Study, workspace: Workspace, *, verify: bool = False) -> None:
        self.study = study
        self._workspace = workspace
        self._verify = verify
        self._finished: dict[str, dict[str, Path] | None] = {}

    def forget(self) -> None:
        """Drop the cached lookups of unfinished runs."""
        self._finished = {key: found for key, found in self._finished.items() if found is not None}

    def finished(self, run: CellRun) -> FinishedCellRun | None:
        """The run if all of its stages are finished, else None."""
        if run.made_as not in self._finished:
            self._finished[run.made_as] = self._look_up(run)
        stages = self._finished[run.made_as]
        return None if stages is None else FinishedCellRun(run, stages)

    def left(self, runs: Iterable[CellRun]) -> list[CellRun]:
        """The unfinished runs, without duplicates."""
        return [run for run in distinct(runs) if self.finished(run) is None]

    def chosen(self, cells: Iterable[str]) -> Chosen:
        """The chosen point of each arm whose tuning runs are all finished."""
        runs = self.study.tuning_runs(cells)
        found = {}
        for cell in dict.fromkeys(run.cell for run in runs):
            arms = {name: self._choose(cell, name, runs) for name in self.study.config.arms}
            found[cell] = {name: number for name, number in arms.items() if number is not None}
        return found

    def _choose(self, cell: str, arm: str, runs: Iterable[CellRun]) -> int | None:
        own = [run for run in runs if (run.cell, run.run.arm) == (cell, arm)]
        finished = [found for run in own if (found := self.finished(run)) is not None]
        if len(finished) < len(own):
            return None
        comparison, select = self.study.comparison(cell), self.study.config.select
        assert select is not None
        config = comparison.candidates_of(arm)[0].config
        assert config.evaluation is not None
        measured = (select.on, decoding_of(config, select))
        confidence = config.evaluation.confidence
        points = {run.planned.point.number: run.planned.point for run in finished}
        seeds = {number: [run.read() for run in finished if run.planned.point.number == number] for number in points}
        tries = [tried(points[number], seeds[number], {}, measured, confidence) for number in sorted(points)]
        best = ArmTuning(arm, tuple(tries)).chosen
        return None if best is None else best.point.number

    def _look_up(self, run: CellRun) -> dict[str, Path] | None:
        experiment = open_experiment(run.run.config, self._workspace, verify=self._verify)
        found = {}
        for node in experiment.nodes:
            if node.name in run.run.nodes:
                plan = experiment.plan_node(node.name)
                if plan.action != "reuse":
                    return None  # what comes after it cannot be finished either
                found[node.name] = plan.directory
        return found


def seconds_of(run: FinishedCellRun) -> float:
    """Seconds that the run's own stages took, from their manifests."""
    return sum(finished_manifest(directory).total_s for directory in run.learning)
