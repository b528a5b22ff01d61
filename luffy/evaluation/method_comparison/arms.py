"""The arms of a comparison as they lie on disk: evaluations, learning curves, costs."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from itertools import accumulate
from pathlib import Path
from statistics import fmean

from luffy.config.many_runs.arm_run import ArmRun
from luffy.data.pass_rates import CARD_FILE, read_sample_card
from luffy.evaluation.checkpoint_scores import CheckpointScores, read_scores
from luffy.evaluation.method_comparison.held_out_arms import mean_curve, suites_of
from luffy.pipeline.graph import kind_of
from luffy.pipeline.manifest import finished_manifest
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
_SPENT = (_OPTIMIZER_STEPS, _ROWS, "perf/step_s")
_TRAINING = ("sft", "rl")
_COSTLY = ("sample", *_TRAINING)
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

    def values(self) -> dict[str, float | None]:
        """The costs by name."""
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
class FinishedSeed:
    """One arm with one seed."""

    seed: int
    evaluation: CheckpointScores
    costs: Costs
    curve: tuple[CurvePoint, ...]
    """Empty without RL."""
    held_out: Mapping[str, tuple[HeldOutPoint, ...]] = field(default_factory=dict)
    """Held-out accuracy while it trained, by suite; empty without validation."""
    trained: Mapping[str, Path] = field(default_factory=dict)
    """Directories of the stages that sampled traces or learned, by name, in order; other runs may share them."""


@dataclass(frozen=True, slots=True)
class Arm:
    """One arm, with the seeds that it finished and those that it failed."""

    name: str
    chain: str
    method: str
    seeds: tuple[FinishedSeed, ...]
    failures: Mapping[int, str]
    """Seed to one line."""

    @property
    def costs(self) -> Costs | None:
        """Means over its seeds; None where none is finished."""
        return mean_costs(self.seeds)

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
        suites = suites_of([seed.held_out for seed in self.seeds])
        return {suite: tuple(seed.held_out.get(suite, ()) for seed in self.seeds) for suite in suites}

    def held_out_mean(self, suite: str, confidence: float) -> tuple[HeldOutPoint, ...]:
        """Mean held-out accuracy over seeds, with bounds (`mean_curve`); empty where it was not measured."""
        return mean_curve(self.held_out.get(suite, ()), confidence)


def read_seed(run: ArmRun, stages: Mapping[str, Path]) -> FinishedSeed:
    """A finished run, whose stages lie in the directories `stages`; raises LuffyError where a file is missing."""
    trained = {name: directory for name, directory in stages.items() if _kind(name) in _COSTLY}
    spent = [_costs(_kind(name), directory) for name, directory in trained.items()]
    logged = {
        name: read_metrics(directory / METRICS_FILE) for name, directory in trained.items() if _kind(name) in _TRAINING
    }
    evaluation = read_scores(stages[f"evaluate_{run.last}"])
    before = [rows for name, rows in logged.items() if _kind(name) == "sft"]
    rl = next((rows for name, rows in logged.items() if _kind(name) == "rl"), [])
    curve = tuple(_curve(before, rl, total_costs(spent[:-1]).seconds or 0.0))
    held_out = held_out_curves(list(logged.values()))
    return FinishedSeed(run.seed, evaluation, total_costs(spent), curve, held_out, trained)


def mean_costs(seeds: Sequence[FinishedSeed]) -> Costs | None:
    """Mean costs of a run over its seeds; None without any."""
    if not seeds:
        return None
    return Costs(**{each.name: _mean_cost([seed.costs for seed in seeds], each.name) for each in fields(Costs)})


def stage_costs(seeds: Iterable[FinishedSeed]) -> dict[Path, Costs]:
    """Costs of each stage of several runs by its directory, so that a shared stage is counted once."""
    stages = {directory: name for seed in seeds for name, directory in seed.trained.items()}
    return {directory: _costs(_kind(name), directory) for directory, name in stages.items()}


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
    return _costs_of_sampling(directory) if kind == "sample" else _costs_of_training(kind, _trained_rows(directory))


def _trained_rows(directory: Path) -> list[MetricRow]:
    return training_rows(read_metrics(directory / METRICS_FILE))


def _costs_of_training(kind: str, rows: Sequence[MetricRow]) -> Costs:
    sampling = rows if kind == "rl" else ()
    return Costs(
        optimizer_steps=_sum(rows, _OPTIMIZER_STEPS) if kind == "rl" else len(rows),
        rollouts=_sum(sampling, "rollout/num_drawn"),
        generated_tokens=_sum(sampling, "rollout/tokens_drawn"),
        trained_tokens=_sum(rows, "batch/response_tokens"),
        seconds=_sum(rows, "perf/step_s"),
        peak_memory_gib=max(
            (row["perf/peak_memory_gib"] for row in rows if "perf/peak_memory_gib" in row), default=None
        ),
        gpu_hours=max((row[GPU_HOURS] for row in rows if GPU_HOURS in row), default=None),
    )


def _costs_of_sampling(directory: Path) -> Costs:
    rates, manifest = read_sample_card(directory / CARD_FILE).rates, finished_manifest(directory)
    responses = float(rates.prompts * rates.num_samples)
    return Costs(0.0, responses, round(responses * rates.mean_tokens), 0.0, manifest.total_s, None)


def _sum(rows: Sequence[MetricRow], name: str) -> float | None:
    """Sum of the metric `name`; None where a row lacks it, since a partial sum would be wrong."""
    return sum(row[name] for row in rows) if all(name in row for row in rows) else None


def _curve(
    before: Sequence[Sequence[MetricRow]], rl: Sequence[MetricRow], seconds_before: float
) -> Iterator[CurvePoint]:
    """The rewards of RL, after the stages `before` it, which have taken `seconds_before`."""
    taught = [row for rows in before for row in training_rows(rows)]
    rows_before = sum(row.get(_ROWS, 0.0) for row in taught)
    learned = training_rows(rl)
    totals = zip(*(_running_total(learned, name) for name in _SPENT), strict=True)
    for row, (steps, rows, seconds) in zip(learned, totals, strict=True):
        if _REWARD in row:
            yield CurvePoint(row[_REWARD], len(taught) + steps, rows_before + rows, seconds_before + seconds)


def _running_total(rows: Sequence[MetricRow], name: str) -> list[float]:
    return list(accumulate(row.get(name, 0.0) for row in rows))


def _mean_cost(costs: Sequence[Costs], name: str) -> float | None:
    values = [value for cost in costs if (value := getattr(cost, name)) is not None]
    return fmean(values) if len(values) == len(costs) else None
