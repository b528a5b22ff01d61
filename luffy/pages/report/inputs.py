"""Everything the report shows, read from the directories of the finished stages."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from luffy.config import ExperimentConfig
from luffy.data.pass_rates import DifficultyCard, read_card
from luffy.errors import LuffyError
from luffy.evaluation.checkpoint_scores import CheckpointScores, read_scores
from luffy.evaluation.results import Cell
from luffy.pipeline.chain.manifest import Manifest, finished_manifest
from luffy.statistics.paired import BenchmarkComparisons, PairedAccuracies, compare
from luffy.tracking.metrics import METRICS_FILE, MetricRow, read_metrics
from luffy.tracking.samples import SAMPLES_FILE, SampleRollout, read_samples

CHECKPOINTS = ("base", "sft", "rl")


@dataclass(frozen=True, slots=True)
class FinishedChain:
    """A finished chain."""

    config: ExperimentConfig
    manifests: Mapping[str, Manifest]
    """By node, in the order of the chain."""
    metrics: Mapping[str, list[MetricRow]]
    """Training curves by node (`base`, `sft`, `rl`), those that exist."""
    samples: tuple[tuple[int, SampleRollout], ...]
    """Rollouts of RL with their steps."""
    evaluations: tuple[CheckpointScores, ...]
    """In the order of the chain."""
    data_card: Mapping[str, object]
    difficulty: DifficultyCard | None = None
    """The card of the stage `difficulty`, where the chain has it."""

    @property
    def suites(self) -> list[str]:
        """Evaluated suites in the order of the configuration."""
        evaluated = {row.suite for evaluation in self.evaluations for row in evaluation.results.rows}
        return [name for name in self.config.data.suites if name in evaluated]

    @property
    def decodings(self) -> list[str]:
        """Evaluated decodings; the first makes the headline."""
        return list(self.config.evaluation.decodings) if self.config.evaluation else []

    @property
    def transitions(self) -> list[tuple[CheckpointScores, CheckpointScores]]:
        """Consecutive checkpoints."""
        return list(zip(self.evaluations, self.evaluations[1:], strict=False))

    def comparison(self, first: CheckpointScores, second: CheckpointScores, decoding: str) -> BenchmarkComparisons:
        """How `second` compares with `first` on the same problems of every suite."""
        pairs = {suite: _paired(first, second, (suite, decoding)) for suite in self.suites}
        return compare(pairs, second.results.confidence)


def read_chain(config: ExperimentConfig, inputs: Mapping[str, Path]) -> FinishedChain:
    """Read the stages that `inputs` name (`data`, `base`, `difficulty`, `sft`, `rl`, `evaluate_<checkpoint>`).

    Raises LuffyError when a stage is not finished or there is no evaluation.
    """
    evaluations = [f"evaluate_{name}" for name in CHECKPOINTS if f"evaluate_{name}" in inputs]
    if not evaluations:
        raise LuffyError("the report needs at least one evaluated checkpoint")
    trained = [name for name in CHECKPOINTS if name in inputs]
    made = [name for name in ("data", "base", "difficulty", "sft", "rl") if name in inputs]
    manifests = [finished_manifest(inputs[name]) for name in (*made, *evaluations)]
    curves = {name: read_metrics(inputs[name] / METRICS_FILE) for name in trained}
    return FinishedChain(
        config=config,
        manifests={manifest.node: manifest for manifest in manifests},
        metrics={name: rows for name, rows in curves.items() if rows},
        samples=tuple(read_samples(inputs["rl"] / SAMPLES_FILE)) if "rl" in inputs else (),
        evaluations=tuple(read_scores(inputs[name]) for name in evaluations),
        data_card=_read_data_card(inputs["data"]) if "data" in inputs else {},
        difficulty=read_card(inputs["difficulty"] / "card.json") if "difficulty" in inputs else None,
    )


def _paired(first: CheckpointScores, second: CheckpointScores, cell: Cell) -> PairedAccuracies:
    before, after = first.correct[cell], second.correct[cell]
    if before.keys() != after.keys():
        raise LuffyError(f"{first.checkpoint} and {second.checkpoint} were evaluated on different problems of {cell}")
    row = second.row(cell)
    assert row is not None
    k = row.num_samples
    return PairedAccuracies([before[uid] / k for uid in before], [after[uid] / k for uid in before], k)


def _read_data_card(directory: Path) -> Mapping[str, object]:
    return json.loads((directory / "card.json").read_text(encoding="utf-8"))
