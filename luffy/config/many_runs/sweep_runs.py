"""The runs of a grid, a comparison of methods or a study, each as an experiment.

A study is one comparison in each of several cells: the centre, one other level of one axis, or a named interaction.
Runs that are equal in several cells are made once.

Checked to be equal for all arms, on the loaded experiments, so that the source of a difference (an arm, a preset, the
experiment's file) does not matter:

- data, base policy, evaluation and grading, so that these stages run once;
- the budget: optimizer steps after the base policy (those of SFT and of RL together), responses sampled from the
  policy in training, or tokens sampled and learned from;
- the size of an RL step: `rl.prompts_per_step`, `rl.prompts_per_update`, `rl.passes`, `rl.max_response_tokens`,
  `rl.stop`, `rl.temperature` and `objective.group.size`, rollouts and traces together.

Tokens, seconds and memory are reported as costs. The number of SFT steps between RL steps
(`objective.interleaved_sft`) is unknown in advance: they count as optimizer steps, and the page reports by how many an
arm missed the budget. With grids, every arm is tuned first, at equally many points, with seeds and on problems that are
not reported.

Not to be confused with the stage `sweep`, which evaluates the checkpoints of one RL run.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import NoReturn

from pydantic import JsonValue, ValidationError

from luffy.config.evaluation import VALIDATION, EvaluationConfig
from luffy.config.experiment import ExperimentConfig, StageVisit, visits_of
from luffy.config.load import FileKind, file_kind, load_experiment, parse_overrides, read_overridden, refuse_other_kind
from luffy.config.many_runs.arm_budget import (
    ArmPlan,
    check_equal,
    check_grid,
    check_shared_overrides,
    load_arm,
    points_of_arms,
)
from luffy.config.many_runs.sweep_design import CENTRE, GridPoint, SelectConfig, SweepDesign, grid_points
from luffy.config.settings import CONFIGURE
from luffy.config.shipped import experiment_file, named_file
from luffy.config.stage_kinds import STAGE_KINDS
from luffy.config.strict import FOR_IDENTITY, StrictModel
from luffy.config.validation_errors import explain
from luffy.config.yaml_source import KeyPath, Value
from luffy.errors import ConfigError

Chosen = Mapping[str, Mapping[str, int]]
"""Number of the chosen point by the tuned cell and by arm; arms for which nothing is chosen yet are missing."""
SHARED_NODES = ("prepare_data", "base", "evaluate_base")
"""The stages that all runs of a comparison have in common."""
_SEEDED = ("sample.seed", "sft.seed", "rl.seed")


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
    start: tuple[str, ...]
    """The stages before it learns, in order."""

    @property
    def title(self) -> str:
        tried = f" ({self.point.text})" if self.names_point and self.point.text else ""
        return f"{self.name} {self.seed}{tried}"

    @property
    def folder(self) -> str:
        """Its name among the runs of one command."""
        return f"{self.name}.{self.point.number}-{self.seed}" if self.names_point else f"{self.name}-{self.seed}"

    @property
    def nodes(self) -> tuple[str, ...]:
        """The stages that the run needs, in order: no report, and no evaluation of earlier policies."""
        return (*self.start, *(visit.name for visit in _learning(self.config)), f"evaluate_{self.last}")

    @property
    def last(self) -> str:
        """The stage whose policy is the arm's result."""
        return [visit.name for visit in visits_of(self.config) if "policy" in STAGE_KINDS[visit.stage].provides][-1]

    @property
    def made_as(self) -> str:
        """Digest of everything that the result depends on; equal for runs with the same result."""
        return hashlib.sha256(_made_as(self.config).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Candidate:
    """An arm with one point of its grid; its seeds are still those of the experiment."""

    arm: str
    point: GridPoint
    config: ExperimentConfig


@dataclass(frozen=True)
class Sweep:
    """A loaded design; each cell is loaded and checked at its first use."""

    design: SweepDesign
    path: Path
    origins: Mapping[KeyPath, str]
    _loaded: dict[str, tuple[Candidate, ...]] = field(default_factory=dict)

    @cached_property
    def cells(self) -> dict[str, dict[str, str]]:
        """The level of each axis, by cell."""
        return self.design.cells

    def selected(self, names: Iterable[str]) -> tuple[str, ...]:
        """The cells of these names in the design's order, all for none; ConfigError where there is no such cell."""
        wanted = set(names) or set(self.cells)
        if unknown := sorted(wanted - set(self.cells)):
            raise ConfigError(f"{self.path}: no cell is called {unknown[0]!r}; there are {', '.join(self.cells)}")
        return tuple(cell for cell in self.cells if cell in wanted)

    def common(self, cell: str = CENTRE) -> ExperimentConfig:
        """The experiment of the stages that all runs of a comparison share; of a grid, that of its first point.

        The runs are recorded under its name.
        """
        first, name = self.candidates(cell)[0].config, self.design.name
        if not self.design.arms:
            return first.model_copy(update={"name": name})
        stages = ("prepare_data", "base", "evaluate")
        shared = {"name": name, "chain": None, "method": None, "stages": stages}
        return first.model_copy(update={**shared, "evaluation": reported_evaluation(first, self.design.select)})

    def tuned_cell(self, cell: str) -> str | None:
        """The cell whose tuning holds in `cell`; None where nothing is tuned."""
        if self.design.select is None:
            return None
        return cell if self.design.tuned_at == "cell" else CENTRE

    def seeds(self, cell: str) -> tuple[int, ...]:
        """Reported seeds."""
        return self.design.seeds if cell == CENTRE else self.design.seeds_elsewhere

    def candidates(self, cell: str = CENTRE, points: Mapping[str, GridPoint] | None = None) -> tuple[Candidate, ...]:
        """Every arm of a cell at every point of its grid, or at the one of `points`, chosen in another cell.

        In the order of arms and grids; ConfigError, one line, for the first mistake.
        """
        key = cell + json.dumps({arm: point.number for arm, point in (points or {}).items()})
        if key in self._loaded:
            return self._loaded[key]
        if not self.design.arms:
            found = _points_of_grid(self.design, self.path, self.origins)
        elif not self.design.axes:
            found = _candidates(self.design, self.path, self.origins)
        else:
            try:
                found = _candidates(self.design.in_cell(cell, points), self.path, self._origins(cell))
            except ConfigError as error:
                raise ConfigError(f"cell {cell}: {str(error).splitlines()[0]}") from None
        self._loaded[key] = found
        return found

    def candidates_of(self, arm: str, cell: str = CENTRE) -> tuple[Candidate, ...]:
        """An arm at every point of its grid."""
        return tuple(each for each in self.candidates(cell) if each.arm == arm)

    def tuning_runs(self, cells: Iterable[str] = (CENTRE,)) -> list[SweepRun]:
        """Every point of every arm with every seed of `select`, evaluated on its data alone: all tries of `cells`."""
        select = self.design.select
        if select is None:
            return []
        tuned = dict.fromkeys(found for cell in cells if (found := self.tuned_cell(cell)) is not None)
        return [
            self._run(cell, each, seed, is_try=True)
            for cell in tuned
            for seed in select.seeds
            for each in self.candidates(cell)
        ]

    def reported_runs(self, cells: Iterable[str] = (CENTRE,), chosen: Chosen | None = None) -> list[SweepRun]:
        """Every arm with every reported seed, without those for which nothing is chosen yet; a grid's every point.

        Whole cells, seed by seed: an interrupted one has complete seeds. `chosen`: by default the first point of each
        arm, to count and check runs before anything is tuned.
        """
        found = list[SweepRun]()
        for cell in cells:
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

    def check(self, cells: Iterable[str]) -> None:
        """Raise ConfigError, one line, where a cell has a mistake."""
        if (primary := self.design.primary) is not None:
            centre = self.candidates()[0].config
            where = self.origins.get(("primary",), str(self.path))
            if primary.suite not in centre.data.suites:
                raise ConfigError(f"{where}: primary.suite: no suite is called {primary.suite!r}")
            if centre.evaluation is None or primary.decoding not in centre.evaluation.decodings:
                raise ConfigError(f"{where}: primary.decoding: no decoding is called {primary.decoding!r}")
        self.reported_runs(cells)

    def _run(self, cell: str, each: Candidate, seed: int, *, is_try: bool) -> SweepRun:
        kind, select = self.design.kind, self.design.select
        if is_try:
            assert select is not None
            config = _tried(each, select)
        else:
            config = each.config.model_copy(update={"evaluation": reported_evaluation(each.config, select)})
        names_point = is_try or kind == "grid"
        return SweepRun(
            cell=cell,
            arm=each.arm,
            point=each.point,
            seed=seed,
            config=_seeded(config, seed),
            is_try=is_try,
            name={"grid": self.design.name, "comparison": each.arm}.get(kind, f"{cell}.{each.arm}"),
            names_point=names_point,
            start=SHARED_NODES[:2] if names_point else SHARED_NODES,
        )

    def _origins(self, cell: str) -> dict[KeyPath, str]:
        """The place of each key of a cell's comparison in the design file; overrides are of the cell's own level."""
        origins = {key: where for key, where in self.origins.items() if key[0] != "overrides"}
        centre = self.cells[CENTRE]
        for axis, level in self.cells[cell].items():
            if level != centre[axis] or cell == CENTRE:
                place = origins.get(("axes", axis, "levels", level), str(self.path))
                origins[("overrides",)] = f"{place}: axes.{axis}.levels.{level}"
        return origins


def load_sweep(
    path: Path | str,
    overrides: Sequence[str] = (),
    over: Sequence[str] = (),
    seeds: Sequence[int] = (),
    *,
    wanted: FileKind | None = None,
) -> Sweep:
    """The grid, comparison or study in the file `path`, or the shipped one of that name; None: of any kind.

    `overrides` (`key.path=value`) are those of the file. `path` may also be an experiment: then `over`
    (`key.path=[value, value]`) is the grid around it, with these `seeds` (that of the experiment without any), and the
    overrides are the experiment's. Raises ConfigError with one line for each mistake of the design, or of the first run
    that has one; mistakes in the cells of a study are found by `Sweep.check`.
    """
    file = experiment_file(path)
    kind = kind_of_file(file)
    is_named = "experiment" in read_overridden(file)[0]  # by a grid that lacks other keys
    if kind == "experiment" and wanted in ("grid", None) and not is_named:
        values, origins, kind = _around(file, overrides, over, seeds), dict[KeyPath, str](), "grid"
    else:
        kind = wanted or ("grid" if kind == "experiment" else kind)
        values, origins = read_overridden(file, overrides)
        refuse_other_kind(values, path, kind)
        if over or seeds:
            option = "--over" if over else "--seed"
            raise ConfigError(f"{option} has no effect on {file}, which is a {kind}; override its grid= or seeds=[...]")
    try:
        design = SweepDesign.model_validate_json(json.dumps(values), context={"kind": kind})
    except ValidationError as error:
        raise ConfigError(explain(error, SweepDesign, origins, default_where=str(file), values=values)) from None
    sweep = Sweep(design, file, origins)
    if not design.axes:
        sweep.candidates()
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


def _evaluation_of(config: ExperimentConfig) -> EvaluationConfig:
    assert config.evaluation is not None  # every chain that trains is evaluated by a comparison
    return config.evaluation


def _candidates(design: SweepDesign, path: Path, origins: Mapping[KeyPath, str]) -> tuple[Candidate, ...]:
    """Every arm of one comparison with each of its points; what must be equal is so for all of them."""
    experiment = named_file(design.experiment, path, f"{_place(origins, ('experiment',), path)}: experiment")
    check_shared_overrides(design, _place(origins, ("overrides",), path))
    check_grid(design.grid, _place(origins, ("grid",), path))
    for name, arm in design.arms.items():
        check_grid(arm.grid, f"{_place(origins, ('arms', name, 'grid'), path)}: arms.{name}")
    plans = {name: ArmPlan(name, arm, _place(origins, ("arms", name), path)) for name, arm in design.arms.items()}
    points = points_of_arms(design, list(plans.values()))
    # First one of each arm, so that a mistake of an arm is found before another arm's grid is loaded.
    loaded = {name: [load_arm(plan, design, experiment, points[name][0])] for name, plan in plans.items()}
    check_equal({name: each[0] for name, each in loaded.items()}, plans)
    first = next(iter(plans))
    for name, plan in plans.items():
        for point in points[name][1:]:
            tried = load_arm(plan, design, experiment, point)
            check_equal({first: loaded[first][0], name: tried}, plans)
            same = _index_of_same(_learns_as(tried), map(_learns_as, loaded[name]))
            if same is not None:  # fewer tries than the others get
                plan.refuse(
                    f"grid: {point.text} and {points[name][same].text} are the same run: a key of them changes nothing "
                    "in this arm"
                )
            loaded[name].append(tried)
    if design.select is not None:
        _check_selection(loaded[first][0], design.select, origins, path)
    return tuple(
        Candidate(name, point, each) for name in plans for point, each in zip(points[name], loaded[name], strict=True)
    )


def _points_of_grid(design: SweepDesign, path: Path, origins: Mapping[KeyPath, str]) -> tuple[Candidate, ...]:
    """The experiment at every point of a grid, each of which is an arm."""
    experiment = named_file(design.experiment, path, f"{origins.get(('experiment',), str(path))}: experiment")
    where = origins.get(("grid",), "command line")
    for key in design.grid or ():
        if key in ("name", "stages"):
            raise ConfigError(f"{where}: grid: {key} cannot be tried; give chain or method, or another key")
        if key in _SEEDED:
            raise ConfigError(f"{where}: grid: {key} cannot be tried: every point runs with all of seeds")
    found = list[Candidate]()
    for point in grid_points(design.grid):
        named = f"name={design.name}.{point.number}"
        one = load_experiment(experiment, [*design.overrides, *point.overrides, named], given_at=f"{where}: grid")
        if "evaluate" not in one.stages:
            raise ConfigError(
                f"{where}: grid: {point.text}: its chain has no stage evaluate, so there is nothing to show"
            )
        if len(design.seeds) > 1 and not {"sft", "rl"} & {*one.stages}:
            raise ConfigError(f"{where}: seeds: have no effect without the stage sft or rl; give one")
        same = _index_of_same(_made_as(one), (_made_as(each.config) for each in found))
        if same is not None:
            other = found[same].point.text
            raise ConfigError(f"{where}: grid: {point.text} and {other} are the same run; a key changes nothing")
        is_known = point.text in {each.arm for each in found}  # it has six digits of a number
        found.append(Candidate(f"{point.text} (point {point.number})" if is_known else point.text, point, one))
    return tuple(found)


def _index_of_same(key: str, keys: Iterable[str]) -> int | None:
    return next((place for place, other in enumerate(keys) if other == key), None)


def _around(path: Path, overrides: Sequence[str], over: Sequence[str], seeds: Sequence[int]) -> dict[str, Value]:
    """The grid of a single experiment."""
    config = load_experiment(path, overrides)
    if not over:
        raise ConfigError(
            f"{path}: is an experiment; say what to try: --over 'sft.num_traces=[64, 128, 256]', "
            "or run it with: luffy run"
        )
    grid = dict[str, JsonValue]()
    for given in parse_overrides(over, "--over"):
        key = ".".join(given.path)
        if not isinstance(given.value, list):
            raise ConfigError(f"--over: {key} must be a list of the values to try: --over '{key}=[1, 2]'")
        if key in grid:
            raise ConfigError(f"--over: {key} is given twice; give all of its values in one list")
        grid[key] = given.value
    return {
        "name": f"{config.name}.grid",
        "experiment": str(path.resolve()),
        "overrides": list(overrides),
        "grid": grid,
        "seeds": list(seeds) or [config.seed],
    }


def _check_selection(
    config: ExperimentConfig, select: SelectConfig, origins: Mapping[KeyPath, str], path: Path
) -> None:
    """Raise ConfigError where values of `config` cannot be chosen on `select`, or are chosen on what is reported."""
    evaluation, suites, on = _evaluation_of(config), config.data.suites, select.on

    def refuse(key: str, text: str) -> NoReturn:
        raise ConfigError(f"{_place(origins, ('select', key), path)}: select.{key}: {text}")

    if on == VALIDATION and on in suites:
        refuse("on", "validation is also a suite of data.suites; give that another name")
    if on == VALIDATION and not config.data.validation_prompts:
        refuse("on", "the validation split has no prompts; set data.validation_prompts, or name a suite")
    if on not in (*suites, VALIDATION):
        refuse("on", f"no suite is called {on!r}; there are {', '.join(suites)}, or {VALIDATION}")
    if on in (evaluation.only or ()):
        refuse("on", f"{on} is also reported (evaluation.only); values are not chosen on what is")
    if set(suites) == {on}:
        refuse("on", f"{on} is the only suite, which leaves none to report; set one apart")
    if select.decoding not in (None, *evaluation.decodings):
        names = ", ".join(evaluation.decodings)
        refuse("decoding", f"no decoding is called {select.decoding!r}; there are {names}")


def _place(origins: Mapping[KeyPath, str], key: KeyPath, path: Path) -> str:
    return next((origins[key[:depth]] for depth in range(len(key), 0, -1) if key[:depth] in origins), str(path))


def _tried(candidate: Candidate, select: SelectConfig) -> ExperimentConfig:
    """Evaluated on what values are chosen on alone: one suite, with one decoding."""
    config = candidate.config
    evaluation, name = _evaluation_of(config), decoding_of(config, select)
    decoding, own = evaluation.decodings[name], evaluation.suites.get(select.on)
    if own is not None and decoding.is_greedy:
        own = own.model_copy(update={"num_samples": None})  # has no effect on it, which would be refused
    suites = {select.on: own} if own is not None else {}
    chosen_on = {"only": (select.on,), "decodings": {name: decoding}, "suites": suites}
    tried = {
        "name": f"{config.name}.try{candidate.point.number}",
        "evaluation": evaluation.model_copy(update=chosen_on),
    }
    return config.model_copy(update=tried)


def _seeded(config: ExperimentConfig, seed: int) -> ExperimentConfig:
    """The experiment in which everything after the base has that seed, named after it."""
    sections = {"sample": config.sample, "sft": config.sft, "rl": config.rl}
    own = {name: section.model_copy(update={"seed": seed}) for name, section in sections.items() if section is not None}
    return config.model_copy(update={"name": f"{config.name}.{seed}", **own})


def _learning(config: ExperimentConfig) -> list[StageVisit]:
    """The stages after the base that make a policy, or the prompts or traces for one."""
    made = {"policy", "prompts", "traces"}
    return [
        visit
        for visit in visits_of(config)
        if visit.stage not in SHARED_NODES and made.intersection(STAGE_KINDS[visit.stage].provides)
    ]


def _learns_as(config: ExperimentConfig) -> str:
    """A key that is equal for experiments that learn the same after the base."""
    return _settings(config, [visit.stage for visit in _learning(config)])


def _made_as(config: ExperimentConfig) -> str:
    """A key that is equal for experiments whose last policy, and its evaluation, are the same."""
    return _settings(config, ["prepare_data", "base", *(visit.stage for visit in _learning(config)), "evaluate"])


def _settings(config: ExperimentConfig, stages: Sequence[str]) -> str:
    settings: list[StrictModel] = [CONFIGURE[stage](config) for stage in stages]
    if "sample" in stages:
        settings.append(config.expert_iteration)  # the weights that each round starts from
    return "\n".join(each.model_dump_json(context=FOR_IDENTITY) for each in settings)
