"""Results of runs: what their stages have left, means over seeds, and the two tables of a study.

A study keeps the tables as small parquet files beside its design. `NAME.results.parquet` has a row for each run, suite
and measure (what a run has spent has no suite); `NAME.outcomes.parquet` a row for each run, suite and decoding, with
the number of correct responses to every problem. Its page and figures are made from these files and the design alone.
"""

import hashlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, field, fields, replace
from pathlib import Path
from statistics import fmean
from typing import Any, TypeVar

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from luffy.config.many_runs.sweep_design import GridPoint
from luffy.config.many_runs.sweep_runs import SweepRun
from luffy.data.answer_cards import CARD_FILE, SampleCard, read_card
from luffy.errors import DataError, LuffyError, first_line
from luffy.evaluation.results import CheckpointScores, read_scores
from luffy.files import replacing
from luffy.pipeline.manifest import finished_manifest
from luffy.statistics.over_seeds import seed_interval
from luffy.tracking.metrics import (
    GPU_HOURS,
    METRICS_FILE,
    HeldOutPoint,
    held_out_curves,
    read_metrics,
    training_rows,
    with_spent,
)

_REWARD = "reward/mean"
_OPTIMIZER_STEPS = "batch/optimizer_steps"
_SECONDS = "perf/step_s"
_COSTLY = ("sample", "sft", "rl")
"""Kinds of stages that make a run's costs."""


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
Point = TypeVar("Point", CurvePoint, HeldOutPoint)


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
        return tuple(map(_mean, zip(*(seed.curve for seed in self.seeds), strict=False)))

    @property
    def held_out(self) -> dict[str, tuple[tuple[HeldOutPoint, ...], ...]]:
        """Held-out accuracy of each seed, by suite."""
        suites = dict.fromkeys(suite for seed in self.seeds for suite in seed.held_out)
        return {suite: tuple(seed.held_out.get(suite, ()) for seed in self.seeds) for suite in suites}

    def held_out_mean(self, suite: str, confidence: float) -> tuple[HeldOutPoint, ...]:
        """Mean held-out accuracy over seeds, measurement by measurement, up to the end of the shortest.

        The bounds are Student's t over seeds; with one seed they stay those over its problems.
        """
        found = []
        for points in zip(*filter(None, self.held_out.get(suite, ())), strict=False):
            mean = _mean(points)
            if len(points) > 1:
                low, high = seed_interval([point.accuracy for point in points], confidence)
                mean = replace(mean, low=low, high=high)
            found.append(mean)
        return tuple(found)


def _mean(points: Sequence[Point]) -> Point:
    """The mean of points of several seeds, field by field."""
    return type(points[0])(*map(fmean, zip(*map(astuple, points), strict=True)))


def arm_results(name: str, point: GridPoint, outcomes: Mapping[int, RunOutcome]) -> ArmResults:
    """The arm whose runs had these `outcomes`, by seed."""
    finished = tuple(outcome for outcome in outcomes.values() if isinstance(outcome, RunResult))
    failed = {seed: first_line(outcome) for seed, outcome in outcomes.items() if isinstance(outcome, LuffyError)}
    return ArmResults(name, point, finished, failed)


def read_run(run: SweepRun, stages: Mapping[str, Path]) -> RunResult:
    """A finished run, whose stages lie in the directories `stages`; raises LuffyError where a file is missing."""
    kinds = {name: directory.parent.name for name, directory in stages.items()}
    trained = {
        name: directory
        for name, directory in stages.items()
        if kinds[name] in _COSTLY and not (kinds[name] == "sample" and _is_taught(directory))
    }
    spent = {name: _costs(kinds[name], directory) for name, directory in trained.items()}
    logged = {
        name: read_metrics(directory / METRICS_FILE) for name, directory in trained.items() if kinds[name] != "sample"
    }
    # Sampling takes time, and no steps or rows.
    sampled = {name: [{"step": 1.0, _OPTIMIZER_STEPS: 0.0, _SECONDS: spent[name].seconds or 0.0}] for name in trained}
    rewards = with_spent((sampled | logged)[name] for name in trained)
    curve = tuple(CurvePoint(row[_REWARD], *by_then) for row, by_then in rewards if _REWARD in row)
    held_out, scores = held_out_curves(list(logged.values())), read_scores(stages[f"evaluate_{run.last}"])
    return RunResult(run.seed, scores, total_costs(spent.values()), curve, held_out, trained)


def costs_together(runs: Collection[RunResult]) -> Costs:
    """What several runs have spent together; a stage that they share is counted once."""
    stages = {directory for run in runs for directory in run.trained.values()}
    return total_costs([_costs(directory.parent.name, directory) for directory in sorted(stages)])


def total_costs(spent: Collection[Costs]) -> Costs:
    """Sums of all costs, None where a summand is unknown; for memory the highest known peak."""
    peaks = [costs.peak_memory_gib for costs in spent if costs.peak_memory_gib is not None]
    return replace(_combined(spent, sum), peak_memory_gib=max(peaks, default=None))


def _combined(spent: Collection[Costs], combine: Callable[[list[float]], float]) -> Costs:
    """Each cost of all, None where one is unknown."""
    known = {each.name: [getattr(costs, each.name) for costs in spent] for each in fields(Costs)}
    return Costs(**{name: None if None in values else combine(values) for name, values in known.items()})


def _is_taught(sampled: Path) -> bool:
    """Whether teachers wrote the answers of a finished stage, which are no cost of a run's."""
    section = finished_manifest(sampled).settings.get("sample")
    return isinstance(section, dict) and bool(section.get("teachers"))


def _costs(kind: str, directory: Path) -> Costs:
    """What one finished stage of a kind in `_COSTLY` has spent."""
    if kind == "sample":
        rates, manifest = read_card(directory / CARD_FILE, SampleCard).rates, finished_manifest(directory)
        responses = float(rates.prompts * rates.num_samples)
        return Costs(0.0, responses, round(responses * rates.mean_tokens), 0.0, manifest.total_s, None)
    rows, is_rl = training_rows(read_metrics(directory / METRICS_FILE)), kind == "rl"

    def total(name: str) -> float | None:  # a partial sum would be wrong
        return sum(row[name] for row in rows) if all(name in row for row in rows) else None

    def most(name: str) -> float | None:
        return max((row[name] for row in rows if name in row), default=None)

    return Costs(
        optimizer_steps=total(_OPTIMIZER_STEPS) if is_rl else len(rows),
        rollouts=total("rollout/num_drawn") if is_rl else 0,
        generated_tokens=total("rollout/tokens_drawn") if is_rl else 0,
        trained_tokens=total("batch/response_tokens"),
        seconds=total(_SECONDS),
        peak_memory_gib=most("perf/peak_memory_gib"),
        gpu_hours=most(GPU_HOURS),
    )


REPORTED, TRIED, BASE = "reported", "tried", "base"
_OF_MEASURES = ["cell", "role", "arm", "point", "values", "seed", "suite", "decoding", "measure"]
_OF_OUTCOMES = ["cell", "role", "arm", "point", "seed", "suite", "decoding"]
"""What identifies a row, and the order of the files."""
_COLUMNS = [*_OF_MEASURES, "value"], [*_OF_OUTCOMES, "problems", "num_samples", "correct"]
_TIMED = ("seconds", "peak_memory_gib", "gpu_hours")
"""Measures that differ from machine to machine."""


@dataclass(frozen=True, slots=True, eq=False)
class SweepResults:
    """The content of both files.

    Rows say whose they are by cell, role (`reported`; `tried`: a run of tuning; `base`: the policy that all arms of the
    cell, or of a seed, start from), arm (empty for the base), point (its number in the arm's grid), seed (0 for the
    base that all seeds share), suite and decoding.
    """

    measures: pd.DataFrame
    """A row has a `measure` with its `value`, and `values`, the settings of the point; suites of costs are empty."""
    outcomes: pd.DataFrame
    """A row has the number of `correct` responses to each problem as a tuple, of `num_samples` each, in the order of
    the uids, and `problems`, a digest of these; rows of equal digests list the same problems."""

    def where(self, **values: Iterable[str | int]) -> "SweepResults":
        """The rows that have one of the `values` in each of these columns."""
        wanted = {column: [*allowed] for column, allowed in values.items()}
        return SweepResults(
            *(rows[rows[[*wanted]].isin(wanted).all(axis=1)] for rows in (self.measures, self.outcomes))
        )

    @property
    def chosen(self) -> dict[tuple[str, str], int]:
        """Number of the reported point, by cell and arm."""
        reported = self.where(role=[REPORTED]).outcomes[["cell", "arm", "point"]]
        return {(cell, arm): point for cell, arm, point in reported.itertuples(index=False, name=None)}


def result_files(design: Path, name: str) -> tuple[Path, Path]:
    """The files of measures and of outcomes, beside the `design`."""
    return design.parent / f"{name}.results.parquet", design.parent / f"{name}.outcomes.parquet"


def run_rows(cell: str, role: str, arm: str, point: GridPoint, result: RunResult) -> SweepResults:
    """The rows of a finished run."""
    run = {"cell": cell, "role": role, "arm": arm, "point": point.number, "values": point.text, "seed": result.seed}
    return _rows(run, result.evaluation, asdict(result.costs))


def base_rows(cell: str, scores: CheckpointScores, seed: int = 0) -> SweepResults:
    """The rows of the policy that all arms of a cell start from, or all of a seed's."""
    return _rows({"cell": cell, "role": BASE, "arm": "", "point": 0, "values": "", "seed": seed}, scores, {})


def _rows(run: dict[str, object], scores: CheckpointScores, costs: Mapping[str, float | None]) -> SweepResults:
    measured = {("", "", name): cost for name, cost in costs.items() if cost is not None}
    outcomes = []
    for each in scores.results.rows:
        suite, decoding = each.suite, each.decoding
        for name in ("accuracy", "mean_tokens", "truncated_share", "no_answer_share"):
            measured[suite, decoding, name] = getattr(each, name)
        correct = sorted(scores.correct[suite, decoding].items())
        problems = hashlib.sha256("\n".join(uid for uid, _ in correct).encode()).hexdigest()[:16]
        counts = tuple(number for _, number in correct)
        found = {"problems": problems, "num_samples": each.num_samples, "correct": counts}
        outcomes.append({**run, "suite": suite, "decoding": decoding, **found})
    measures = [
        {**run, "suite": suite, "decoding": decoding, "measure": name, "value": float(value)}
        for (suite, decoding, name), value in measured.items()
    ]
    return SweepResults(pd.DataFrame(measures, columns=_COLUMNS[0]), pd.DataFrame(outcomes, columns=_COLUMNS[1]))


def together(parts: Iterable[SweepResults]) -> SweepResults:
    """The rows of all parts, in their order."""
    parts = list(parts)
    if not parts:
        return SweepResults(*(pd.DataFrame(columns=columns) for columns in _COLUMNS))
    return SweepResults(
        pd.concat([part.measures for part in parts], ignore_index=True),
        pd.concat([part.outcomes for part in parts], ignore_index=True),
    )


def in_order(results: SweepResults) -> SweepResults:
    """The rows in the order of the files; of several on the same run, suite and decoding the first."""
    tables = (results.measures, _OF_MEASURES), (results.outcomes, _OF_OUTCOMES)
    return SweepResults(*(rows.drop_duplicates(of).sort_values(of, ignore_index=True) for rows, of in tables))


def write_results(results: SweepResults, files: tuple[Path, Path]) -> None:
    """Write both files; the same results give the same bytes with the same version of pyarrow."""
    for path, rows in zip(files, (results.measures, results.outcomes), strict=True):
        with replacing(path) as file:
            pq.write_table(pa.Table.from_pylist(rows.to_dict("records")), file, compression="zstd")


def read_sweep_results(files: tuple[Path, Path]) -> SweepResults:
    """The content of both files; DataError where they are missing or hold something else."""
    found = []
    for path, columns in zip(files, _COLUMNS, strict=True):
        if not path.is_file():
            raise DataError(f"{path}: no such file; luffy compare DESIGN --collect writes it from finished runs")
        try:
            table = pq.read_table(path)
        except (OSError, pa.ArrowException) as error:
            raise DataError(f"{path}: is not a parquet file of results ({error})") from None
        if table.column_names != columns:
            raise DataError(f"{path}: holds no results of a study (it has the columns {', '.join(table.column_names)})")
        found.append(pd.DataFrame(table.to_pylist(), columns=columns))
    measures, outcomes = found
    return SweepResults(measures, outcomes.assign(correct=outcomes["correct"].map(tuple)))


def joined_results(before: SweepResults, found: SweepResults) -> SweepResults:
    """The runs of both, taking those that both have from `before`: machines that share a study each add their runs.

    Raises DataError where a run of both has different results, or an arm of a cell different tuned values.
    """
    chosen = before.chosen
    for (cell, arm), point in found.chosen.items():
        if (known := chosen.get((cell, arm), point)) != point:
            raise DataError(f"{cell}, {arm}: point {known} of its grid was reported, here it is point {point}")
    if (difference := first_difference(before, found)) is not None:
        raise DataError(difference)
    return in_order(together([before, found]))


def first_difference(committed: SweepResults, again: SweepResults) -> str | None:
    """Where two sets of results first differ in what both have, in a line; None where that is equal bit for bit but for
    times."""

    def by_place(results: SweepResults) -> dict[tuple[str | int, ...], tuple[object, ...]]:
        measures = results.measures[~results.measures["measure"].isin(_TIMED)]
        tables = (measures, len(_OF_MEASURES)), (results.outcomes, len(_OF_OUTCOMES))
        return {row[:n]: row[n:] for rows, n in tables for row in rows.itertuples(index=False, name=None)}

    def short(found: tuple[Any, ...]) -> str:
        if len(found) == 1:
            return repr(found[0])
        problems, _, correct = found
        return f"{sum(correct)} correct responses on problems {problems[:8]}"

    before, after = by_place(committed), by_place(again)
    for place in sorted(before.keys() & after.keys(), key=lambda place: (-len(place), place)):  # measures first
        if before[place] != after[place]:
            where = ", ".join(str(part) for part in place if part != "")
            return f"{where}: committed {short(before[place])}, now {short(after[place])}"
    return None
