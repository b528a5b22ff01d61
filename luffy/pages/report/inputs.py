"""Everything the report shows, read from the directories of the finished stages."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from luffy.config import ExperimentConfig
from luffy.config.evaluation import VALIDATION
from luffy.data.pass_rates import DifficultyCard, read_card
from luffy.data.sample_card import SampleCard, read_sample_card
from luffy.errors import LuffyError
from luffy.evaluation.checkpoint_scores import CheckpointScores, read_scores
from luffy.evaluation.results import Cell
from luffy.pipeline.chain.graph import build_graph, nodes_providing, nodes_showing
from luffy.pipeline.chain.manifest import Manifest, finished_manifest
from luffy.statistics.paired import BenchmarkComparisons, PairedAccuracies, compare
from luffy.synthesis.synthesis_card import SynthesisCard, read_synthesis_card
from luffy.tracking.metrics import METRICS_FILE, MetricRow, read_metrics
from luffy.tracking.tracker import SAMPLES_FILE, SampleRollout, read_samples


@dataclass(frozen=True, slots=True)
class FinishedChain:
    """A finished chain."""

    config: ExperimentConfig
    manifests: Mapping[str, Manifest]
    """By node, in the order of the chain."""
    metrics: dict[str, list[MetricRow]]
    """Training curves by node, those that exist."""
    samples: tuple[tuple[int, SampleRollout], ...]
    """Rollouts of RL with their steps."""
    evaluations: tuple[CheckpointScores, ...]
    """In the order of the chain."""
    data_card: Mapping[str, object]
    difficulty: DifficultyCard | None = None
    """The card of the stage `difficulty`, where the chain has it."""
    synthesis: SynthesisCard | None = None
    """The card of the stage `synthesize`, where the chain has it."""
    sampled: tuple[SampleCard, ...] = ()
    """The cards of the stages `sample`, round by round."""

    @property
    def suites(self) -> list[str]:
        """Evaluated suites in the order of the configuration, the held-out training prompts last."""
        evaluated = {row.suite for evaluation in self.evaluations for row in evaluation.results.rows}
        return [name for name in dict.fromkeys((*self.config.data.suites, VALIDATION)) if name in evaluated]

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
    """Read the stages in `inputs`, which are named as the report's node in the chain's graph names them.

    Raises LuffyError when a stage is not finished or there is no evaluation.
    """
    stages = _in_order(config, inputs)
    evaluations = nodes_providing("evaluation", stages)
    if not evaluations:
        raise LuffyError("the report needs at least one evaluated checkpoint")
    manifests = [finished_manifest(directory) for directory in stages.values()]
    curves = {name: read_metrics(stages[name] / METRICS_FILE) for name in nodes_showing("training_curves", stages)}
    sampled = nodes_showing("rollout_samples", stages)
    data_cards = [json.loads((stages[name] / "card.json").read_bytes()) for name in nodes_showing("data_card", stages)]
    difficulty_cards = [read_card(stages[name] / "card.json") for name in nodes_showing("difficulty_card", stages)]
    synthesis_cards = [
        read_synthesis_card(stages[name] / "card.json") for name in nodes_showing("synthesis_card", stages)
    ]
    return FinishedChain(
        config=config,
        manifests={manifest.node: manifest for manifest in manifests},
        metrics={name: rows for name, rows in curves.items() if rows},
        samples=tuple(sample for name in sampled for sample in read_samples(stages[name] / SAMPLES_FILE)),
        evaluations=tuple(read_scores(stages[name]) for name in evaluations),
        data_card=data_cards[0] if data_cards else {},
        sampled=tuple(read_sample_card(stages[name] / "card.json") for name in nodes_showing("sample_card", stages)),
        difficulty=difficulty_cards[0] if difficulty_cards else None,
        synthesis=synthesis_cards[0] if synthesis_cards else None,
    )


def _in_order(config: ExperimentConfig, inputs: Mapping[str, Path]) -> dict[str, Path]:
    """Directories by node, in the order of the chain."""
    nodes = build_graph(config)
    report = next(node for node in nodes if node.kind.reads_all)
    entries = {name: entry for entry, name in report.inputs.items()}
    return {node.name: inputs[entries[node.name]] for node in nodes if entries.get(node.name) in inputs}


def _paired(first: CheckpointScores, second: CheckpointScores, cell: Cell) -> PairedAccuracies:
    before, after = first.correct[cell], second.correct[cell]
    if before.keys() != after.keys():
        raise LuffyError(f"{first.checkpoint} and {second.checkpoint} were evaluated on different problems of {cell}")
    row = second.row(cell)
    assert row is not None
    k = row.num_samples
    return PairedAccuracies([before[uid] / k for uid in before], [after[uid] / k for uid in before], k)
