"""Results of runs: what their stages have left, means over seeds, and the two tables of a study.

A study keeps the tables as small parquet files beside its design. `NAME.results.parquet` has a row for each run, suite
and measure (what a run has spent has no suite); `NAME.outcomes.parquet` a row for each run, suite and decoding, with
the number of correct responses to every problem. Its page and figures are made from these files and the design alone.
"""

import hashlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, field, fields, replace
from itertools import accumulate
from pathlib import Path
from statistics import fmean

from luffy.config.many_runs.sweep_design import GridPoint
from luffy.config.many_runs.sweep_runs import Sweep, SweepRun
from luffy.data.answer_cards import CARD_FILE, SampleCard, read_card
from luffy.errors import DataError, LuffyError, first_line
from luffy.evaluation.results import CheckpointScores, read_scores
from luffy.files import replacing
from luffy.pipeline.graph import kind_of
from luffy.pipeline.manifest import finished_manifest
from luffy.statistics.over_seeds import seed_interval
from luffy.tracking.metrics import (
    GPU_HOURS,
    METRICS_FILE,
    HeldOutPoint,
    MetricRow,
    held_out_curves,
    read_metrics,
    training_rows,
)

_REWARD = "reward/mean"
_OPTIMIZER_STEPS = "batch/optimizer_steps"
_ROWS = "batch/num_rows"
_SECONDS = "perf/step_s"
_PEAK_MEMORY = "perf/peak_memory_gib"
_COSTLY = ("sample", "sft", "rl")
"""Kinds of stages that make a run's costs."""
_LEVELS = tuple(level / 10 for level in range(1, 10))


@dataclass(frozen=True, slots=True)
class Costs:
    """Costs of one run after the base policy, a cold start by SFT included; None where metrics are missing."""

    optimizer_steps: float | None
    """Interleaved SFT steps included."""
    rollouts: float | None
    """Sampled responses, those of the stage `sample` included."""
    generated_tokens: float | None
    """Tokens in the sampled responses."""
    trained_tokens: float | None
    """Response tokens in the batches of updates, traces included."""
    seconds: float | None
    """Time in training steps, rollouts included; without evaluation and the start of programs. For the stage `sample`,
    the whole of its last attempt."""
    peak_memory_gib: float | None
    """Peak of the training process; unknown with `cluster: ray`."""
    gpu_hours: float | None = None
    """Unknown without GPUs, and with the stage `sample`."""


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """The reward at one RL step, and what had been spent by then, a cold start included."""

    reward: float
    steps: float
    """Optimizer steps."""
    samples: float
    """Rows that were learned from: rollouts and traces."""
    seconds: float


@dataclass(frozen=True, slots=True)
class RunResult:
    """One arm with one seed."""

    seed: int
    evaluation: CheckpointScores
    costs: Costs
    curve: tuple[CurvePoint, ...] = ()
    """Empty without RL."""
    held_out: Mapping[str, tuple[HeldOutPoint, ...]] = field(default_factory=dict)
    """Held-out accuracy while it trained, by suite; empty without validation."""
    trained: Mapping[str, Path] = field(default_factory=dict)
    """Directories of the stages that sampled traces or learned, by name, in order; other runs may share them."""


RunOutcome = RunResult | LuffyError


@dataclass(frozen=True, slots=True)
class ArmResults:
    """One arm, at one point of its grid, with the seeds that it finished and those that it failed."""

    name: str
    point: GridPoint
    seeds: tuple[RunResult, ...]
    failures: Mapping[int, str]
    """Seed to one line."""

    @property
    def costs(self) -> Costs | None:
        """Means over its seeds; None where none is finished."""
        return _combined([seed.costs for seed in self.seeds], fmean) if self.seeds else None

    @property
    def curve(self) -> tuple[CurvePoint, ...]:
        """Means over its seeds, step by step."""
        points = zip(*(seed.curve for seed in self.seeds), strict=False)
        return tuple(CurvePoint(*map(fmean, zip(*map(astuple, at_step), strict=True))) for at_step in points)

    @property
    def held_out(self) -> dict[str, tuple[tuple[HeldOutPoint, ...], ...]]:
        """Held-out accuracy of each seed, by suite."""
        suites = dict.fromkeys(suite for seed in self.seeds for suite in seed.held_out)
        return {suite: tuple(seed.held_out.get(suite, ()) for seed in self.seeds) for suite in suites}

    def held_out_mean(self, suite: str, confidence: float) -> tuple[HeldOutPoint, ...]:
        """Mean held-out accuracy over seeds, measurement by measurement, up to the end of the shortest.

        The bounds are Student's t over seeds; with one seed they stay those over its problems.
        """
        measured = [curve for curve in self.held_out.get(suite, ()) if curve]
        found = []
        for points in zip(*measured, strict=False):
            mean = HeldOutPoint(*map(fmean, zip(*map(astuple, points), strict=True)))
            if len(points) > 1:
                low, high = seed_interval([point.accuracy for point in points], confidence)
                mean = replace(mean, low=low, high=high)
            found.append(mean)
        return tuple(found)


def arm_results(name: str, point: GridPoint, outcomes: Mapping[int, RunOutcome]) -> ArmResults:
    """The arm whose runs had these `outcomes`, by seed."""
    finished = tuple(outcome for outcome in outcomes.values() if isinstance(outcome, RunResult))
    failed = {seed: first_line(outcome) for seed, outcome in outcomes.items() if isinstance(outcome, LuffyError)}
    return ArmResults(name, point, finished, failed)


def levels(curves: Sequence[Sequence[HeldOutPoint]]) -> tuple[float, ...]:
    """The tenths of accuracy that some seed reached, and that not all had at their first measurement."""
    measured = [curve for curve in curves if curve]
    if not measured:
        return ()
    start = min(curve[0].accuracy for curve in measured)
    most = max(point.accuracy for curve in measured for point in curve)
    return tuple(level for level in _LEVELS if start < level <= most)


def reached(curves: Sequence[Sequence[HeldOutPoint]], level: float) -> tuple[int, float | None]:
    """How many seeds of an arm ever measured `level` or more, and the mean optimizer steps until they first did.

    None where a seed did not get there, since the mean of the others would be too good.
    """
    firsts = [next((point.steps for point in curve if point.accuracy >= level), None) for curve in curves]
    known = [steps for steps in firsts if steps is not None]
    return len(known), fmean(known) if known and len(known) == len(firsts) else None


def read_run(run: SweepRun, stages: Mapping[str, Path]) -> RunResult:
    """A finished run, whose stages lie in the directories `stages`; raises LuffyError where a file is missing."""
    # The policy samples in numbered rounds; what teachers write is no cost of the run's.
    trained = {name: path for name, path in stages.items() if _kind(name) in _COSTLY and name != "sample"}
    spent = [_costs(_kind(name), directory) for name, directory in trained.items()]
    logged = {
        name: read_metrics(directory / METRICS_FILE) for name, directory in trained.items() if _kind(name) != "sample"
    }
    before = [row for name, rows in logged.items() if _kind(name) == "sft" for row in training_rows(rows)]
    rl = training_rows(next((rows for name, rows in logged.items() if _kind(name) == "rl"), []))
    # The rewards of RL begin after the steps, rows and seconds of the stages before it.
    rows_before, seconds_before = sum(row.get(_ROWS, 0.0) for row in before), total_costs(spent[:-1]).seconds or 0.0
    sums = [list(accumulate(row.get(name, 0.0) for row in rl)) for name in (_OPTIMIZER_STEPS, _ROWS, _SECONDS)]
    curve = tuple(
        CurvePoint(row[_REWARD], len(before) + steps, rows_before + rows, seconds_before + seconds)
        for row, steps, rows, seconds in zip(rl, *sums, strict=True)
        if _REWARD in row
    )
    evaluation = read_scores(stages[f"evaluate_{run.last}"])
    return RunResult(run.seed, evaluation, total_costs(spent), curve, held_out_curves(list(logged.values())), trained)


def costs_together(runs: Collection[RunResult]) -> Costs:
    """What several runs have spent together; a stage that they share is counted once."""
    stages = {directory: name for run in runs for name, directory in run.trained.items()}
    return total_costs([_costs(_kind(name), directory) for directory, name in stages.items()])


def total_costs(spent: Collection[Costs]) -> Costs:
    """Sums of all costs, None where a summand is unknown; for memory the highest known peak."""
    peaks = [costs.peak_memory_gib for costs in spent if costs.peak_memory_gib is not None]
    return replace(_combined(spent, sum), peak_memory_gib=max(peaks, default=None))


def _combined(spent: Collection[Costs], combine: Callable[[list[float]], float]) -> Costs:
    """Each cost of all, None where one is unknown."""
    known = {each.name: [getattr(costs, each.name) for costs in spent] for each in fields(Costs)}
    return Costs(**{name: None if None in values else combine(values) for name, values in known.items()})


def _kind(name: str) -> str:
    """Kind of the stage called `name` in its chain, e.g. `sft` for `sft_2`."""
    kind = kind_of(name)
    return "" if kind is None else kind.name


def _costs(kind: str, directory: Path) -> Costs:
    """What one finished stage of a kind in `_COSTLY` has spent."""
    if kind == "sample":
        rates, manifest = read_card(directory / CARD_FILE, SampleCard).rates, finished_manifest(directory)
        responses = float(rates.prompts * rates.num_samples)
        return Costs(0.0, responses, round(responses * rates.mean_tokens), 0.0, manifest.total_s, None)
    rows = training_rows(read_metrics(directory / METRICS_FILE))
    sampling = rows if kind == "rl" else ()
    return Costs(
        optimizer_steps=_sum(rows, _OPTIMIZER_STEPS) if kind == "rl" else len(rows),
        rollouts=_sum(sampling, "rollout/num_drawn"),
        generated_tokens=_sum(sampling, "rollout/tokens_drawn"),
        trained_tokens=_sum(rows, "batch/response_tokens"),
        seconds=_sum(rows, _SECONDS),
        peak_memory_gib=max((row[_PEAK_MEMORY] for row in rows if _PEAK_MEMORY in row), default=None),
        gpu_hours=max((row[GPU_HOURS] for row in rows if GPU_HOURS in row), default=None),
    )


def _sum(rows: Sequence[MetricRow], name: str) -> float | None:
    """Sum of the metric `name`; None where a row lacks it, since a partial sum would be wrong."""
    return sum(row[name] for row in rows) if all(name in row for row in rows) else None


REPORTED, TRIED, BASE = "reported", "tried", "base"
_TIMED = ("seconds", "peak_memory_gib", "gpu_hours")
"""Measures that differ from machine to machine."""


@dataclass(frozen=True, slots=True, order=True)
class MeasureRow:
    """One measure of one run."""

    cell: str
    role: str
    """`reported`; `tried`: a run of tuning; `base`: the policy that all arms of the cell start from."""
    arm: str
    """Empty for the base."""
    point: int
    """Number of the point in the arm's grid."""
    values: str
    """The settings of the point; empty where nothing is tuned."""
    seed: int
    """0 for the base."""
    suite: str
    """Empty for costs of the run."""
    decoding: str
    measure: str
    value: float

    @property
    def place(self) -> tuple[str, ...]:
        """Everything except the value."""
        return tuple(str(getattr(self, each.name)) for each in fields(self) if each.name != "value")


@dataclass(frozen=True, slots=True, order=True)
class OutcomeRow:
    """One run on one suite under one decoding."""

    cell: str
    role: str
    arm: str
    point: int
    seed: int
    suite: str
    decoding: str
    problems: str
    """Digest of the problems' uids; rows of equal digests list the same problems in the same order."""
    num_samples: int
    """Responses to each problem."""
    correct: tuple[int, ...]
    """Correct responses to each problem, in the order of the uids."""

    @property
    def place(self) -> tuple[str, ...]:
        return tuple(str(getattr(self, each.name)) for each in fields(self)[:7])


@dataclass(frozen=True, slots=True)
class SweepResults:
    """The content of both files, where they are sorted."""

    measures: tuple[MeasureRow, ...]
    outcomes: tuple[OutcomeRow, ...]

    def where(self, keeps: Callable[[MeasureRow | OutcomeRow], bool]) -> "SweepResults":
        return SweepResults(tuple(filter(keeps, self.measures)), tuple(filter(keeps, self.outcomes)))

    @property
    def untimed(self) -> "SweepResults":
        """Without what differs from machine to machine."""
        return replace(self, measures=tuple(row for row in self.measures if row.measure not in _TIMED))

    def of_cells(self, cells: Collection[str]) -> "SweepResults":
        """The reported runs and the base of some cells, without what differs from machine to machine."""
        return self.untimed.where(lambda row: row.cell in cells and row.role != TRIED)

    def in_design(self, sweep: Sweep) -> "SweepResults":
        """The rows of cells and arms that the study has."""
        cells, arms = sweep.cells, ("", *sweep.design.arms)
        return self.where(lambda row: row.cell in cells and row.arm in arms)

    @property
    def chosen(self) -> dict[str, dict[str, int]]:
        """Number of the reported point, by cell and arm."""
        found: dict[str, dict[str, int]] = {}
        for row in self.outcomes:
            if row.role == REPORTED:
                found.setdefault(row.cell, {})[row.arm] = row.point
        return found

    def chosen_for(self, sweep: Sweep, cells: Iterable[str]) -> dict[str, dict[str, int]]:
        """The points that `cells` reported, by the cell that tuned them and arm."""
        found: dict[str, dict[str, int]] = {}
        for cell in cells:
            found.setdefault(sweep.tuned_cell(cell) or cell, {}).update(self.chosen.get(cell, {}))
        return found


def result_files(design: Path, name: str) -> tuple[Path, Path]:
    """The files of measures and of outcomes, beside the `design`."""
    return design.parent / f"{name}.results.parquet", design.parent / f"{name}.outcomes.parquet"


def run_rows(cell: str, role: str, arm: str, point: GridPoint, result: RunResult) -> SweepResults:
    """The rows of a finished run."""
    place = MeasureRow(cell, role, arm, point.number, point.text, result.seed, "", "", "", 0.0)
    return _rows(place, result.evaluation, asdict(result.costs))


def base_rows(cell: str, scores: CheckpointScores) -> SweepResults:
    """The rows of the policy that all arms of a cell start from."""
    return _rows(MeasureRow(cell, BASE, "", 0, "", 0, "", "", "", 0.0), scores, {})


def together(parts: Iterable[SweepResults]) -> SweepResults:
    """The rows of all parts, in their order."""
    parts = list(parts)
    return SweepResults(
        tuple(row for part in parts for row in part.measures), tuple(row for part in parts for row in part.outcomes)
    )


def write_results(results: SweepResults, files: tuple[Path, Path]) -> None:
    """Write both files; the same results give the same bytes with the same version of pyarrow."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    contents = [[asdict(row) for row in results.measures], [asdict(row) for row in results.outcomes]]
    for path, rows in zip(files, contents, strict=True):
        table = pa.Table.from_pylist(rows)
        with replacing(path) as file:
            pq.write_table(table, file, compression="zstd")


def read_sweep_results(files: tuple[Path, Path]) -> SweepResults:
    """The content of both files; DataError where they are missing or hold something else."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    found = list[list[dict[str, object]]]()
    for path in files:
        if not path.is_file():
            raise DataError(f"{path}: no such file; luffy study --collect writes it from finished runs")
        try:
            found.append(pq.read_table(path).to_pylist())
        except (OSError, pa.ArrowException) as error:
            raise DataError(f"{path}: is not a parquet file of results ({error})") from None
    try:
        measures = tuple(MeasureRow(**row) for row in found[0])  # type: ignore[arg-type]
        outcomes = tuple(
            OutcomeRow(**{**row, "correct": tuple(row["correct"])})  # type: ignore[arg-type]
            for row in found[1]
        )
    except (TypeError, KeyError) as error:
        raise DataError(f"{files[0]}: holds no results of a study ({error})") from None
    return SweepResults(measures, outcomes)


def joined_results(before: SweepResults, found: SweepResults) -> SweepResults:
    """The runs of both, taking those that both have from `before`: machines that share a study each add their runs.

    Raises DataError where a run of both has different results, or an arm of a cell different tuned values.
    """
    for cell, arms in found.chosen.items():
        for arm, point in arms.items():
            if (known := before.chosen.get(cell, {}).get(arm, point)) != point:
                raise DataError(f"{cell}, {arm}: point {known} of its grid was reported, here it is point {point}")
    shared = _by_place(before.untimed).keys() & _by_place(found.untimed).keys()
    both = [each.where(lambda row: row.place in shared) for each in (before, found)]
    if (difference := first_difference(*both)) is not None:
        raise DataError(difference)
    rows = [*(_by_place(found) | _by_place(before)).values()]
    return SweepResults(
        tuple(sorted(row for row in rows if isinstance(row, MeasureRow))),
        tuple(sorted(row for row in rows if isinstance(row, OutcomeRow))),
    )


def _by_place(results: SweepResults) -> dict[tuple[str, ...], MeasureRow | OutcomeRow]:
    """All rows; only those of measures have nine parts in their place."""
    rows: tuple[MeasureRow | OutcomeRow, ...] = (*results.measures, *results.outcomes)
    return {row.place: row for row in rows}


def first_difference(committed: SweepResults, again: SweepResults) -> str | None:
    """Where two sets of results first differ, in a line; None where they are equal bit for bit."""

    def short(row: MeasureRow | OutcomeRow | None) -> str:
        if isinstance(row, OutcomeRow):
            return f"{sum(row.correct)} correct responses on problems {row.problems[:8]}"
        return "nothing" if row is None else repr(row.value)

    before, after = _by_place(committed), _by_place(again)
    for place in sorted(before.keys() | after.keys(), key=lambda place: (-len(place), place)):  # measures first
        if before.get(place) != after.get(place):
            where = ", ".join(part for part in place if part)
            return f"{where}: committed {short(before.get(place))}, now {short(after.get(place))}"
    return None


def _rows(place: MeasureRow, scores: CheckpointScores, costs: Mapping[str, float | None]) -> SweepResults:
    measures = [replace(place, measure=name, value=float(cost)) for name, cost in costs.items() if cost is not None]
    outcomes = []
    for each in scores.results.rows:
        on_suite = replace(place, suite=each.suite, decoding=each.decoding)
        for name in ("accuracy", "mean_tokens", "truncated_share", "no_answer_share"):
            measures.append(replace(on_suite, measure=name, value=float(getattr(each, name))))
        correct = scores.correct[each.suite, each.decoding]
        uids = sorted(correct)
        problems = hashlib.sha256("\n".join(uids).encode()).hexdigest()[:16]
        counts = tuple(correct[uid] for uid in uids)
        of_run = place.cell, place.role, place.arm, place.point, place.seed
        outcomes.append(OutcomeRow(*of_run, each.suite, each.decoding, problems, each.num_samples, counts))
    return SweepResults(tuple(measures), tuple(outcomes))
