"""Accuracy of one version of weights in training on held-out suites, and its metrics (`val/`)."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from urllib.parse import quote

from luffy.config.evaluation import DECODING, MEASURES
from luffy.errors import LuffyError
from luffy.evaluation.evaluator import Evaluator
from luffy.evaluation.requests import Suite
from luffy.evaluation.results import EvaluationResults, ResultRow, Tally, read_results, write_results
from luffy.evaluation.sample_log import SampleLog
from luffy.rollout.engine import Completion, RolloutEngine, RolloutRequest, SamplingParams


class OneVersionEngine:
    """Passes requests to an engine, and checks that one version of the weights sampled all tokens.

    Stop texts are left to the client, which cuts responses after them: engines for rollouts do not read text.
    """

    def __init__(self, engine: RolloutEngine, version: int) -> None:
        self._engine = engine
        self._version = version

    def generate(self, requests: Sequence[RolloutRequest], params: SamplingParams) -> list[Completion]:
        """One completion per request, in order; LuffyError where other weights sampled a token."""
        completions = self._engine.generate(requests, replace(params, stop=()))
        versions = {version for completion in completions for version in completion.weight_versions}
        if versions - {self._version}:
            raise LuffyError(f"a validation of version {self._version} was answered by versions {sorted(versions)}")
        return completions

    def close(self) -> None:
        """Nothing to free: the engine belongs to the stage."""


def measure_suites(
    evaluator: Evaluator, suites: Sequence[Suite], confidence: float, folder: Path, step: int
) -> tuple[ResultRow, ...]:
    """One row per suite, saved in `folder` with the step, so that a resumed stage does not sample again.

    Batches that a killed attempt had graded are not generated again either.
    """
    finished = folder / f"step_{step:06d}.json"
    folder.mkdir(parents=True, exist_ok=True)
    logs = [SampleLog(folder / f"{finished.stem}.{quote(suite.name, safe='')}.open") for suite in suites]
    if not finished.exists():
        cells = [(log, suite, DECODING) for log, suite in zip(logs, suites, strict=True)]
        rows = []
        for suite, records in zip(suites, evaluator.evaluate_into(cells, lambda batch: None), strict=True):
            tally = Tally(suite.name, DECODING)
            for record in records:
                tally.add(record)
            rows.append(tally.row(confidence))
        write_results(finished, EvaluationResults(checkpoint=f"step {step}", confidence=confidence, rows=tuple(rows)))
    for log in logs:
        log.remove()
    return read_results(finished).rows


def validation_metrics(rows: Sequence[ResultRow], version: int) -> dict[str, float]:
    """Metrics of the weights of `version`: mean accuracy over suites, and the results of each suite."""
    metrics = {"val/accuracy": fmean(row.accuracy for row in rows), "val/weight_version": float(version)}
    for row in rows:
        low, high = row.interval
        values = {name: float(getattr(row, name)) for name in MEASURES}
        values |= {"accuracy_low": low, "accuracy_high": high, "num_problems": float(row.num_problems)}
        metrics |= {f"val/{row.suite}/{name}": value for name, value in values.items()}
    return metrics
