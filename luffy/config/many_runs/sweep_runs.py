"""The runs of a grid, a comparison of methods or a study, each as an experiment.

A study is one comparison in each of several cells. Runs that are equal in several cells are made once. With grids,
every arm is tuned first, at equally many points, with seeds and on problems that are not reported.

Where `model.path` holds `{seed}`, each seed of a study has a base policy of its own: then seeds stand for bases, and
intervals are also about other bases.

All arms have equal data, base policy, evaluation, grading and size of an RL step, and one budget: optimizer steps after
the base policy, of SFT and RL together. The SFT steps between RL steps (`objective.interleaved_sft`) are unknown in
advance: they count as optimizer steps, and the page reports by how many an arm missed the budget. Tokens, seconds and
memory are reported as costs.

Not to be confused with the stage `sweep`, which evaluates the checkpoints of one RL run.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from pydantic import JsonValue, ValidationError

from luffy.config.chain import StageEntry, instances_of, plain_stages
from luffy.config.evaluation import VALIDATION, EvaluationConfig
from luffy.config.experiment import ExperimentConfig
from luffy.config.fields import explain
from luffy.config.load import FileKind, file_kind, load_experiment, parse_overrides, read_overridden
from luffy.config.many_runs.arms import (
    SEEDED,
    SHARED_NODES,
    Candidate,
    candidates_of_arms,
    learning,
    made_as,
    of_stages,
)
from luffy.config.many_runs.sweep_design import ONLY_CELL, GridPoint, SelectConfig, SweepDesign, grid_points
from luffy.config.shipped import experiment_file, named_file
from luffy.config.strict import StrictModel
from luffy.config.yaml_source import KeyPath, Value, not_among, place_of
from luffy.errors import ConfigError

OF_SEED = "{seed}"
"""In `model.path` of a study: the base policy that this seed starts from."""
Chosen = Mapping[str, Mapping[str, int]]
"""Number of the chosen point by the tuned cell and by arm; arms for which nothing is chosen yet are missing."""


@dataclass(frozen=True, slots=True)
class SweepRun:
    """One arm at one point with one seed."""

    cell: str
    arm: str
    """A grid's arms are its points, by their text."""
    point: GridPoint
    """What is tried, or what was chosen; without values where there is no grid."""
    seed: int
    config: ExperimentConfig
    is_try: bool
    """Whether it only serves to choose values."""
    name: str
    """Its arm, by a name that no other cell has."""
    names_point: bool
    """Whether there may be runs of that name at several points."""

    @property
    def title(self) -> str:
        tried = f" ({self.point.text})" if self.names_point and self.point.text else ""
        return f"{self.name} {self.seed}{tried}"

    @property
    def folder(self) -> str:
        """Its name among the runs of one command."""
        return f"{self.name}.{self.point.number}-{self.seed}" if self.names_point else f"{self.name}-{self.seed}"

    @property
    def start(self) -> tuple[str, ...]:
        """The stages before it learns, in order."""
        return SHARED_NODES[:2] if self.names_point else SHARED_NODES

    @property
    def nodes(self) -> tuple[str, ...]:
        """The stages that the run needs, in order: no report, and no evaluation of earlier policies."""
        return (*self.start, *(visit.name for visit in learning(self.config)), f"evaluate_{self.last}")

    @property
    def last(self) -> str:
        return [each.name for each in instances_of(self.config) if "policy" in each.provides][-1]

    @property
    def made_as(self) -> str:
        """Digest of everything that the result depends on; equal for runs with the same result."""
        return hashlib.sha256(made_as(self.config).encode()).hexdigest()


@dataclass(frozen=True)
class Sweep:
    """A loaded design; each cell is loaded and checked at its first use."""

    design: SweepDesign
    path: Path
    origins: Mapping[KeyPath, str]
    _loaded: dict[str, tuple[Candidate, ...]] = field(default_factory=dict)

    @property
    def cells(self) -> tuple[str, ...]:
        return tuple(self.design.cells) or (ONLY_CELL,)

    def selected(self, names: Iterable[str]) -> tuple[str, ...]:
        """The cells of these names in the design's order, all for none; ConfigError where there is no such cell."""
        wanted = set(names) or set(self.cells)
        if unknown := sorted(wanted - set(self.cells)):
            raise ConfigError(f"{self.path}: no cell is called {not_among(unknown[0], self.cells)}")
        return tuple(cell for cell in self.cells if cell in wanted)

    def common(self) -> ExperimentConfig:
        """The stages that all runs of the first cell share (a grid: its first point), under the design's name."""
        first, name = self.candidates()[0].config, self.design.name
        if not self.design.arms:
            return first.model_copy(update={"name": name})
        stages = plain_stages(("prepare_data", "base", "evaluate"))
        shared = {"name": name, "chain": None, "method": None, "stages": stages}
        evaluation = reported_evaluation(first, self.design.select)
        every = first.model_copy(update={**shared, "evaluation": evaluation})
        return _from_base_of(every, self.seeds(self.cells[0])[0])

    @property
    def repeated_over(self) -> str:
        """What differs between the reported runs of an arm: their seeds, or their base policies."""
        return "bases" if self._has_bases(self.cells[0]) else "seeds"

    def tuned_cell(self, cell: str) -> str | None:
        """The cell whose tuning holds in `cell`; None where nothing is tuned."""
        if self.design.select is None:
            return None
        return self.design.tuned_at or cell

    def seeds(self, cell: str) -> tuple[int, ...]:
        """The reported ones."""
        return self.design.in_cell(cell).seeds if self.design.cells else self.design.seeds

    def candidates(self, cell: str = "", points: Mapping[str, GridPoint] | None = None) -> tuple[Candidate, ...]:
        """Every arm of a cell, by default the first, at every point of its grid, or that of `points`; ConfigError, one
        line, for a mistake."""
        cell = cell or self.cells[0]
        key = cell + json.dumps({arm: point.number for arm, point in (points or {}).items()})
        if key in self._loaded:
            return self._loaded[key]
        if not self.design.arms:
            found = _points_of_grid(self.design, self.path, self.origins)
        elif not self.design.cells:
            found = candidates_of_arms(self.design, self.path, self.origins)
        else:
            try:
                origins = dict(self.origins)
                if self.design.cells[cell].overrides:
                    origins[("overrides",)] = self._place_of(cell)
                found = candidates_of_arms(self.design.in_cell(cell, points), self.path, origins)
            except ConfigError as error:
                raise ConfigError(f"cell {cell}: {str(error).splitlines()[0]}") from None
        self._loaded[key] = found
        return found

    def candidates_of(self, arm: str) -> tuple[Candidate, ...]:
        return tuple(each for each in self.candidates() if each.arm == arm)

    def tuning_runs(self, cells: Sequence[str] = ()) -> list[SweepRun]:
        """Every point of every arm with every seed of `select`, evaluated on its data alone: all tries of `cells`, by
        default of all."""
        select = self.design.select
        if select is None:
            return []
        tuned = dict.fromkeys(found for cell in cells or self.cells if (found := self.tuned_cell(cell)) is not None)
        tries = ((cell, each, seed) for cell in tuned for seed in select.seeds for each in self.candidates(cell))
        return [self._run(*each, is_try=True) for each in tries]

    def reported_runs(self, cells: Sequence[str] = (), chosen: Chosen | None = None) -> list[SweepRun]:
        """Every arm with every reported seed, without those for which nothing is chosen yet; a grid's every point.
        Whole cells, by default all, seed by seed: an interrupted one has complete seeds. `chosen`: by default the first
        point of each arm, to count and check runs before anything is tuned."""
        found = list[SweepRun]()
        for cell in cells or self.cells:
            tuned = self.tuned_cell(cell)
            if tuned is None:
                picked = self.candidates(cell)
            else:
                tried = self.candidates(tuned)
                firsts = {each.arm: each.point.number for each in reversed(tried)}
                numbers = firsts if chosen is None else chosen.get(tuned, {})
                best = {each.arm: each for each in tried if numbers.get(each.arm) == each.point.number}
                points = {name: each.point for name, each in best.items()}
                there = best.values() if tuned == cell else self.candidates(cell, points)
                picked = tuple(replace(each, point=points[each.arm]) for each in there if each.arm in points)
            found += [self._run(cell, each, seed, is_try=False) for seed in self.seeds(cell) for each in picked]
        return found

    def started_with(self, cells: Sequence[str]) -> list[ExperimentConfig]:
        """What has to be there before any run starts: every arm at every point in the first of `cells`, and a run from
        each further base policy."""
        arms = [_from_base_of(each.config, self.seeds(cells[0])[0]) for each in self.candidates(cells[0])]
        runs = [run.config for run in (*self.tuning_runs(cells), *self.reported_runs(cells))]
        return arms + list({run.model.path: run for run in runs if run.model != arms[0].model}.values())

    def check(self, cells: Sequence[str]) -> None:
        """Raise ConfigError, one line, where a cell has a mistake."""
        if (primary := self.design.primary) is not None:
            first = self.candidates()[0].config
            suites, decodings = [*first.data.suites], [*_evaluation_of(first).decodings]
            for key, name, known in (("suite", primary.suite, suites), ("decoding", primary.decoding, decodings)):
                if name not in known:
                    where = place_of(("primary", key), self.origins, str(self.path))
                    raise ConfigError(f"{where}: primary.{key}: no {key} is called {not_among(name, known)}")
        for cell in cells:
            if self._has_bases(cell) != self._has_bases(self.cells[0]):
                raise ConfigError(
                    f"cell {cell}: {self._place_of(cell)}: model.path has {OF_SEED} here or in {self.cells[0]}, "
                    "and not in both; give each seed a base of its own in every cell, or in none"
                )
        self.reported_runs(cells)

    def _has_bases(self, cell: str) -> bool:
        """Whether each seed starts from a base of its own."""
        path = self.candidates(cell)[0].config.model.path
        return path is not None and OF_SEED in path

    def _place_of(self, cell: str) -> str:
        return f"{place_of(('cells', cell), self.origins, str(self.path))}: cells.{cell}"

    def _run(self, cell: str, each: Candidate, seed: int, *, is_try: bool) -> SweepRun:
        """Everything after the base has that seed; a try is evaluated on what values are chosen on alone."""
        kind, select, config = self.design.kind, self.design.select, each.config
        evaluation, name = reported_evaluation(config, select), f"{config.name}.{seed}"
        if is_try:
            assert select is not None
            evaluation, name = _evaluation_of_try(config, select), f"{config.name}.try{each.point.number}.{seed}"
        own = {stage: _seeded(entry, seed) for stage, entry in config.stages.items()}
        stages = {stage: entry.model_copy(update=own[stage]) for stage, entry in config.stages.items()}
        seeded = {**_seeded(config, seed), "stages": stages}
        return SweepRun(
            cell=cell,
            arm=each.arm,
            point=each.point,
            seed=seed,
            config=_from_base_of(config.model_copy(update={"name": name, "evaluation": evaluation, **seeded}), seed),
            is_try=is_try,
            name={"grid": self.design.name, "comparison": each.arm}.get(kind, f"{cell}.{each.arm}"),
            names_point=is_try or kind == "grid",
        )


def load_sweep(
    path: Path | str, overrides: Sequence[str] = (), over: Sequence[str] = (), seeds: Sequence[int] = ()
) -> Sweep:
    """The grid, comparison or study in the file `path`, or the shipped one of that name. `overrides` (`key.path=value`)
    are those of the file. `path` may also be an experiment: then `over` (`key.path=[value, value]`) is the grid around
    it, with these `seeds` (its own without any), and the overrides are the experiment's. Raises ConfigError, one line
    for each mistake of the design, or of the first run that has one; those in cells: `Sweep.check`."""
    file = experiment_file(path)
    kind = kind_of_file(file)
    is_named = "experiment" in read_overridden(file)[0]  # by a grid that lacks other keys
    if kind == "experiment" and not is_named:
        values, origins, kind = _around(file, overrides, over, seeds), dict[KeyPath, str](), "grid"
    else:
        kind = "grid" if kind == "experiment" else kind
        values, origins = read_overridden(file, overrides)
        if over or seeds:
            option = "--over" if over else "--seed"
            raise ConfigError(f"{option} has no effect on {file}, which is a {kind}; override its grid= or seeds=[...]")
    try:
        design = SweepDesign.model_validate_json(json.dumps(values), context={"kind": kind})
    except ValidationError as error:
        raise ConfigError(explain(error, SweepDesign, origins, otherwise=str(file), values=values)) from None
    sweep = Sweep(design, file, origins)
    if not design.cells:
        sweep.candidates()
        if sweep.repeated_over == "bases":
            raise ConfigError(
                f"{file}: model.path: {OF_SEED} stands for the base of each seed in a study alone (a file with cells); "
                f"a {design.kind} starts all runs from one base"
            )
    return sweep


def kind_of_file(path: Path | str) -> FileKind:
    """What the file `path`, or the shipped one of that name, describes."""
    return file_kind(read_overridden(experiment_file(path))[0])


def distinct(runs: Iterable[SweepRun]) -> list[SweepRun]:
    """`runs` without duplicates (equal `made_as`), in order."""
    return list({each.made_as: each for each in reversed(list(runs))}.values())[::-1]


def decoding_of(config: ExperimentConfig, select: SelectConfig) -> str:
    """Name of the decoding that decides."""
    return select.decoding or next(iter(_evaluation_of(config).decodings))


def reported_evaluation(config: ExperimentConfig, select: SelectConfig | None) -> EvaluationConfig:
    """The experiment's evaluation, without the suite that values are chosen on."""
    evaluation = _evaluation_of(config)
    if select is None or select.on == VALIDATION or evaluation.only is not None:
        return evaluation
    return evaluation.model_copy(update={"only": tuple(name for name in config.data.suites if name != select.on)})


def _from_base_of(config: ExperimentConfig, seed: int) -> ExperimentConfig:
    if (path := config.model.path) is None or OF_SEED not in path:
        return config
    own = path.replace(OF_SEED, str(seed))
    return config.model_copy(update={"model": config.model.model_copy(update={"path": own})})


def _seeded(sections: ExperimentConfig | StageEntry, seed: int) -> dict[str, StrictModel]:
    """The sections of stages after the base, with the seed. Teachers, who may be paid, are asked once for all seeds."""
    sample = sections.sample
    found = {"sample": None if sample is None or sample.teachers else sample, "sft": sections.sft, "rl": sections.rl}
    return {key: part.model_copy(update={"seed": seed}) for key, part in found.items() if part is not None}


def _evaluation_of(config: ExperimentConfig) -> EvaluationConfig:
    assert config.evaluation is not None  # every chain that trains is evaluated by a comparison
    return config.evaluation


def _points_of_grid(design: SweepDesign, path: Path, origins: Mapping[KeyPath, str]) -> tuple[Candidate, ...]:
    experiment = named_file(design.experiment, path, f"{origins.get(('experiment',), str(path))}: experiment")
    where = origins.get(("grid",), "command line")
    for key in design.grid or ():
        if key in ("name", "stages"):
            raise ConfigError(f"{where}: grid: {key} cannot be tried; give chain or method, or another key")
        if of_stages(key) in SEEDED or (key != "seed" and of_stages(key) == "seed"):
            raise ConfigError(f"{where}: grid: {key} cannot be tried: every point runs with all of seeds")
    found = dict[str, Candidate]()
    for point in grid_points(design.grid):
        named = f"name={design.name}.{point.number}"
        one = load_experiment(experiment, [*design.overrides, *point.overrides, named], given_at=f"{where}: grid")
        if "evaluate" not in one.kinds:
            raise ConfigError(f"{where}: grid: {point.text}: its chain has no stage evaluate: nothing to show")
        if len(design.seeds) > 1 and not {"sft", "rl"} & {*one.kinds}:
            raise ConfigError(f"{where}: seeds: have no effect without the stage sft or rl; give one")
        if same := found.get(made_as(one)):
            raise ConfigError(f"{where}: grid: {point.text} and {same.point.text} are the same run; change a key")
        is_known = point.text in {each.arm for each in found.values()}  # it has six digits of a number
        arm = f"{point.text} (point {point.number})" if is_known else point.text
        found[made_as(one)] = Candidate(arm, point, one)
    return tuple(found.values())


def _around(path: Path, overrides: Sequence[str], over: Sequence[str], seeds: Sequence[int]) -> dict[str, Value]:
    """The grid of a single experiment."""
    config = load_experiment(path, overrides)
    if not over:
        raise ConfigError(f"{path}: is an experiment: say what to try (--over 'seed=[1, 2]'), or use luffy run")
    grid = dict[str, JsonValue]()
    for path_of_key, values in parse_overrides(over, "--over"):
        key = ".".join(path_of_key)
        if not isinstance(values, list):
            raise ConfigError(f"--over: {key} must be a list of the values to try: --over '{key}=[1, 2]'")
        if key in grid:
            raise ConfigError(f"--over: {key} is given twice; give all of its values in one list")
        grid[key] = values
    return {
        "name": f"{config.name}.grid",
        "experiment": str(path.resolve()),
        "overrides": list(overrides),
        "grid": grid,
        "seeds": list(seeds) or [config.seed],
    }


def _evaluation_of_try(config: ExperimentConfig, select: SelectConfig) -> EvaluationConfig:
    evaluation, name = _evaluation_of(config), decoding_of(config, select)
    decoding, own = evaluation.decodings[name], evaluation.suites.get(select.on)
    if own is not None and decoding.is_greedy:
        own = own.model_copy(update={"num_samples": None})  # has no effect on it, which would be refused
    suites = {select.on: own} if own is not None else {}
    return evaluation.model_copy(update={"only": (select.on,), "decodings": {name: decoding}, "suites": suites})
