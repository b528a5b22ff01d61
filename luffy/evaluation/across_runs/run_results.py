"""Results of runs as they lie on disk: evaluations, learning curves, held-out accuracy, costs; means over seeds."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from itertools import accumulate
from pathlib import Path
from statistics import fmean

from luffy.config.many_runs.sweep_design import GridPoint
from luffy.config.many_runs.sweep_runs import SweepRun
from luffy.data.pass_rates import CARD_FILE, read_sample_card
from luffy.errors import LuffyError
from luffy.evaluation.results import CheckpointScores, read_scores
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

    def values(self) -> dict[str, float | None]:
        return asdict(self)

    @property
    def tokens(self) -> float | None:
        """Tokens sampled and learned from, as `budget.tokens` counts them."""
        if self.generated_tokens is None or self.trained_tokens is None:
            return None
        return self.generated_tokens + self.trained_tokens


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
        if not self.seeds:
            return None
        known = {each.name: [getattr(seed.costs, each.name) for seed in self.seeds] for each in fields(Costs)}
        return Costs(**{name: None if None in values else fmean(values) for name, values in known.items()})

    @property
    def curve(self) -> tuple[CurvePoint, ...]:
        """Means over its seeds, step by step."""
        points = zip(*(seed.curve for seed in self.seeds), strict=False)
        return tuple(
            CurvePoint(*(fmean(getattr(point, each.name) for point in at_step) for each in fields(CurvePoint)))
            for at_step in points
        )

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
            means = {each.name: fmean(getattr(point, each.name) for point in points) for each in fields(HeldOutPoint)}
            if len(points) > 1:
                means["low"], means["high"] = seed_interval([point.accuracy for point in points], confidence)
            found.append(HeldOutPoint(**means))
        return tuple(found)


def arm_results(name: str, point: GridPoint, outcomes: Mapping[int, RunOutcome]) -> ArmResults:
    """The arm whose runs had these `outcomes`, by seed."""
    finished = tuple(outcome for outcome in outcomes.values() if isinstance(outcome, RunResult))
    failed = {seed: first_line(outcome) for seed, outcome in outcomes.items() if isinstance(outcome, LuffyError)}
    return ArmResults(name, point, finished, failed)


def first_line(error: LuffyError) -> str:
    """The first line of an error's message; further lines quote a log."""
    return str(error).partition("\n")[0]


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
    trained = {name: directory for name, directory in stages.items() if _kind(name) in _COSTLY}
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
    known = {each.name: [getattr(costs, each.name) for costs in spent] for each in fields(Costs)}
    sums = {name: None if None in values else sum(values) for name, values in known.items()}
    peaks = [peak for peak in known["peak_memory_gib"] if peak is not None]
    return Costs(**{**sums, "peak_memory_gib": max(peaks, default=None)})


def _kind(name: str) -> str:
    """Kind of the stage called `name` in its chain, e.g. `sft` for `sft_2`."""
    kind = kind_of(name)
    return "" if kind is None else kind.name


def _costs(kind: str, directory: Path) -> Costs:
    """What one finished stage of a kind in `_COSTLY` has spent."""
    if kind == "sample":
        rates, manifest = read_sample_card(directory / CARD_FILE).rates, finished_manifest(directory)
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
