"""How well `luffy bench` predicts a run: each stage is measured, predicted, and then made, one after the other.

Run: python tests/benchmarks/bench_prediction.py CONFIG [KEY.PATH=VALUE ...] [--response-tokens N] [--rounds N]

e.g. `arithmetic rl.steps=3`, or `smoke rl.steps=3 --response-tokens 45`. The stages are made as `luffy run` makes them,
without Prefect, in a new workspace each round. Measurement and stage follow each other at once, so that both meet about
the same load; what is predicted is what is known before the first stage. With several rounds the table shows medians.
"""

import argparse
import statistics
import tempfile
import time
from collections import defaultdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from luffy.config import ExperimentConfig, load_experiment
from luffy.costs.bench_run import BenchOptions
from luffy.costs.bench_stages import open_bench
from luffy.costs.forecast import forecast
from luffy.costs.readings import Reading
from luffy.pipeline.experiment import ExperimentRun, Unwatched, open_experiment
from luffy.pipeline.workspace import Workspace

Pairs = dict[str, list[tuple[float, float]]]
"""For each stage, predicted and real seconds of each round."""


def measure_round(config: ExperimentConfig, options: BenchOptions, folder: Path, found: Pairs) -> None:
    """Add one round to `found`."""
    workspace = Workspace(folder)
    with open_bench(config, workspace, options, Unwatched()) as opened:
        experiment = open_experiment(config, workspace)
        to_measure = {plan.node.name: plan for plan in opened.plans}
        run = ExperimentRun(experiment, opened.scratch)
        for node in experiment.nodes:
            plans = experiment.plan()
            if node.name in to_measure:
                outcome = opened.measure(to_measure[node.name])
                assert isinstance(outcome, Reading), outcome
            predicted = {each.node: each.seconds for each in forecast(config, plans, workspace)}[node.name]
            began = time.monotonic()
            run.execute(node.name, Unwatched())
            if predicted:
                found[node.name].append((predicted, time.monotonic() - began))
                Console().print(f"{node.name}: predicted {predicted:.1f} s, took {found[node.name][-1][1]:.1f} s")


def main() -> None:
    """Print one line a stage."""
    parser = argparse.ArgumentParser()
    parser.add_argument("config")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--response-tokens", type=float)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=1)
    arguments = parser.parse_args()
    config = load_experiment(arguments.config, arguments.overrides)
    found: Pairs = defaultdict(list)
    for _ in range(arguments.rounds):
        with tempfile.TemporaryDirectory() as name:
            measure_round(config, BenchOptions(arguments.steps, arguments.response_tokens), Path(name), found)
    show(found)


def show(found: Pairs) -> None:
    """Print what was predicted beside what it took."""
    table = Table("stage", "predicted s", "real s", "predicted / real", "of each round")
    for node, pairs in found.items():
        predicted, real = (statistics.median(column) for column in zip(*pairs, strict=True))
        ratios = [expected / seconds for expected, seconds in pairs]
        each = ", ".join(f"{ratio:.2f}" for ratio in ratios)
        table.add_row(node, f"{predicted:.1f}", f"{real:.1f}", f"{statistics.median(ratios):.2f}", each)
    sums = [tuple(map(sum, zip(*of_round, strict=True))) for of_round in zip(*found.values(), strict=True)]
    ratios = [expected / seconds for expected, seconds in sums]
    predicted, real = (statistics.median(column) for column in zip(*sums, strict=True))
    each = ", ".join(f"{ratio:.2f}" for ratio in ratios)
    table.add_row("all of them", f"{predicted:.1f}", f"{real:.1f}", f"{statistics.median(ratios):.2f}", each)
    Console().print(table)


if __name__ == "__main__":
    main()
