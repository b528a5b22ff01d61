"""What a reader's first run gives, and how long it takes: an experiment from several seeds, rounded twice.

Run: python tests/benchmarks/first_result.py [EXPERIMENT] [--seeds 0 1 2 3 4] [--roundings native halves] [--at-once 1]
     [--workspace DIR]

The experiment is the default one, `arithmetic`, or another shipped one with a base, SFT and RL, such as `own_data`.

Another kind of CPU adds numbers in another order, so each seed is run with two kinds of rounding: `native` as
configured, and `halves` with micro-batches of half the tokens. Finished stages are reused, so that the same command
continues; each rounding has a workspace of its own in DIR (workspace/first_result unless given), since it is no part of
a stage's key. Times are those of the stages when they were made: read them only from runs that had the machine to
themselves.
"""

import argparse
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import fmean

from measuring import ROOT, show

import luffy
from luffy.api.runs import read_accuracies
from luffy.config import load_experiment
from luffy.config.yaml_source import Value
from luffy.pipeline.manifest import read_manifest

CHECKPOINTS = ("base", "sft", "rl")


@dataclass(frozen=True, slots=True)
class FirstResult:
    """One run: greedy accuracies in percent by suite and checkpoint, seconds by stage."""

    name: str
    accuracies: dict[str, dict[str, float]]
    seconds: dict[str, float]


def result_of(experiment: str, seed: int, rounding: str, workspace: Path) -> FirstResult:
    """Run the experiment, or read it where it has been run."""
    file = ROOT / "exp_configs" / f"{experiment}.yaml"
    half = load_experiment(file).execution.micro_batch_tokens // 2
    fields: dict[str, Value] = {"seed": seed, "execution": {"micro_batch_tokens": half} if rounding == "halves" else {}}
    run = luffy.run(file, fields, workspace=workspace / rounding, quiet=True)
    folders = {node: stage.directory for node, stage in run.record.stages.items()}
    accuracies: dict[str, dict[str, float]] = {}
    for found in read_accuracies(folders.values()):
        if found.decoding == "greedy":
            accuracies.setdefault(found.suite, {})[found.checkpoint] = 100 * found.accuracy
    manifests = {node: read_manifest(folder) for node, folder in folders.items()}
    seconds = {node: manifest.total_s for node, manifest in manifests.items() if manifest is not None}
    return FirstResult(f"{seed} {rounding}", accuracies, seconds)


def ranged(values: Sequence[float]) -> str:
    """Mean and range."""
    return f"{fmean(values):.1f} [{min(values):.1f}, {max(values):.1f}]"


def main() -> None:
    """Print a row for each run and one for all of them, for each suite."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("experiment", nargs="?", default="arithmetic")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    kinds = ["native", "halves"]
    parser.add_argument("--roundings", nargs="+", choices=kinds, default=kinds)
    parser.add_argument("--at-once", type=int, default=1, help="runs side by side")
    parser.add_argument("--workspace", type=Path, default=ROOT / "workspace" / "first_result")
    options = parser.parse_args()
    jobs = product([options.experiment], options.seeds, options.roundings, [options.workspace])
    with ThreadPoolExecutor(options.at_once) as pool:  # where one fails, `map` cancels those that have not begun
        results = list(pool.map(lambda job: result_of(*job), jobs))
    for suite in results[0].accuracies:
        scores = [[result.accuracies[suite][name] for name in CHECKPOINTS] for result in results]
        rows = [(result.name, *(f"{each:.1f}" for each in row)) for result, row in zip(results, scores, strict=True)]
        rows.append((f"mean, range of {len(results)}", *map(ranged, zip(*scores, strict=True))))
        show(("seed, rounding", *CHECKPOINTS), rows, f"{suite}, greedy accuracy in %")
    stages = list(results[0].seconds)
    times = [[*(result.seconds[node] for node in stages), sum(result.seconds.values())] for result in results]
    rows = [(result.name, *(f"{each:.0f}" for each in row)) for result, row in zip(results, times, strict=True)]
    show(("seed, rounding", *stages, "all"), rows, "Seconds")


if __name__ == "__main__":
    main()
