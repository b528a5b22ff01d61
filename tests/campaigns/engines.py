"""Do the embedded engine and Ray with vLLM learn the same, and what does staleness cost and win?

Run: python tests/campaigns/engines.py --workspace workspace/engines [--seeds 3]

LUFFY on the arithmetic task from one base, for the same number of RL steps: `cluster: local`; `cluster: ray` with two
DeepSpeed ranks and one vLLM engine at `rl.max_staleness` 0, 1 and 2 (above 0 with a truncated importance correction).
Every checkpoint is evaluated greedily by the embedded engine. Stages are cached: a killed campaign goes on where it
was. Arms run one after the other, since they share the machine's cores. Prints Markdown.
"""

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from luffy.config import load_experiment
from luffy.evaluation.results import read_results
from luffy.pipeline.experiment import StageObserver, open_experiment, start_run
from luffy.pipeline.workspace import find_workspace
from luffy.tracking.metrics import METRICS_FILE, read_metrics

CONFIG = Path(__file__).resolve().parents[2] / "exp_configs/arithmetic.yaml"
STEPS = 48
SHARED = [
    "name=engines", "chain=rl", "method=luffy", f"rl.steps={STEPS}",
    "evaluation.decodings={greedy: {temperature: 0.0}}",
    # vLLM has no attention of 24 dimensions a head on CPU.
    "model.architecture.num_heads=3",
]  # fmt: skip
RAY = [
    "cluster=ray",
    "execution.zero_stage=2",
    "execution.ray={trainer_ranks: 2}",
    "execution.vllm.cpu_kv_cache_gb=0.5",
]
CORRECTED = ["rl.correction={kind: truncate}"]
ARMS = {
    "local": [],
    "ray, k = 0": RAY,
    "ray, k = 1": [*RAY, *CORRECTED, "rl.max_staleness=1"],
    "ray, k = 2": [*RAY, *CORRECTED, "rl.max_staleness=2"],
}
SUITES = ("in_distribution", "other_mix", "retention")
# What a run needs to warm up says nothing of how it goes on.
SKIPPED_STEPS = 5


@dataclass(frozen=True)
class Outcome:
    accuracy: dict[str, float]
    trainer_idle: float
    engine_idle: float
    step_s: float
    logp_gap: float
    staleness: float


def run_arm(arm: str, seed: int, workspace: Path) -> Outcome:
    config = load_experiment(CONFIG, [*SHARED, *ARMS[arm], f"rl.seed={seed}"])
    experiment = open_experiment(config, find_workspace(workspace))
    folders = {}
    with start_run(experiment) as run:
        for plan in experiment.plan():
            if plan.node.name not in ("evaluate_base", "report"):
                run.execute(plan.node.name, StageObserver())
                folders[plan.node.name] = plan.directory
    rows = read_metrics(folders["rl"] / METRICS_FILE)[SKIPPED_STEPS:]
    found = Outcome(
        accuracy={row.suite: row.accuracy for row in read_results(folders["evaluate_rl"] / "results.json").rows},
        trainer_idle=statistics.fmean(row["perf/trainer_idle_share"] for row in rows),
        engine_idle=statistics.fmean(row["perf/engine_idle_share"] for row in rows),
        step_s=statistics.median(row["perf/step_s"] for row in rows),
        logp_gap=statistics.fmean(row["rollout/logp_gap_mean"] for row in rows),
        staleness=statistics.fmean(row.get("rollout/staleness_mean", 0.0) for row in rows),
    )
    print(f"{arm}, seed {seed}: {found}", flush=True)
    return found


def table(outcomes: dict[str, list[Outcome]]) -> str:
    lines = [
        "| arm | " + " | ".join(SUITES) + " | trainer idle | engine idle | s a step | gap (nats) | staleness | seeds |",
        "|---" * (len(SUITES) + 7) + "|",
    ]
    for arm, found in outcomes.items():
        cells = [spread([100 * outcome.accuracy[suite] for outcome in found]) for suite in SUITES]
        cells += [f"{100 * mean(found, name):.0f} %" for name in ("trainer_idle", "engine_idle")]
        cells += [f"{mean(found, 'step_s'):.2f}", f"{mean(found, 'logp_gap'):.1e}", f"{mean(found, 'staleness'):.2f}"]
        lines.append(f"| {arm} | {' | '.join(cells)} | {len(found)} |")
    return "\n".join(lines)


def mean(found: Sequence[Outcome], name: str) -> float:
    return statistics.fmean(getattr(outcome, name) for outcome in found)


def spread(values: Sequence[float]) -> str:
    return f"{statistics.fmean(values):.1f} ± {statistics.stdev(values):.1f}" if len(values) > 1 else f"{values[0]:.1f}"


def main() -> None:
    """Run all arms, seed by seed, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workspace", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=list(ARMS))
    options = parser.parse_args()
    outcomes: dict[str, list[Outcome]] = {arm: [] for arm in options.arms}
    for seed in range(1, options.seeds + 1):
        for arm in options.arms:
            outcomes[arm].append(run_arm(arm, seed, options.workspace))
    print(table(outcomes))


if __name__ == "__main__":
    main()
