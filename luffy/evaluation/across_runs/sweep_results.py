"""The results of many runs as two tables, which a study keeps as two small parquet files beside its design.

`NAME.results.parquet` has a row for each run, suite and measure (what a run has spent has no suite);
`NAME.outcomes.parquet` a row for each run, suite and decoding, with the number of correct responses to every problem.
The page, figures and tables are made from these two files and the design alone.
"""

import hashlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import ClassVar

from luffy.config.many_runs.sweep_design import GridPoint
from luffy.config.many_runs.sweep_runs import Sweep
from luffy.errors import DataError
from luffy.evaluation.across_runs.run_results import RunResult
from luffy.evaluation.results import CheckpointScores
from luffy.files import replacing

REPORTED, TRIED, BASE = "reported", "tried", "base"
TIMED = frozenset({"seconds", "peak_memory_gib", "gpu_hours"})
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

    @property
    def is_timed(self) -> bool:
        """Whether it differs from machine to machine."""
        return self.measure in TIMED


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

    is_timed: ClassVar[bool] = False


@dataclass(frozen=True, slots=True)
class SweepResults:
    """The content of both files, where they are sorted."""

    measures: tuple[MeasureRow, ...]
    outcomes: tuple[OutcomeRow, ...]

    def where(self, keeps: Callable[[MeasureRow | OutcomeRow], bool]) -> "SweepResults":
        return SweepResults(tuple(filter(keeps, self.measures)), tuple(filter(keeps, self.outcomes)))

    def of_cells(self, cells: Collection[str]) -> "SweepResults":
        """The reported runs and the base of some cells, without what differs from machine to machine."""
        return self.where(lambda row: row.cell in cells and row.role != TRIED and not row.is_timed)

    @property
    def places(self) -> frozenset[tuple[str, ...]]:
        """The places of all rows, without what differs from machine to machine."""
        rows: tuple[MeasureRow | OutcomeRow, ...] = (*self.measures, *self.outcomes)
        return frozenset(row.place for row in rows if not row.is_timed)

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
    return _rows(place, result.evaluation, result.costs.values())


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
    common = before.places & found.places
    shared = [each.where(lambda row: row.place in common) for each in (before, found)]
    if (difference := first_difference(*shared)) is not None:
        raise DataError(difference)
    measures = {row.place: row for row in (*found.measures, *before.measures)}
    outcomes = {row.place: row for row in (*found.outcomes, *before.outcomes)}
    return SweepResults(tuple(sorted(measures.values())), tuple(sorted(outcomes.values())))


def first_difference(committed: SweepResults, again: SweepResults) -> str | None:
    """Where two sets of results first differ, in a line; None where they are equal bit for bit."""

    def short(row: MeasureRow | OutcomeRow | None) -> str:
        if isinstance(row, OutcomeRow):
            return f"{sum(row.correct)} correct responses on problems {row.problems[:8]}"
        return "nothing" if row is None else repr(row.value)

    kinds: tuple[tuple[Sequence[MeasureRow | OutcomeRow], Sequence[MeasureRow | OutcomeRow]], ...]
    kinds = (committed.measures, again.measures), (committed.outcomes, again.outcomes)
    for kind in kinds:
        before, after = ({row.place: row for row in rows} for rows in kind)
        for place in sorted(before.keys() | after.keys()):
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
        outcomes.append(
            OutcomeRow(
                place.cell,
                place.role,
                place.arm,
                place.point,
                place.seed,
                each.suite,
                each.decoding,
                problems,
                each.num_samples,
                counts,
            )
        )
    return SweepResults(tuple(measures), tuple(outcomes))
